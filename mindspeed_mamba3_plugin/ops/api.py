"""The public operator: its signature, autograd, and the choice of implementation."""

from __future__ import annotations

import torch
from torch import Tensor

from . import call, registered, registry
from .call import planted
from .checks import checked
from .types import TENSOR_ARGS, Inputs

__all__ = ["mamba3_mimo", "planted"]


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
    # A loss on the state is only noticed by the autograd function below, which compilation does not see through.
    if torch.compiler.is_compiling() and not (return_state and torch.is_grad_enabled()):
        options = tuple(x.options.values())
        result = registered.forward(*x.tensors, *options, forward_kernel, backward_kernel)
        return result if return_state else result[0]
    x = checked(x)
    device = x.Q.device.type
    kernels = tuple(registry.resolve(name, device) for name in (forward_kernel, backward_kernel))
    result = _Mamba3Mimo.apply(x.options, kernels, *x.tensors)
    return result if return_state else result[0]


class _Mamba3Mimo(torch.autograd.Function):
    """Forward and backward by implementations chosen independently: the backward starts from the inputs."""

    @staticmethod
    def forward(ctx, options: dict, kernels: tuple[str, str], *tensors: Tensor | None):
        x = Inputs(**dict(zip(TENSOR_ARGS, tensors, strict=True)), **options)
        ctx.options, ctx.kernel = options, kernels[1]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        out, state = call.forward(x, kernels[0])
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
        grads = call.backward(x, grad_out, ctx.kernel)
        return (
            None,
            None,
            *(
                g.to(t.dtype) if needed else None
                for g, t, needed in zip(grads, tensors, ctx.needs_input_grad[2:], strict=True)
            ),
        )
