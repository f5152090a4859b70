"""The argument contract of the operator: every fault is named before any work is done."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from . import MIN_CHUNK_SIZE
from .types import OPTIONAL_ARGS, TENSOR_ARGS, Inputs

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def checked(x: Inputs) -> Inputs:
    """Check every argument; returns the inputs with the norm weight as [H, P].

    Raises:
        ValueError: an argument is outside the contract; the message names it, what was given and what is allowed.
        TypeError: an argument has a type or dtype that is not allowed.
    """
    _check_types(x)
    if x.Q.ndim != 5:
        raise ValueError(f"Q has shape {tuple(x.Q.shape)}: must be [B, S, R, G, N]")
    if x.V.ndim != 4:
        raise ValueError(f"V has shape {tuple(x.V.shape)}: must be [B, S, H, P]")
    B, S, H, G, R, N, P = x.sizes
    if min(B, R, G, N, H, P) < 1:
        raise ValueError(f"Q {tuple(x.Q.shape)} and V {tuple(x.V.shape)}: only S may be 0")
    if H % G:
        raise ValueError(f"V has {H} heads and Q {G} groups: the heads must be a multiple of the groups")
    if x.rotary_dim_divisor not in (2, 4):
        raise ValueError(f"rotary_dim_divisor is {x.rotary_dim_divisor}: must be 2 or 4")
    if N % x.rotary_dim_divisor:
        raise ValueError(f"Q has N = {N}: must be a multiple of rotary_dim_divisor, which is {x.rotary_dim_divisor}")
    if not isinstance(x.chunk_size, int) or x.chunk_size < MIN_CHUNK_SIZE:
        raise ValueError(f"chunk_size is {x.chunk_size}: must be an integer of at least {MIN_CHUNK_SIZE}")
    shapes = {
        "K": (B, S, R, G, N), "V": (B, S, H, P), "ADT": (B, H, S), "DT": (B, H, S), "Trap": (B, H, S),
        "Q_bias": (H, R, N), "K_bias": (H, R, N), "MIMO_V": (H, R, P), "MIMO_Z": (H, R, P), "MIMO_Out": (H, R, P),
        "Angles": (B, S, H, N // x.rotary_dim_divisor), "D": (H,), "Z": (B, S, H, P),
    }  # fmt: skip
    for name, shape in shapes.items():
        tensor = getattr(x, name)
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must be {shape} to match Q and V")
    if (x.Z is None) != (x.MIMO_Z is None):
        raise ValueError("Z and MIMO_Z must be given together or both be None")
    if x.fuse_norm and (x.Z is None or x.MIMO_Out is None):
        raise ValueError("fuse_pregate_headwise_rms_norm needs Z, MIMO_Z and MIMO_Out")
    if not x.fuse_norm and x.outproj_norm_weight is not None:
        raise ValueError("outproj_norm_weight is given without fuse_pregate_headwise_rms_norm")
    weight = x.outproj_norm_weight
    if weight is not None:
        if tuple(weight.shape) not in ((H, P), (H * P,)):
            raise ValueError(f"outproj_norm_weight has shape {tuple(weight.shape)}: must be {(H, P)} or {(H * P,)}")
        weight = weight.reshape(H, P)
    _check_cu_seqlens(x.cu_seqlens, B, S, x.Q.device)
    return Inputs(
        **dict(zip(TENSOR_ARGS, (*x.tensors[:-1], weight), strict=True)),
        **x.options,
    )


def _check_types(x: Inputs) -> None:
    for name, tensor in zip(TENSOR_ARGS, x.tensors, strict=True):
        if tensor is None and name in OPTIONAL_ARGS:
            continue
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is {type(tensor).__name__}: must be a tensor")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}: must be one of {', '.join(map(str, _DTYPES))}")
        if tensor.device != x.Q.device:
            raise ValueError(f"{name} is on {tensor.device}: must be on {x.Q.device}, where Q is")
    if x.dtype not in _DTYPES:
        raise TypeError(f"dtype is {x.dtype}: must be one of {', '.join(map(str, _DTYPES))}")


def _check_cu_seqlens(cu: Tensor | None, B: int, S: int, device: torch.device) -> None:
    if cu is None:
        return
    if not isinstance(cu, Tensor) or cu.dtype not in (torch.int32, torch.int64) or cu.ndim != 1 or len(cu) < 2:
        raise ValueError("cu_seqlens must be a 1-D int32 or int64 tensor of at least two bounds")
    if cu.device != device:
        raise ValueError(f"cu_seqlens is on {cu.device}: must be on {device}, where Q is")
    if B != 1:
        raise ValueError(f"cu_seqlens is given with B = {B}: packed input must have B = 1")
    bounds = cu.tolist()
    if bounds[0] != 0:
        raise ValueError(f"cu_seqlens starts with {bounds[0]}: must start with 0")
    if bounds[-1] != S:
        raise ValueError(f"cu_seqlens ends with {bounds[-1]}: must end with the length of Q, which is {S}")
    for i, (a, b) in enumerate(itertools.pairwise(bounds)):
        if b < a:
            raise ValueError(f"cu_seqlens decreases from {a} to {b} at position {i + 1}")
