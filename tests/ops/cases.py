"""Random inputs for the operator, tensors surrounded by NaN, and buffers that betray a missing or stray write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_mamba3_plugin import platforms
from mindspeed_mamba3_plugin.ops.types import GRADIENT_NAMES, TENSOR_ARGS, Gradients, Inputs

DEVICE = platforms.detect()
BAND = 64  # elements on either side of every tensor
SENTINEL = 12345.0


def make(
    B: int = 1, S: int = 36, H: int = 2, G: int = 1, R: int = 2, N: int = 16, P: int = 16, *, divisor: int = 4,
    chunk_size: int = 16, z: bool = True, d: bool = True, reduce: bool = True, norm: bool = False,
    weight: bool = True, cu_seqlens: list[int] | None = None, return_state: bool = False,
    dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu",
) -> Inputs:  # fmt: skip
    """Inputs like those of upstream's tests: activations in `dtype`, parameters and step sizes in fp32 (fp64 when
    `dtype` is), every tensor with NaN on both sides."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape: int, of: torch.dtype = wide) -> Tensor:
        return surrounded(torch.randn(*shape, generator=g, dtype=torch.float64).to(device, of))

    dt = F.softplus(torch.randn(B, H, S, generator=g, dtype=torch.float64) - 3)
    a = -torch.rand(B, H, S, generator=g, dtype=torch.float64) * 2
    return Inputs(
        Q=normal(B, S, R, G, N, of=dtype),
        K=normal(B, S, R, G, N, of=dtype),
        V=normal(B, S, H, P, of=dtype),
        ADT=surrounded((a * dt).to(device, wide)),
        DT=surrounded(dt.to(device, wide)),
        Trap=normal(B, H, S, of=dtype),
        Q_bias=normal(H, R, N),
        K_bias=normal(H, R, N),
        MIMO_V=normal(H, R, P),
        MIMO_Z=normal(H, R, P) if z else None,
        MIMO_Out=normal(H, R, P) if reduce else None,
        Angles=normal(B, S, H, N // divisor),
        D=normal(H) if d else None,
        Z=normal(B, S, H, P, of=dtype) if z else None,
        outproj_norm_weight=normal(H, P) if norm and weight else None,
        cu_seqlens=torch.tensor(cu_seqlens, device=device) if cu_seqlens is not None else None,
        chunk_size=chunk_size,
        rotary_dim_divisor=divisor,
        dtype=dtype,
        return_state=return_state,
        fuse_norm=norm,
        norm_eps=1e-5,
    )


def surrounded(t: Tensor) -> Tensor:
    """A contiguous copy of t inside a larger buffer of NaN."""
    buffer = torch.full((t.numel() + 2 * BAND,), torch.nan, dtype=t.dtype, device=t.device)
    inner = buffer[BAND : BAND + t.numel()].view(t.shape)
    return inner.copy_(t)


def exact(x: Inputs) -> Inputs:
    """The same numbers in fp64 on the CPU, for the reference."""
    given = {n: t.detach().cpu().double() for n, t in zip(TENSOR_ARGS, x.tensors, strict=True) if t is not None}
    cu = x.cu_seqlens.cpu() if x.cu_seqlens is not None else None
    return replace(x, **given, cu_seqlens=cu, dtype=torch.float64)


@contextmanager
def guarded() -> Iterator[None]:
    """Every buffer made inside starts as NaN between two bands of a sentinel, which must be there at the end."""
    empty, buffers = torch.empty, []

    def guarded_empty(*size, dtype=None, device=None, **kwargs) -> Tensor:
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        kind = dtype or torch.get_default_dtype()
        if not kind.is_floating_point or kwargs:
            return empty(*size, dtype=dtype, device=device, **kwargs)
        count = torch.Size(shape).numel()
        buffer = empty(count + 2 * BAND, dtype=kind, device=device).fill_(SENTINEL)
        buffer[BAND : BAND + count] = torch.nan
        buffers.append(buffer)
        return buffer[BAND : BAND + count].view(shape)

    def guarded_empty_like(t: Tensor, dtype=None, device=None) -> Tensor:
        return guarded_empty(t.shape, dtype=dtype or t.dtype, device=device or t.device)

    with mock.patch("torch.empty", guarded_empty), mock.patch("torch.empty_like", guarded_empty_like):
        yield
    assert buffers, "the code under test made no buffer"
    for buffer in buffers:
        assert (buffer[:BAND] == SENTINEL).all() and (buffer[-BAND:] == SENTINEL).all(), "a write outside its buffer"


def relative_error(ours: Tensor, true: Tensor) -> float:
    """Relative L2 error; infinite when ours is not finite."""
    ours, true = ours.detach().cpu().double(), true.detach().cpu().double()
    assert ours.shape == true.shape, f"{tuple(ours.shape)} instead of {tuple(true.shape)}"
    if not torch.isfinite(ours).all():
        return float("inf")
    scale = true.norm()
    return float((ours - true).norm() / scale) if scale > 0 else float(ours.norm())


def peak_error(ours: Tensor, true: Tensor) -> float:
    """Largest error as a share of the largest true value; the error itself where the truth is 0."""
    ours, true = ours.detach().cpu().double(), true.detach().cpu().double()
    if not true.numel():
        return 0.0
    scale = float(true.abs().max())
    return float((ours - true).abs().max()) / (scale if scale > 0 else 1.0)


def gradient_errors(ours: Gradients, true: Gradients) -> dict[str, float]:
    """Relative L2 error by gradient; checks that the same gradients are absent."""
    errors = {}
    for name, a, b in zip(GRADIENT_NAMES, ours, true, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            errors[name] = relative_error(a, b)
    return errors
