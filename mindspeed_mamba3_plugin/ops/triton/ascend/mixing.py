"""Stage `mix`: what stands between two products of rows with rows, element by element.

mixed = mixing . scores,   mixed_w = mixing . W,   dmixing = sum over rank pairs of scores . W

All are kept as blocks of rows and columns, by the parts of a chunk: (0, 0) and, with two parts, (1, 0) and (1, 1).
Above the diagonal mixing is 0.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..blocks import narrow
from ..plan import Plan


@triton.jit
def _mix_kernel(
    scores, mixing, mixed, tasks, CS: tl.constexpr, RP: tl.constexpr, HB: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    L: tl.constexpr = RP * CS
    SHARE: tl.constexpr = CS // BT
    rank = tl.arange(0, RP)[None, None, :, None]
    u = tl.arange(0, CS)[None, None, None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        block = tl.cast(i // SHARE, tl.int64) * HB + tl.arange(0, HB)[:, None, None, None]
        t = (i % SHARE) * BT + tl.arange(0, BT)[None, :, None, None]
        mix = tl.broadcast_to(tl.load(mixing + (block * CS + t) * CS + u), (HB, BT, RP, CS))
        place = (block * L + t) * L + rank * CS + u
        for r in range(0, RP):
            at = place + r * (CS * L)
            tl.store(mixed + at, narrow(tl.load(scores + at) * mix, mixed.dtype.element_ty))


@triton.jit
def _mix_bwd_kernel(
    scores, w, mixing, mixed_w, dmixing, inside, tasks,
    CS: tl.constexpr, RP: tl.constexpr, HB: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    L: tl.constexpr = RP * CS
    SHARE: tl.constexpr = CS // BT
    rank = tl.arange(0, RP)[None, None, :, None]
    u = tl.arange(0, CS)
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        blocks = tl.cast(i // SHARE, tl.int64) * HB + tl.arange(0, HB)
        tokens = (i % SHARE) * BT + tl.arange(0, BT)
        small = (blocks[:, None, None] * CS + tokens[None, :, None]) * CS + u[None, None, :]
        mix = tl.broadcast_to(tl.load(mixing + small)[:, :, None, :], (HB, BT, RP, CS))
        row = blocks[:, None, None, None] * L + tokens[None, :, None, None]
        place = row * L + rank * CS + u[None, None, None, :]
        pairs = tl.zeros((HB, BT, RP, CS), dtype=tl.float32)
        shares = tl.zeros((HB, BT, RP, CS), dtype=tl.float32)
        for r in range(0, RP):
            at = place + r * (CS * L)
            here = tl.load(w + at)
            score = tl.load(scores + at)
            pairs += here * score
            # Rounded as the products had it: decay_bwd takes this off a sum with these bits.
            shares += here * narrow(score * mix, mixed_w.dtype.element_ty).to(tl.float32)
            tl.store(mixed_w + at, narrow(here * mix, mixed_w.dtype.element_ty))
        tl.store(dmixing + small, tl.sum(pairs, axis=2))
        tl.store(inside + blocks[:, None] * CS + tokens[None, :], tl.sum(tl.sum(shares, axis=2), axis=2))


def _sizes(blocks: int, plan: Plan, tiles: int) -> tuple[int, dict[str, int]]:
    """Tasks, and the sizes of a [HB blocks, BT tokens, L] tile of `tiles` times the usual size."""
    BT = max(1, min(plan.CS, tiles * plan.tile_elements // plan.L))
    HB = plan.divisor(blocks, plan.CS * plan.L // tiles)
    return blocks // HB * (plan.CS // BT), {"CS": plan.CS, "RP": plan.RP, "HB": HB, "BT": BT}


def mix(scores: Tensor, mixing: Tensor, plan: Plan) -> Tensor:
    """mixing . scores in the operand dtype, from fp32 scores [chunks, H, blocks, L, L] and mixing [chunks, H, blocks,
    CS, CS]."""
    mixed = torch.empty(scores.shape, dtype=plan.dtype, device=scores.device)
    tasks, sizes = _sizes(scores[..., 0, 0].numel(), plan, 4 if plan.RP > 1 else 2)
    _mix_kernel[plan.vector_grid(tasks)](scores, mixing, mixed, tasks, **sizes)
    return mixed


def mix_bwd(scores: Tensor, w: Tensor, mixing: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient w of mixed, fp32, to those of scores, in the operand dtype, and of mixing, fp32; and each
    token's sum of mixed . w, fp32 [chunks, H, blocks, CS]."""
    mixed_w = torch.empty(w.shape, dtype=plan.dtype, device=w.device)
    dmixing = torch.empty_like(mixing)
    inside = torch.empty(mixing.shape[:-1], dtype=torch.float32, device=w.device)
    tasks, sizes = _sizes(w[..., 0, 0].numel(), plan, 1)
    _mix_bwd_kernel[plan.vector_grid(tasks)](scores, w, mixing, mixed_w, dmixing, inside, tasks, **sizes)
    return mixed_w, dmixing, inside


def as_blocks(mixing: Tensor, plan: Plan) -> Tensor:
    """[..., C, C] -> [..., blocks, CS, CS]."""
    CS = plan.CS
    if plan.parts == 1:
        return mixing[..., None, :, :].contiguous()
    own = mixing[..., :CS, :CS], mixing[..., CS:, :CS], mixing[..., CS:, CS:]
    return torch.stack(own, dim=-3)


def as_square(blocks: Tensor, plan: Plan) -> Tensor:
    """[..., blocks, CS, CS] -> [..., C, C], 0 above the diagonal blocks."""
    if plan.parts == 1:
        return blocks[..., 0, :, :]
    above, below, last = blocks.unbind(-3)
    return torch.cat((F.pad(above, (0, plan.CS)), torch.cat((below, last), dim=-1)), dim=-2)
