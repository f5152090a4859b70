"""The operator in plain torch: the oracle that every kernel is checked against.

Two independent forms of the same function, both differentiable by autograd and valid in any float dtype:

* `step_form` follows the recurrence token by token, as state-spaces/mamba's decoding does:
      S_t = alpha_t S_{t-1} + beta_t k_{t-1} v_{t-1}^T + gamma_t k_t v_t^T,   O_t = q_t S_t + D v_t
  with alpha = exp(A dt), beta = (1 - sigmoid(Trap)) dt alpha, gamma = sigmoid(Trap) dt;
* `chunk_form` is the state-space duality of it: matrix products inside a chunk, a scan over chunks.

They share only the rotation, the gate and the argument handling. Inputs in fp64 are computed in fp64,
everything else in fp32. Source of the formulas: state-spaces/mamba, mamba_ssm/modules/mamba3.py and
mamba_ssm/ops/tilelang/mamba3 (commit e9594ce).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from . import registry
from .sums import running_sum
from .types import TENSOR_ARGS, Gradients, Inputs, State

_Core = Callable[..., tuple[Tensor, Tensor]]


def forward(x: Inputs) -> tuple[Tensor, State | None]:
    """The chunk form. Returns out ([B, S, H, P], or [B, S, R, H, P] without MIMO_Out) and the final state."""
    registry.count("reference", "forward")
    return chunk_form(x)


def backward(x: Inputs, grad_out: Tensor) -> Gradients:
    """Gradients of the chunk form by automatic differentiation, from the inputs alone."""
    registry.count("reference", "backward")
    given = {n: t.detach() for n, t in zip(TENSOR_ARGS, x.tensors, strict=True) if t is not None}

    def output(*tensors: Tensor) -> Tensor:
        return chunk_form(replace(x, return_state=False, **dict(zip(given, tensors, strict=True))))[0]

    # Not autograd: its tape is off inside an op of torch.library.
    _, pull_back = torch.func.vjp(output, *given.values())
    grads = dict(zip(given, pull_back(grad_out), strict=True))
    return Gradients(*(grads.get(n) for n in TENSOR_ARGS))


def step_form(x: Inputs) -> tuple[Tensor, State | None]:
    """The recurrence, one token at a time. Same results as `chunk_form`."""
    return _evaluate(x, _step_core)


def chunk_form(x: Inputs) -> tuple[Tensor, State | None]:
    """The chunked form, `x.chunk_size` tokens a chunk. The chunk size changes rounding only."""
    return _evaluate(x, _chunk_core)


def _evaluate(x: Inputs, core: _Core) -> tuple[Tensor, State | None]:
    if x.cu_seqlens is None:
        return _sequence(x, core)
    bounds = x.cu_seqlens.tolist()
    parts = [_sequence(_slice(x, a, b), core) for a, b in itertools.pairwise(bounds)]
    out = torch.cat([o for o, _ in parts], dim=1)
    state = State(*(torch.cat(s) for s in zip(*(s for _, s in parts), strict=True))) if x.return_state else None
    return out, state


def _slice(x: Inputs, a: int, b: int) -> Inputs:
    along = {"Q": 1, "K": 1, "V": 1, "Angles": 1, "Z": 1, "ADT": 2, "DT": 2, "Trap": 2}
    parts = {n: getattr(x, n).narrow(d, a, b - a) for n, d in along.items() if getattr(x, n) is not None}
    return replace(x, cu_seqlens=None, **parts)


def _sequence(x: Inputs, core: _Core) -> tuple[Tensor, State | None]:
    """One batch of equally long sequences."""
    B, S, H, G, _R, _, _ = x.sizes
    wide = torch.float64 if any(t is not None and t.dtype == torch.float64 for t in x.tensors) else torch.float32
    t = {n: v.to(wide) if v is not None else None for n, v in zip(TENSOR_ARGS, x.tensors, strict=True)}

    dt = t["DT"].transpose(1, 2)  # [B, S, H]
    adt = t["ADT"].transpose(1, 2)
    trap = torch.sigmoid(t["Trap"].transpose(1, 2))
    theta = running_sum(torch.tanh(t["Angles"]) * dt[..., None] * math.pi, dim=1)  # [B, S, H, A]
    heads = torch.arange(H, device=x.Q.device) // (H // G)
    q = _rotate(t["Q"][:, :, :, heads].transpose(2, 3) + t["Q_bias"], theta)  # [B, S, H, R, N]
    k = _rotate(t["K"][:, :, :, heads].transpose(2, 3) + t["K_bias"], theta)
    v = t["V"][:, :, :, None] * t["MIMO_V"]  # [B, S, H, R, P]

    o, ssm = core(q, k, v, adt, dt, trap, x.chunk_size)
    if t["D"] is not None:
        o = o + t["D"][:, None, None] * v
    out = _gate(x, o, t).to(x.dtype)
    if not x.return_state:
        return out, None

    def last(y: Tensor) -> Tensor:
        return y[:, -1] if S else y.new_zeros(B, *y.shape[2:])

    state = State(
        angle=torch.remainder(last(theta), 2 * math.pi),
        ssm=ssm.transpose(-1, -2).contiguous(),
        k=last(k).transpose(1, 2).contiguous().to(x.dtype),
        v=last(x.V).clone(),
    )
    return out, State(*(s.detach() for s in state))


def _rotate(y: Tensor, theta: Tensor) -> Tensor:
    """Rotate the pairs (n, N/2 + n), n < A, of y [B, S, H, R, N] by theta [B, S, H, A]."""
    half, angles = y.shape[-1] // 2, theta.shape[-1]
    cos = F.pad(torch.cos(theta), (0, half - angles), value=1.0)[:, :, :, None]
    sin = F.pad(torch.sin(theta), (0, half - angles))[:, :, :, None]
    lo, hi = y[..., :half], y[..., half:]
    return torch.cat((lo * cos - hi * sin, lo * sin + hi * cos), dim=-1)


def _gate(x: Inputs, o: Tensor, t: dict[str, Tensor | None]) -> Tensor:
    """[rmsnorm] * silu(Z MIMO_Z), then the reduction over the rank; o is [B, S, H, R, P]."""
    if x.fuse_norm:
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + x.norm_eps)
        if t["outproj_norm_weight"] is not None:
            o = o * t["outproj_norm_weight"][:, None]
    if t["Z"] is not None:
        o = o * F.silu(t["Z"][:, :, :, None] * t["MIMO_Z"])
    if t["MIMO_Out"] is not None:
        return torch.einsum("bshrp,hrp->bshp", o, t["MIMO_Out"])
    return o.transpose(2, 3).contiguous()


def _step_core(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """The recurrence. Returns O [B, S, H, R, P] and the last state [B, H, N, P]."""
    B, S, H, _, N = q.shape
    state = q.new_zeros(B, H, N, v.shape[-1])
    previous = torch.zeros_like(state)
    out = []
    for t in range(S):
        alpha = torch.exp(adt[:, t])
        beta = (1 - trap[:, t]) * dt[:, t] * alpha
        gamma = trap[:, t] * dt[:, t]
        kv = torch.einsum("bhrn,bhrp->bhnp", k[:, t], v[:, t])
        state = alpha[..., None, None] * state + beta[..., None, None] * previous + gamma[..., None, None] * kv
        previous = kv
        out.append(torch.einsum("bhrn,bhnp->bhrp", q[:, t], state))
    return (torch.stack(out, dim=1) if S else torch.zeros_like(v)), state


def _chunk_core(
    q: Tensor, k: Tensor, v: Tensor, adt: Tensor, dt: Tensor, trap: Tensor, chunk_size: int
) -> tuple[Tensor, Tensor]:
    """The dual form with C tokens a chunk. Returns O [B, S, H, R, P] and the last state [B, H, N, P]."""
    B, S, H, R, N = q.shape
    if S == 0:
        return torch.zeros_like(v), q.new_zeros(B, H, N, v.shape[-1])
    C = min(chunk_size, S)
    gamma = dt * trap
    # Past the end of the sequence there is no next token, and no share of it.
    scale = gamma + F.pad((dt * (1 - trap))[:, 1:], (0, 0, 0, 1))

    pad = -S % C
    q, k, v = (F.pad(y, (0, 0, 0, 0, 0, 0, 0, pad)) for y in (q, k, v))
    adt, gamma, scale = (F.pad(y, (0, 0, 0, pad)) for y in (adt, gamma, scale))
    chunks = (S + pad) // C
    q, k, v = (y.reshape(B, chunks, C, H, R, -1).permute(0, 3, 1, 2, 4, 5) for y in (q, k, v))  # [B, H, c, C, R, .]
    adt, gamma, scale = (y.reshape(B, chunks, C, H).permute(0, 3, 1, 2) for y in (adt, gamma, scale))

    # decay[t, u] = sum of adt over u < w <= t, summed directly: a difference of cumulative sums loses bits.
    tril = torch.ones(C, C, dtype=torch.bool, device=q.device).tril(-1)
    decay = running_sum(adt[..., :, None].expand(*adt.shape, C).masked_fill(~tril, 0), dim=-2)
    mixing = torch.where(tril, torch.exp(decay.masked_fill(~tril, 0)) * scale[..., None, :], torch.diag_embed(gamma))
    from_start = running_sum(adt, dim=-1)
    to_end = decay[..., -1, :] if C > 1 else torch.zeros_like(adt)

    rows_q, rows_k, rows_v = (y.flatten(3, 4) for y in (q, k, v))  # [B, H, c, C R, .]
    scores = (rows_q @ rows_k.transpose(-1, -2)).reshape(B, H, chunks, C, R, C, R) * mixing[..., :, None, :, None]
    out = (scores.reshape(B, H, chunks, C * R, C * R) @ rows_v).reshape(B, H, chunks, C, R, -1)

    weighted = (v * (scale * torch.exp(to_end))[..., None, None]).flatten(3, 4)
    own = rows_k.transpose(-1, -2) @ weighted  # [B, H, c, N, P]
    whole = torch.exp(from_start[..., -1])[..., None, None]
    state = q.new_zeros(B, H, N, v.shape[-1])
    entering = []
    for c in range(chunks):
        entering.append(state)
        state = whole[:, :, c] * state + own[:, :, c]
    carried = (rows_q @ torch.stack(entering, dim=2)).reshape(B, H, chunks, C, R, -1)
    out = out + torch.exp(from_start)[..., None, None] * carried
    return out.permute(0, 2, 3, 1, 4, 5).reshape(B, S + pad, H, R, -1)[:, :S], state
