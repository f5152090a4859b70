"""The operator for NVIDIA GPUs: fused Triton kernels, all chunks at once, no atomics.

Stages: the angles and decays of every token; the states at the bounds of chunks; then one program for every chunk and
head, from the entering state (the output, or `bwd_fwd`) or from the gradient of the leaving state (`bwd_bwd`); sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ... import registry
from ...types import Gradients, Inputs, State
from ..chunks import Chunks, cut
from ..plan import GpuPlan, gpu_plan
from . import states
from .angles import Turns, turns
from .outputs import outputs
from .sinks import sink_gradients
from .sources import source_gradients
from .sums import over_chunks, over_heads, scalar_gradients

_NAME = "triton-gpu"
_WEIGHTS = ("Q_bias", "K_bias", "MIMO_V", "MIMO_Z", "MIMO_Out")


@dataclass
class Residuals:
    """What `bwd_fwd` hands to `bwd_bwd`."""

    inputs: Inputs  # as the kernels take them
    plan: GpuPlan
    chunks: Chunks
    turns: Turns
    states: Tensor  # entering states [chunks, H, 2, NH, PP]
    grad_out: Tensor
    core: Tensor | None  # gradient of O [B, S, H, R, P], with a norm
    sinks: Tensor
    d_theta: Tensor


def forward(x: Inputs) -> tuple[Tensor, State | None]:
    """out [B, S, H, P], or [B, S, R, H, P] without MIMO_Out, and the final state when asked for.

    Raises:
        ValueError: sizes or a dtype that no tile plan fits.
    """
    registry.count(_NAME, "forward")
    x, plan = _prepared(x, split=False)
    chunks = cut(x, plan.C)
    at = turns(x, plan, chunks)
    entering, last = states.entering(x, plan, chunks, at, x.return_state)
    out = outputs(x, plan, chunks, at, entering)
    return out, _state(x, chunks, at, last) if x.return_state else None


def bwd_fwd(x: Inputs, grad_out: Tensor) -> tuple[dict[str, Tensor | None], Residuals]:
    """First half of the backward: all gradients that need the states alone (named as in `Gradients`), and what the
    second half takes from it."""
    registry.count(_NAME, "bwd_fwd")
    x, plan = _prepared(x, split=x.fuse_norm)
    _, _, H, _, R, N, P = x.sizes
    grad_out = grad_out.contiguous()
    chunks = cut(x, plan.C)
    at = turns(x, plan, chunks)
    entering, _ = states.entering(x, plan, chunks, at, False)
    found = sink_gradients(x, plan, chunks, at, entering, grad_out)
    bias, psi, zeta, weight, skip = over_chunks(found.pop("part")).split((R * N, R * P, R * P, R * P, 8), dim=-1)
    grads = {
        "dq": over_heads(found.pop("dq"), x),
        "dq_bias": bias.view(H, R, N),
        "dmimo_z": None if x.Z is None else zeta.view(H, R, P),
        "dmimo_out": None if x.MIMO_Out is None else psi.view(H, R, P),
        "dd": None if x.D is None else skip[:, :2].sum(1),
        "dz": found["dz"],
        "dnorm_weight": None if x.outproj_norm_weight is None else weight.view(H, R, P).sum(1),
    }
    return grads, Residuals(x, plan, chunks, at, entering, grad_out, found["core"], found["sinks"], found["d_theta"])


def bwd_bwd(x: Inputs, residuals: Residuals) -> dict[str, Tensor]:
    """Second half of the backward: the remaining gradients. It uses `residuals` up."""
    registry.count(_NAME, "bwd_bwd")
    r, plan, chunks, at = residuals, residuals.plan, residuals.chunks, residuals.turns
    x, grad_out = r.inputs, r.grad_out
    _, _, H, _, R, N, P = x.sizes
    leaving, through = states.leaving(x, plan, chunks, at, grad_out, r.core, r.states)
    del residuals.states
    found = source_gradients(x, plan, chunks, at, leaving, grad_out, r.core, r.d_theta)
    del leaving
    bias, phi = over_chunks(found.pop("part")).split((R * N, R * P), dim=-1)
    dk = over_heads(found.pop("dk"), x)
    d_angles, d_adt, d_dt, d_trap = scalar_gradients(
        x, plan, chunks, r.d_theta, through, at.scalars, r.sinks, found["sources"]
    )
    return {
        "dk": dk, "dv": found["dv"], "dadt": d_adt, "ddt": d_dt, "dtrap": d_trap, "dk_bias": bias.view(H, R, N),
        "dmimo_v": phi.view(H, R, P), "dangles": d_angles,
    }  # fmt: skip


def backward(x: Inputs, grad_out: Tensor) -> Gradients:
    """All gradients, from the inputs alone; None where the argument was absent."""
    if x.V.shape[1] == 0:
        _prepared(x, split=x.fuse_norm)
        registry.count(_NAME, "bwd_fwd")
        registry.count(_NAME, "bwd_bwd")
        return Gradients(*(None if t is None else torch.zeros_like(t) for t in x.tensors))
    grads, residuals = bwd_fwd(x, grad_out)
    return Gradients(**grads, **bwd_bwd(x, residuals))


def _prepared(x: Inputs, split: bool) -> tuple[Inputs, GpuPlan]:
    """The inputs as the kernels take them (contiguous, small weights in the plan's dtype), and the tile plan."""
    *_, R, N, P = x.sizes
    plan = gpu_plan(N, P, R, x.dtype, _capability(x.Q.device), split)
    x = x.contiguous()
    weights = {n: t for n in _WEIGHTS if (t := getattr(x, n)) is not None}
    if any(t.dtype != plan.store_dtype for t in weights.values()):
        whole = torch.cat([t.flatten().float() for t in weights.values()]).to(plan.store_dtype)
        parts = whole.split([t.numel() for t in weights.values()])
        x = replace(x, **{n: part.view(t.shape) for (n, t), part in zip(weights.items(), parts, strict=True)})
    return x, plan


def _capability(device: torch.device) -> int:
    """Compute capability as in sm_90; 0 in the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _state(x: Inputs, chunks: Chunks, at: Turns, last: Tensor) -> State:
    _, _, H, G, R, N, P = x.sizes
    half = N // 2
    chunk, token, used = chunks.last_tokens()
    turn = at.last.float() * math.pi  # [sequences, H, A]
    ssm = last[:, :, :, :half, :P].flatten(2, 3).transpose(-1, -2)
    if not x.Q.numel():
        k, v = x.K.new_zeros(len(used), R, H, N), x.V.new_zeros(len(used), H, P)
    else:
        token = token + chunks.table[chunk, 0]
        rows = x.K.flatten(0, 1)[token].repeat_interleave(H // G, dim=2).float()  # [sequences, R, H, N]
        rows = rows + x.K_bias.transpose(0, 1).float()
        A = turn.shape[-1]
        cos, sin = torch.cos(turn)[:, None], torch.sin(turn)[:, None]
        lo, hi = rows[..., :A], rows[..., half : half + A]
        k = rows.clone()
        k[..., :A], k[..., half : half + A] = lo * cos - hi * sin, lo * sin + hi * cos
        k = k * used[:, None, None, None]
        v = x.V.flatten(0, 1)[token] * used[:, None, None]
    return State(torch.remainder(turn, 2 * math.pi), ssm.contiguous(), k.to(x.dtype), v.contiguous())
