"""The public operator: argument contract, errors, autograd, and the choice of implementation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from . import registry
from .types import GRADIENT_NAMES, TENSOR_ARGS, Gradients, Inputs

MIN_CHUNK_SIZE = 8
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_planted: dict[str, float] = {}


def mamba3_mimo(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    ADT: Tensor,
    DT: Tensor,
    Trap: Tensor,
    Q_bias: Tensor,
    K_bias: Tensor,
    MIMO_V: Tensor,
    MIMO_Z: Tensor | None,
    MIMO_Out: Tensor | None,
    Angles: Tensor,
    D: Tensor | None,
    Z: Tensor | None,
    chunk_size: int,
    rotary_dim_divisor: int,
    dtype: torch.dtype,
    return_state: bool = False,
    cu_seqlens: Tensor | None = None,
    fuse_pregate_headwise_rms_norm: bool = False,
    outproj_norm_weight: Tensor | None = None,
    outproj_norm_eps: float = 1e-5,
    *,
    forward_kernel: str = "auto",
    backward_kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mamba-3 MIMO scan; arguments and results of state-spaces/mamba `mamba3_mimo` (commit e9594ce).

    Args:
        Q, K: C and B of the state-space model, [B, S, R, G, N], float; H must be a multiple of G, N even.
        V: [B, S, H, P], float.
        ADT: A * dt, [B, H, S], at most 0 in a decaying model.
        DT: step size dt, [B, H, S].
        Trap: trapezoid weight before its sigmoid, [B, H, S].
        Q_bias, K_bias: [H, R, N], added before the rotation.
        MIMO_V, MIMO_Z, MIMO_Out: up-projections of V and Z and down-projection of the output, [H, R, P].
            MIMO_Out None: no reduction over R. MIMO_Z is needed exactly when Z is given.
        Angles: [B, S, H, N / rotary_dim_divisor], before the tanh.
        D: skip weight, [H], or None.
        Z: gate, [B, S, H, P], or None.
        chunk_size: tokens per chunk, at least 8. It changes rounding only, and kernels may use another.
        rotary_dim_divisor: 2 (rotate all of N) or 4 (rotate half of it).
        dtype: of the matrix operands and of the output: float16, bfloat16 or float32 (float64: reference only).
        return_state: also return the state for decoding. No gradient flows through it: a loss on it is an error.
        cu_seqlens: bounds of packed sequences, int32 or int64 [sequences + 1]; then B must be 1.
        fuse_pregate_headwise_rms_norm: RMSNorm over P before the gate; needs Z, MIMO_Z and MIMO_Out.
        outproj_norm_weight: weight of that norm, [H, P] or [H * P]; None is a weight of one.
        outproj_norm_eps: its epsilon.
        forward_kernel, backward_kernel: implementations to use, one of `registry.KERNEL_NAMES`.

    Returns:
        out [B, S, H, P], or [B, S, R, H, P] without MIMO_Out, of type `dtype`. With return_state also the final
        angle [n, H, N / divisor] fp32, state [n, H, P, N] fp32, rotated k [n, R, H, N] and V [n, H, P] of the last
        token of each of the n sequences.

    Raises:
        ValueError: an argument is outside the contract; the message names it, what was given and what is allowed.
        TypeError: an argument has a type or dtype that is not allowed.
    """
    x = Inputs(
        Q, K, V, ADT, DT, Trap, Q_bias, K_bias, MIMO_V, MIMO_Z, MIMO_Out, Angles, D, Z, outproj_norm_weight,
        cu_seqlens, chunk_size, rotary_dim_divisor, dtype, return_state, fuse_pregate_headwise_rms_norm,
        outproj_norm_eps,
    )  # fmt: skip
    x = _checked(x)
    device = x.Q.device.type
    kernels = tuple(registry.resolve(name, device) for name in (forward_kernel, backward_kernel))
    result = _Mamba3Mimo.apply(x.options, kernels, *x.tensors)
    return result if return_state else result[0]


@contextmanager
def planted(factors: dict[str, float]) -> Iterator[None]:
    """Scale named gradients of every backward inside the context, e.g. {"dk": 1.01}.

    A comparison that does not notice this is broken: it is how the loss-curve comparison proves itself.

    Raises:
        ValueError: a name that is no gradient.
    """
    if unknown := sorted(set(factors) - set(GRADIENT_NAMES)):
        raise ValueError(f"no gradient named {unknown[0]!r}: allowed are {', '.join(GRADIENT_NAMES)}")
    before = dict(_planted)
    _planted.update(factors)
    try:
        yield
    finally:
        _planted.clear()
        _planted.update(before)


class _Mamba3Mimo(torch.autograd.Function):
    """Forward and backward by implementations chosen independently: the backward starts from the inputs."""

    @staticmethod
    def forward(ctx, options: dict, kernels: tuple[str, str], *tensors: Tensor | None):
        x = Inputs(**dict(zip(TENSOR_ARGS, tensors, strict=True)), **options)
        ctx.options, ctx.kernel = options, kernels[1]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        # The implementations choose the dtype of every product themselves.
        with torch.autocast(x.Q.device.type, enabled=False):
            out, state = registry.load(kernels[0]).forward(x)
        return (out, *state) if state is not None else (out,)

    @staticmethod
    def backward(ctx, grad_out: Tensor | None, *grad_state: Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError("mamba3_mimo: second derivatives (create_graph=True) are not supported")
        if any(g is not None for g in grad_state):
            raise RuntimeError(
                "mamba3_mimo: a loss on the returned state has no gradient; detach the state, or do not use it in "
                "the loss"
            )
        tensors = ctx.saved_tensors  # once: checkpointing unpacks on every read
        if grad_out is None:
            return (None,) * (2 + len(tensors))
        x = Inputs(**dict(zip(TENSOR_ARGS, tensors, strict=True)), **{**ctx.options, "return_state": False})
        with torch.autocast(x.Q.device.type, enabled=False):
            grads = _plant(registry.load(ctx.kernel).backward(x, grad_out.contiguous()))
        return (
            None,
            None,
            *(
                g.to(t.dtype) if needed else None
                for g, t, needed in zip(grads, tensors, ctx.needs_input_grad[2:], strict=True)
            ),
        )


def _plant(grads: Gradients) -> Gradients:
    if not _planted:
        return grads
    return grads._replace(**{n: getattr(grads, n) * f for n, f in _planted.items() if getattr(grads, n) is not None})


def _checked(x: Inputs) -> Inputs:
    """Check every argument; returns the inputs with the norm weight as [H, P]."""
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
    optional = {"MIMO_Z", "MIMO_Out", "D", "Z", "outproj_norm_weight"}
    for name, tensor in zip(TENSOR_ARGS, x.tensors, strict=True):
        if tensor is None and name in optional:
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
