"""Tile sizes per target: the only place that knows on-chip sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .. import registry
from ..types import Inputs


def next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _in_parts(RP: int, C: int) -> bool:
    """Whether a chunk is cut into two parts: not below 64 rows or 8 tokens each."""
    return RP * C >= 128 and C >= 16


@dataclass(frozen=True)
class Plan:
    """Sizes of one launch. A chunk holds C tokens of R ranks, rank padded to RP, its M rows in (rank, token) order.
    Where they are many, those of its first C / 2 tokens come first: products of rows with rows are then made by
    blocks of L by L, without the one above the diagonal.

    The state dimension is kept in two halves of NH columns each (the partners n and N/2 + n of a rotation), padded
    with zeros, and the head dimension padded to PP: tensor-core and cube tiles want at least 16.
    """

    dtype: torch.dtype  # of the matrix operands, and so of most tensors between kernels
    C: int
    RP: int
    NH: int
    PP: int
    tile_elements: int  # fp32 elements of one tile in an element-wise kernel
    chunks: int  # that one task of an element-wise kernel with parameters of a head walks
    state_elements: int  # of the state, or of one half of it, that one program of a scan carries
    cube_cores: int  # upper bound of programs of a kernel with products; 0 is one program a task
    vector_cores: int  # the same for element-wise kernels
    cut_tiles: bool  # whether a tile can be cut (an extension of triton-ascend)
    cube: dict[str, int]  # launch options of kernels with matrix products
    largest: dict[str, int]  # the same for the one with the most operands

    @property
    def M(self) -> int:
        return self.RP * self.C

    @property
    def parts(self) -> int:
        return 2 if _in_parts(self.RP, self.C) else 1

    @property
    def blocks(self) -> int:
        return self.parts * (self.parts + 1) // 2

    @property
    def CS(self) -> int:
        """Tokens of a part."""
        return self.C // self.parts

    @property
    def L(self) -> int:
        """Rows of a part."""
        return self.RP * self.CS

    @property
    def N2(self) -> int:
        return 2 * self.NH

    @property
    def share_dtype(self) -> torch.dtype:
        """Of a share of a gradient that is no sum to be cancelled. fp16 might not have its range."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    def by_rank(self, rows: Tensor) -> Tensor:
        """Rows [., H, M, W] of chunks as [., H, RP, C, W]."""
        return rows.unflatten(2, (self.parts, self.RP, self.CS)).transpose(2, 3).flatten(3, 4)

    def tokens(self, width: int) -> int:
        """Tokens of a [RP, tokens, width] tile in an element-wise kernel; divides CS."""
        return max(1, min(self.CS, self.tile_elements // (self.RP * width)))

    def heads(self, heads: int, width: int) -> int:
        """Heads of a tile of an element-wise kernel with `width` elements a head; a power of 2."""
        return max(1, min(next_power_of_2(heads), self.tile_elements // width))

    def divisor(self, tasks: int, width: int) -> int:
        """How many of `tasks` with `width` elements each make a tile: a power of 2 that divides their number."""
        return max(1, min(tasks & -tasks, self.tile_elements // width))

    def walk(self, chunks: int, heads: int) -> int:
        """Chunks of a head that one task walks, with at least twelve tasks for every core: less than one in twelve of
        its time is lost where they do not divide evenly."""
        return max(1, min(self.chunks, chunks * heads // (12 * max(1, self.vector_cores))))

    def rotated(self, angles: int) -> int:
        """Columns of a half that the table of cosines and sines holds: those of the angles where they make whole
        rows, else all, with 1 and 0 where nothing is rotated."""
        return angles if angles % 16 == 0 and angles == next_power_of_2(angles) else self.NH

    def cube_grid(self, tasks: int) -> tuple[int]:
        return (min(tasks, self.cube_cores or tasks),)

    def vector_grid(self, tasks: int) -> tuple[int]:
        return (min(tasks, self.vector_cores or tasks),)


# On-chip bytes that the matrix products of a chunk share on an Ascend 910B.
_L1, _L0C = 512 * 1024, 128 * 1024


def _ascend_tokens(N: int, P: int, R: int, dtype: torch.dtype) -> tuple[int, bool]:
    """Tokens of a chunk: up to 128 rows and 64 tokens, of the sizes that fit the one with the fewest bytes a token;
    and whether the operands of a next chunk fit beside it.

    L0C keeps one result at a time. L1 keeps what the largest kernel, `products`, takes.
    """
    RP, N2, PP = next_power_of_2(R), 2 * max(8, next_power_of_2(N // 2)), max(16, next_power_of_2(P))
    best = None
    for C in (128, 64, 32, 16, 8):
        M = RP * C
        l0c = 4 * max(M * N2, M * PP, M * M, N2 * PP)
        square = M * M * 3 // 4 if _in_parts(RP, C) else M * M
        l1 = dtype.itemsize * (2 * M * N2 + 2 * N2 * PP + 3 * M * PP + 2 * square)
        # Forward and backward move 30 bytes of a product of rows with rows and 28 of a state, half of these slowly.
        cost = (30 * square + 42 * N2 * PP) / C
        if (M >= 64 or best is None) and M <= 128 and l0c <= _L0C and l1 <= _L1 and (best is None or cost < best[0]):
            best = cost, C, 2 * l1 <= _L1
    if best:
        return best[1:]
    raise ValueError(
        f"N = {N}, P = {P}, R = {R}, operands in {dtype}: the matrix products of {C} tokens have {M} rows and need "
        f"{l0c} bytes of L0C and {l1} of L1; an Ascend 910B has {_L0C} and {_L1}, and at most 128 rows are taken"
    )


def operand_dtype(x: Inputs) -> torch.dtype:
    """dtype of the plain family's matrix operands: the caller's, but fp32 with the fused norm.

    The norm divides by |O|, which may be far smaller than the terms it is the sum of, and what it hands back is
    orthogonal to O: rounded operands then cost several percent of a gradient (R = 1, the first tokens of a sequence).
    """
    return torch.float32 if x.fuse_norm else x.dtype


@lru_cache(maxsize=256)
def plain_plan(N: int, P: int, R: int, dtype: torch.dtype, target: str) -> Plan:
    """The plan of the plain family, operands in `dtype`; target is "npu", "cuda" or "cpu" (the interpreter).

    Raises:
        ValueError: the sizes do not fit on the chip, naming them.
    """
    RP, NH, PP = next_power_of_2(R), max(8, next_power_of_2(N // 2)), max(16, next_power_of_2(P))
    if NH > 256 or PP > 256 or RP > 64:
        raise ValueError(f"N = {N}, P = {P}, R = {R}: the Triton kernels take N <= 512, P <= 256 and R <= 64")
    if target == "npu":
        tile = 2048 if dtype == torch.float32 else 4096
        C, ahead = _ascend_tokens(N, P, R, dtype)
        largest = {} if ahead else {"multibuffer": False}
        return Plan(dtype, C, RP, NH, PP, tile, 16, 2048, *_ascend_cores(), True, {}, largest)
    if target == "cuda":
        # One program does one task: loading a next one ahead would only take up shared memory.
        once = {"num_stages": 1}
        rows = 32  # fp32 products are unrolled into single multiply-adds
        if dtype != torch.float32:
            # 16 tokens where 128 rows hold them: the states are rounded at every bound of a chunk.
            rows = max(64, min(128, 16 * RP))
            # ptxas 12.8 (in Triton 3.6) makes wgmma read a narrower right operand from an address that nothing set.
            NH, PP = max(32, NH), max(64, PP)
        return Plan(dtype, max(1, rows // RP), RP, NH, PP, 2048, 1, 512, 0, 0, False, once, once)
    # The interpreter is fastest with few, large programs.
    return Plan(dtype, max(16, 128 // RP), RP, NH, PP, 1 << 20, 2, 512, 0, 0, False, {}, {})


@dataclass(frozen=True)
class GpuPlan:
    """Sizes of a call in the GPU family: chunks of C tokens of R ranks (padded to RP) are the rows of a tile; columns
    are cut into tiles, NT of width NW in each half of N and PT of width PW in P."""

    C: int
    RP: int
    NT: int
    NW: int
    PT: int
    PW: int
    split: bool  # whether a matrix operand is the sum of two of 16 bits
    own: dict[str, int]  # launch options of the states' kernel
    outputs: dict[str, int]  # of the main kernels
    norm: dict[str, int]
    sinks: dict[str, int]
    sources: dict[str, int]
    store_dtype: torch.dtype  # of cosines, sines and small weights as the kernels read them
    walk: dict[str, int] | None  # tile of a walk over the chunks, chunks loaded ahead, launch options; where it pays
    walkers: int  # programs that a walk needs, to fill the card

    @property
    def NH(self) -> int:
        return self.NT * self.NW

    @property
    def PP(self) -> int:
        return self.PT * self.PW

    @property
    def tiles(self) -> dict[str, int]:
        """Tile sizes, and whether operands are split, as the kernels' arguments."""
        return {name: getattr(self, name) for name in ("C", "RP", "NT", "NW", "PT", "PW")} | {"SPLIT": self.split}

    def state_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of states in memory, in a call whose operands are in `dtype`."""
        return torch.float32 if self.split else dtype

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Of sums over the tokens of a chunk. Sums of fp16 would need its precision and a wider range."""
        return torch.bfloat16 if dtype == torch.bfloat16 and not self.split else torch.float32


# Shared memory that one program may have, KiB by compute capability; others are taken for the smallest.
_SHARED_KIB = {0: 1 << 20, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227}


@lru_cache(maxsize=256)
def gpu_plan(N: int, P: int, R: int, dtype: torch.dtype, capability: int, split: bool = False) -> GpuPlan:
    """The plan of the GPU family; capability as in sm_90, 0 is the interpreter. With `split` operands of 16 bits are
    to have twice the bits.

    Raises:
        ValueError: the sizes do not fit on the chip, or the dtype has no matrix product, naming them.
    """
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"dtype is {dtype}: the Triton kernels take float16, bfloat16 or float32")
    RP, NH, PP = next_power_of_2(R), max(16, next_power_of_2(N // 2)), max(16, next_power_of_2(P))
    if NH > 128 or PP > 128 or RP > 64:
        raise ValueError(f"N = {N}, P = {P}, R = {R}: the GPU kernels take N <= 256, P <= 128 and R <= 64")
    # Small tiles in the interpreter: short tests then cross the bounds of chunks and tiles. fp32 products unroll into
    # single multiply-adds: small tiles keep their operands in registers. So do 32 rows without wgmma, or 16 of twice
    # the operands.
    single, wgmma = dtype == torch.float32, capability >= 90
    split &= not single
    if split and wgmma:
        # ptxas 12.8 (in Triton 3.6) makes wgmma read a narrower right operand from an address that nothing set.
        PP = max(64, PP)
    small = single or (split and not wgmma)
    rows, width = (32, 16) if capability == 0 else (16, 32) if small else (64 if wgmma else 32, 64)
    shared = 1024 * _SHARED_KIB.get(capability, 99)
    copies = 4 if single or wgmma or capability == 0 else 8
    size = dtype.itemsize * (2 if split and wgmma else 1)  # without wgmma the low halves stay in registers
    while (need := _shared_bytes(max(rows, RP), NH, PP, size, copies)) > shared and rows > max(16, RP):
        rows //= 2
    if need > shared:
        raise ValueError(
            f"N = {N}, P = {P}, R = {R} in {dtype} need {need} bytes of shared memory, sm_{capability} has {shared}"
        )
    C, NW, PW = max(1, rows // RP), min(NH, width), min(PP, width)
    how = {"num_warps": 4}
    sinks = sources = how
    if wgmma and not single and not split:
        # With 168 registers a third program fits on a multiprocessor, where they spill little; where there are fewer
        # than 255 would do, addresses are worked out anew. Measured shape by shape.
        third, large = how | {"maxnreg": 168, "ANEW": True}, PP > 64
        fits = max(2 * NH, PP) <= 64 or (2 * NH <= 128 and not large and RP >= 4)
        half = max(2 * NH, PP) <= 64 or PP <= 32 or RP > 4
        sinks = third if fits and half else how | {"ANEW": large or NH > 64 or RP == 1}
        sources = third if fits else how | {"ANEW": large}
    # A walk moves half of the states' bytes, step by step: measured, it pays where they are large beside the rest.
    walk, walkers = None, 128
    if capability == 0 and not split:
        walk, walkers = {"NW": min(NH, 8), "PW": 16, "AHEAD": 1}, 4
    elif wgmma and not single and not split and 2 <= RP <= 8 and PP >= 64 and 2 * NH * PP >= 8192:
        walk = how | {"NW": min(NH, 32), "PW": 64, "AHEAD": 3}
    store = torch.float32 if single or split else torch.float16
    return GpuPlan(C, RP, NH // NW, NW, PP // PW, PW, split, how, how, how, sinks, sources, store, walk, walkers)


def _shared_bytes(M: int, NH: int, PP: int, size: int, copies: int) -> int:
    """Shared memory of the main kernels: a state, q and k (twice where wgmma does not read them from there in either
    order), v and the gradient of O, and what reductions take."""
    return size * (2 * NH * PP + copies * NH * M + 2 * PP * M) + 2560


def target_of(device: torch.device) -> str:
    """The plan target of a device."""
    return "cpu" if registry.interpreted() else device.type


@lru_cache(maxsize=1)
def _ascend_cores() -> tuple[int, int]:
    from triton.runtime import driver

    properties = driver.active.utils.get_device_properties(driver.active.get_current_device())
    return properties["num_aicore"], properties["num_vectorcore"]
