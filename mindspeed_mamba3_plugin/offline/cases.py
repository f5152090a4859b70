"""What is compiled and judged without a chip: the official shapes, the options that training uses, and every launch
that the operator makes for them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from types import ModuleType
from unittest import mock

import torch

from ..ops.types import Inputs
from .launches import Chip, Launch, TorchCall, TorchCalls, intercepted

B, S, H, G = 4, 2048, 16, 1  # of every official shape
ENTRIES = ("forward", "bwd_fwd", "bwd_bwd")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
VARIANTS = ("plain", "norm", "packed")  # all with Z, D and the sum over ranks


@dataclass(frozen=True)
class Shape:
    name: str
    N: int
    P: int
    R: int
    C: int  # upstream's chunk size at this shape


@lru_cache(maxsize=1)
def official_times() -> dict[str, dict[str, float]]:
    """Published times by shape in ms: an A100 (TileLang), and a 910B3 with the public Triton and AscendC ports."""
    return json.loads(files(__package__).joinpath("official_times.json").read_text())


@lru_cache(maxsize=1)
def official_shapes() -> tuple[Shape, ...]:
    sizes = {name: map(int, re.fullmatch(r"N(\d+)_P(\d+)_R(\d+)_C(\d+)", name).groups()) for name in official_times()}
    return tuple(Shape(name, *s) for name, s in sizes.items())


@dataclass(frozen=True)
class Case:
    shape: Shape
    dtype: str
    variant: str

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.dtype} {self.variant}"


def inputs(case: Case, device: str = "meta", batch: int = B, length: int = S, heads: int = H) -> Inputs:
    """Inputs of a case, without values on the meta device."""
    dtype, R, N, P = DTYPES[case.dtype], case.shape.R, case.shape.N, case.shape.P
    packed = case.variant == "packed"
    if packed:
        batch, length = 1, batch * length

    def new(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device=device)

    return Inputs(
        Q=new(batch, length, R, G, N, of=dtype),
        K=new(batch, length, R, G, N, of=dtype),
        V=new(batch, length, heads, P, of=dtype),
        ADT=new(batch, heads, length),
        DT=new(batch, heads, length),
        Trap=new(batch, heads, length, of=dtype),
        Q_bias=new(heads, R, N),
        K_bias=new(heads, R, N),
        MIMO_V=new(heads, R, P),
        MIMO_Z=new(heads, R, P),
        MIMO_Out=new(heads, R, P),
        Angles=new(batch, length, heads, N // 4),
        D=new(heads),
        Z=new(batch, length, heads, P, of=dtype),
        outproj_norm_weight=new(heads, P) if case.variant == "norm" else None,
        cu_seqlens=torch.empty(6, dtype=torch.int32, device=device) if packed else None,
        chunk_size=case.shape.C,
        rotary_dim_divisor=4,
        dtype=dtype,
        return_state=case.variant == "plain",
        fuse_norm=case.variant == "norm",
        norm_eps=1e-5,
    )


@dataclass
class Pass:
    """What one entry point does on the device, in order."""

    launches: list[Launch] = field(default_factory=list)
    torch_calls: list[TorchCall] = field(default_factory=list)


def passes(case: Case, chip: Chip, family: ModuleType) -> dict[str, Pass]:
    """What the entry points do for one case.

    Raises:
        ValueError: the family does not take the sizes on this chip.
    """
    x = inputs(case)
    made = {entry: Pass() for entry in ENTRIES}

    @contextmanager
    def recorded(entry: str) -> Iterator[None]:
        with intercepted(chip, made[entry].launches.append), TorchCalls(made[entry].torch_calls.append):
            yield

    with mock.patch.object(family, "target_of", lambda device: "npu"):
        with recorded("forward"):
            out, _ = family.forward(x)
        with recorded("bwd_fwd"):
            residuals = family.bwd_fwd(x, out)
        with recorded("bwd_bwd"):
            family.bwd_bwd(x, residuals)
    return made
