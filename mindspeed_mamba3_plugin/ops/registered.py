"""The operator as PyTorch sees it inside torch.compile: two opaque ops with fake implementations.

Compilation traces shapes through the fake implementations and keeps the ops whole; checks and the choice of the
implementation happen when the compiled code runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import call, registry
from .checks import checked
from .types import OPTIONAL_ARGS, TENSOR_ARGS, Inputs

_OPTIONS = {
    "cu_seqlens": "Tensor?", "chunk_size": "int", "rotary_dim_divisor": "int", "dtype": "ScalarType",
    "return_state": "bool", "fuse_norm": "bool", "norm_eps": "float",
}  # fmt: skip
_ARGUMENTS = ", ".join(
    f"{kind} {name}"
    for name, kind in ({n: "Tensor?" if n in OPTIONAL_ARGS else "Tensor" for n in TENSOR_ARGS} | _OPTIONS).items()
)
_COUNT = len(TENSOR_ARGS)


def _inputs(arguments: tuple) -> Inputs:
    return Inputs(**dict(zip((*TENSOR_ARGS, *_OPTIONS), arguments, strict=True)))


@torch.library.custom_op(
    "mindspeed_mamba3::forward",
    mutates_args=(),
    schema=f"({_ARGUMENTS}, str forward_kernel, str backward_kernel) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def forward(*arguments):
    """out, and the four parts of the final state (empty when it is not asked for)."""
    x = checked(_inputs(arguments[:-2]))
    kernel, _ = (registry.resolve(name, x.Q.device.type) for name in arguments[-2:])
    out, state = call.forward(x, kernel)
    return _own(out), *(map(_own, state) if state is not None else _no_state(x))


@forward.register_fake
def _(*arguments):
    x = _inputs(arguments[:-2])
    B, S, H, _, R, N, P = x.sizes
    out = x.V.new_empty((B, S, H, P) if x.MIMO_Out is not None else (B, S, R, H, P), dtype=x.dtype)
    if not x.return_state:
        return out, *_no_state(x)
    sequences = B if x.cu_seqlens is None else x.cu_seqlens.shape[0] - 1
    return (
        out,
        x.V.new_empty((sequences, H, x.Angles.shape[-1]), dtype=torch.float32),
        x.V.new_empty((sequences, H, P, N), dtype=torch.float32),
        x.V.new_empty((sequences, R, H, N), dtype=x.dtype),
        x.V.new_empty((sequences, H, P)),
    )


@torch.library.custom_op(
    "mindspeed_mamba3::backward",
    mutates_args=(),
    schema=f"(Tensor grad_out, {_ARGUMENTS}, str backward_kernel) -> Tensor[]",
)
def backward(grad_out, *arguments):
    """The gradients of the arguments that are present, in the order of `TENSOR_ARGS`."""
    x = checked(_inputs(arguments[:-1]))
    grads = call.backward(x, grad_out, registry.resolve(arguments[-1], x.Q.device.type))
    given = zip(grads, arguments[:_COUNT], strict=True)
    return [_own(g.to(t.dtype).reshape(t.shape)) for g, t in given if t is not None]


@backward.register_fake
def _(grad_out, *arguments):
    return [t.new_empty(t.shape) for t in arguments[:_COUNT] if t is not None]


def _save(ctx, inputs: tuple, output: tuple) -> None:
    *arguments, _, ctx.kernel = inputs
    ctx.options = arguments[_COUNT + 1 :]
    ctx.save_for_backward(*arguments[: _COUNT + 1])


def _differentiate(ctx, grad_out: Tensor, *_):
    tensors = ctx.saved_tensors
    grads = iter(backward(grad_out, *tensors, *ctx.options, ctx.kernel))
    rest = len(_OPTIONS) + 2
    return *(next(grads) if t is not None else None for t in tensors[:_COUNT]), *(None,) * rest


forward.register_autograd(_differentiate, setup_context=_save)


def _no_state(x: Inputs) -> tuple[Tensor, ...]:
    return tuple(x.V.new_empty(0) for _ in range(4))


def _own(t: Tensor) -> Tensor:
    """t contiguous and alone in its memory: results of an op may not be views of one another."""
    t = t.contiguous()
    return t if t.untyped_storage().nbytes() == t.numel() * t.element_size() else t.clone()
