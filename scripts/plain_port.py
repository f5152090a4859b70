"""The direct translation of state-spaces/mamba's two backward kernels to Triton, for comparison only.

One program per batch and head walks its chunks in order, with the state on chip, whole chunks as tiles and rows in
(token, rank) order, as the TileLang source does. `scripts/check_ascend_compile.py --plain-port` compiles it for an
Ascend 910B and estimates it beside the plugin's own kernels; tests/offline/test_plain_port.py checks its numbers.

It takes what those kernels take: angles and decays already summed (`prepare`), dense input, whole chunks, N and P
powers of 2, one group, with Z, D and the sum over ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mindspeed_mamba3_plugin.ops.sums import running_sum
from mindspeed_mamba3_plugin.ops.triton.blocks import dot, narrow, sigmoid
from mindspeed_mamba3_plugin.ops.types import Inputs


@triton.jit
def _rotated(x, bias, cos, sin, rows, h, t, C: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """Rows of q or k with bias, rotated: both halves [C, R, N / 2], fp32."""
    HALF: tl.constexpr = N // 2
    r = tl.arange(0, R)[None, :, None]
    n = tl.arange(0, HALF)[None, None, :]
    place = (rows * R + r) * N + n
    b = (h * R + r) * N + n
    lo = tl.load(x + place).to(tl.float32) + tl.load(bias + b)
    hi = tl.load(x + place + HALF).to(tl.float32) + tl.load(bias + b + HALF)
    c = tl.load(cos + t * HALF + n)
    s = tl.load(sin + t * HALF + n)
    return lo * c - hi * s, lo * s + hi * c


@triton.jit
def _bwd_fwd_kernel(
    q, k, v, q_bias, k_bias, mimo_v, mimo_z, mimo_out, z, d, cos, sin, decay_in, decay_out, scale, mixing, grad_out,
    states, dz, dmimo_z, dmimo_out, S, H,
    C: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = C * R
    HALF: tl.constexpr = N // 2
    program = tl.program_id(0).to(tl.int64)
    b = program // H
    h = program % H
    r = tl.arange(0, R)[None, :, None]
    p = tl.arange(0, P)[None, None, :]
    rank = (h * R + r) * P + p
    up = tl.load(mimo_v + rank)
    up_z = tl.load(mimo_z + rank)
    down = tl.load(mimo_out + rank)
    skip = tl.load(d + h)
    lo_state = tl.zeros((HALF, P), dtype=tl.float32)
    hi_state = tl.zeros((HALF, P), dtype=tl.float32)
    sum_z = tl.zeros((R, P), dtype=tl.float32)
    sum_out = tl.zeros((R, P), dtype=tl.float32)
    dtype: tl.constexpr = v.dtype.element_ty
    for chunk in range(0, S // C):
        token = chunk * C + tl.arange(0, C)
        rows = b * S + token[:, None, None]
        t = program * S + token
        line = t[:, None, None]
        q_lo, q_hi = _rotated(q, q_bias, cos, sin, rows, h, line, C, R, N)
        k_lo, k_hi = _rotated(k, k_bias, cos, sin, rows, h, line, C, R, N)
        q_lo, q_hi = tl.reshape(narrow(q_lo, dtype), (M, HALF)), tl.reshape(narrow(q_hi, dtype), (M, HALF))
        place = (rows * H + h) * P + p
        value = tl.load(v + place).to(tl.float32) * up
        kept = tl.arange(0, HALF)[:, None] * P + tl.arange(0, P)[None, :]
        at = (program * (S // C) + chunk) * (N * P) + kept
        tl.store(states + at, narrow(lo_state, dtype))
        tl.store(states + at + HALF * P, narrow(hi_state, dtype))
        c_in = tl.load(decay_in + t)
        o = dot(q_lo, narrow(lo_state, dtype)) + dot(q_hi, narrow(hi_state, dtype))
        o = tl.reshape(o, (C, R, P)) * c_in[:, None, None]
        rows_k_lo, rows_k_hi = narrow(k_lo, dtype), narrow(k_hi, dtype)
        scores = dot(q_lo, tl.trans(tl.reshape(rows_k_lo, (M, HALF))))
        scores += dot(q_hi, tl.trans(tl.reshape(rows_k_hi, (M, HALF))))
        cell = (program * S + token[:, None]) * C + tl.arange(0, C)[None, :]
        mix = tl.load(mixing + cell)[:, None, :, None]
        scores = tl.reshape(tl.reshape(scores, (C, R, C, R)) * mix, (M, M))
        o += tl.reshape(dot(narrow(scores, dtype), tl.reshape(narrow(value, dtype), (M, P))), (C, R, P))
        o += skip * value
        out_scale = (tl.load(scale + t) * tl.load(decay_out + t))[:, None, None]
        sent = tl.reshape(narrow(value * out_scale, dtype), (M, P))
        whole = tl.load(decay_in + program * S + chunk * C + C - 1)
        lo_state = lo_state * whole + dot(tl.trans(tl.reshape(rows_k_lo, (M, HALF))), sent)
        hi_state = hi_state * whole + dot(tl.trans(tl.reshape(rows_k_hi, (M, HALF))), sent)
        gate = tl.load(z + place).to(tl.float32)
        x = gate * up_z
        open_ = sigmoid(x)
        g = tl.load(grad_out + place).to(tl.float32)
        sum_out += tl.sum(g * o * (x * open_), axis=0)
        dx = g * o * (open_ + x * open_ * (1.0 - open_)) * down
        sum_z += tl.sum(dx * gate, axis=0)
        target = ((b * S + token[:, None]) * H + h) * P + tl.arange(0, P)[None, :]
        tl.store(dz + target, narrow(tl.sum(dx * up_z, axis=1), dz.dtype.element_ty))
    own = (program * R + tl.arange(0, R)[:, None]) * P + tl.arange(0, P)[None, :]
    tl.store(dmimo_z + own, sum_z)
    tl.store(dmimo_out + own, sum_out)


@triton.jit
def _bwd_bwd_kernel(
    q, k, v, q_bias, k_bias, mimo_v, mimo_z, mimo_out, z, d, cos, sin, decay_in, decay_out, scale, mixing, grad_out,
    states, dq, dk, dv, dmimo_v, dd, dtheta, dmixing, dcarry_in, dcarry_out, dwhole, S, H,
    C: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = C * R
    HALF: tl.constexpr = N // 2
    program = tl.program_id(0).to(tl.int64)
    b = program // H
    h = program % H
    r = tl.arange(0, R)[None, :, None]
    p = tl.arange(0, P)[None, None, :]
    rank = (h * R + r) * P + p
    up = tl.load(mimo_v + rank)
    up_z = tl.load(mimo_z + rank)
    down = tl.load(mimo_out + rank)
    skip = tl.load(d + h)
    lo_grad = tl.zeros((HALF, P), dtype=tl.float32)
    hi_grad = tl.zeros((HALF, P), dtype=tl.float32)
    sum_v = tl.zeros((R, P), dtype=tl.float32)
    sum_d = tl.zeros((R, P), dtype=tl.float32)
    dtype: tl.constexpr = v.dtype.element_ty
    for back in range(0, S // C):
        chunk = S // C - 1 - back
        token = chunk * C + tl.arange(0, C)
        rows = b * S + token[:, None, None]
        t = program * S + token
        line = t[:, None, None]
        q_lo, q_hi = _rotated(q, q_bias, cos, sin, rows, h, line, C, R, N)
        k_lo, k_hi = _rotated(k, k_bias, cos, sin, rows, h, line, C, R, N)
        ql, qh = tl.reshape(narrow(q_lo, dtype), (M, HALF)), tl.reshape(narrow(q_hi, dtype), (M, HALF))
        kl, kh = tl.reshape(narrow(k_lo, dtype), (M, HALF)), tl.reshape(narrow(k_hi, dtype), (M, HALF))
        place = (rows * H + h) * P + p
        raw = tl.load(v + place).to(tl.float32)
        value = raw * up
        x = tl.load(z + place).to(tl.float32) * up_z
        do = tl.load(grad_out + place).to(tl.float32) * down * x * sigmoid(x)
        c_in = tl.load(decay_in + t)[:, None, None]
        out_scale = (tl.load(scale + t) * tl.load(decay_out + t))[:, None, None]
        sum_d += tl.sum(do * value, axis=0)
        grad, grad_in = tl.reshape(narrow(do, dtype), (M, P)), tl.reshape(narrow(do * c_in, dtype), (M, P))
        rows_v, sent = tl.reshape(narrow(value, dtype), (M, P)), tl.reshape(narrow(value * out_scale, dtype), (M, P))
        at = (program * (S // C) + chunk) * (N * P) + tl.arange(0, HALF)[:, None] * P + tl.arange(0, P)[None, :]
        lo_state = tl.load(states + at)
        hi_state = tl.load(states + at + HALF * P)
        lo_out, hi_out = narrow(lo_grad, dtype), narrow(hi_grad, dtype)

        from_state = tl.reshape(dot(ql, lo_state) + dot(qh, hi_state), (C, R, P))
        tl.store(dcarry_in + t, tl.sum(tl.sum(do * c_in * from_state, axis=2), axis=1))
        to_state = tl.reshape(dot(kl, lo_out) + dot(kh, hi_out), (C, R, P))
        tl.store(dcarry_out + t, tl.sum(tl.sum(value * to_state, axis=2), axis=1))
        scores = dot(ql, tl.trans(kl)) + dot(qh, tl.trans(kh))
        w = dot(grad, tl.trans(rows_v))
        cell = (program * S + token[:, None]) * C + tl.arange(0, C)[None, :]
        pairs = tl.reshape(scores * w, (C, R, C, R))
        tl.store(dmixing + cell, tl.sum(tl.sum(pairs, axis=3), axis=1))
        mix = tl.load(mixing + cell)[:, None, :, None]
        mixed = narrow(tl.reshape(tl.reshape(scores, (C, R, C, R)) * mix, (M, M)), dtype)
        mixed_w = narrow(tl.reshape(tl.reshape(w, (C, R, C, R)) * mix, (M, M)), dtype)
        dvalue = tl.reshape(dot(tl.trans(mixed), grad), (C, R, P)) + to_state * out_scale + skip * do
        sum_v += tl.sum(dvalue * raw, axis=0)
        target = ((b * S + token[:, None]) * H + h) * P + tl.arange(0, P)[None, :]
        tl.store(dv + target, narrow(tl.sum(dvalue * up, axis=1), dv.dtype.element_ty))

        dq_lo = tl.reshape(dot(grad_in, tl.trans(lo_state)) + dot(mixed_w, kl), (C, R, HALF))
        dq_hi = tl.reshape(dot(grad_in, tl.trans(hi_state)) + dot(mixed_w, kh), (C, R, HALF))
        dk_lo = tl.reshape(dot(sent, tl.trans(lo_out)) + dot(tl.trans(mixed_w), ql), (C, R, HALF))
        dk_hi = tl.reshape(dot(sent, tl.trans(hi_out)) + dot(tl.trans(mixed_w), qh), (C, R, HALF))
        turn = dq_hi * q_lo - dq_lo * q_hi + dk_hi * k_lo - dk_lo * k_hi
        n = tl.arange(0, HALF)[None, None, :]
        turns = t[:, None] * HALF + tl.arange(0, HALF)[None, :]
        tl.store(dtheta + turns, tl.sum(turn, axis=1))
        c = tl.load(cos + line * HALF + n)
        s = tl.load(sin + line * HALF + n)
        out = (line * R + r) * N + n
        tl.store(dq + out, dq_lo * c + dq_hi * s)
        tl.store(dq + out + HALF, dq_hi * c - dq_lo * s)
        tl.store(dk + out, dk_lo * c + dk_hi * s)
        tl.store(dk + out + HALF, dk_hi * c - dk_lo * s)

        whole = tl.load(decay_in + program * S + chunk * C + C - 1)
        both = lo_state.to(tl.float32) * lo_grad + hi_state.to(tl.float32) * hi_grad
        tl.store(dwhole + program * (S // C) + chunk, whole * tl.sum(tl.sum(both, axis=1), axis=0))
        lo_grad = lo_grad * whole + dot(tl.trans(ql), grad_in)
        hi_grad = hi_grad * whole + dot(tl.trans(qh), grad_in)
    own = (program * R + tl.arange(0, R)[:, None]) * P + tl.arange(0, P)[None, :]
    tl.store(dmimo_v + own, sum_v)
    tl.store(dd + own, sum_d)


class Sums(NamedTuple):
    """What depends on angles and decays alone, fp32 [B, H, S, ...]."""

    cos: Tensor  # [B, H, S, N / 2]
    sin: Tensor
    decay_in: Tensor  # exp of the decays from the chunk's start to the token
    decay_out: Tensor  # from behind the token to the chunk's end
    scale: Tensor
    mixing: Tensor  # [B, H, S, C]


def prepare(x: Inputs) -> Sums:
    """The summed angles and decays, in plain torch."""
    B, S, H, _, _, N, _ = x.sizes
    C = x.chunk_size
    dt, trap = x.DT.float(), torch.sigmoid(x.Trap.float())
    theta = running_sum(torch.tanh(x.Angles.float()) * dt.transpose(1, 2)[..., None] * torch.pi, 1).transpose(1, 2)
    theta = torch.nn.functional.pad(theta, (0, N // 2 - theta.shape[-1]))
    gamma = dt * trap
    scale = gamma + torch.nn.functional.pad((dt * (1 - trap))[..., 1:], (0, 1))
    a = x.ADT.float().reshape(B, H, S // C, C)
    inside = running_sum(a, -1)
    segments = inside[..., :, None] - inside[..., None, :]
    below = torch.ones(C, C, dtype=torch.bool, device=a.device).tril(-1)
    mixing = torch.where(below, torch.exp(segments.masked_fill(~below, 0)), 0) * scale.reshape(a.shape)[..., None, :]
    mixing = mixing + torch.diag_embed(gamma.reshape(a.shape))
    return Sums(
        torch.cos(theta).contiguous(), torch.sin(theta).contiguous(), torch.exp(inside).reshape(B, H, S),
        torch.exp(inside[..., -1:] - inside).reshape(B, H, S), scale, mixing.reshape(B, H, S, C).contiguous(),
    )  # fmt: skip


def _arguments(x: Inputs, sums: Sums, grad_out: Tensor) -> tuple[Tensor, ...]:
    return (
        x.Q, x.K, x.V, x.Q_bias, x.K_bias, x.MIMO_V, x.MIMO_Z, x.MIMO_Out, x.Z, x.D, *sums, grad_out
    )  # fmt: skip


def bwd_fwd(x: Inputs, sums: Sums, grad_out: Tensor) -> dict[str, Tensor]:
    """Recomputes O; dZ, dMIMO_Z, dMIMO_Out, and the states entering the chunks for `bwd_bwd`."""
    B, S, H, _, R, N, P = x.sizes
    C = x.chunk_size
    new = dict(dtype=torch.float32, device=x.V.device)
    states = torch.empty(B, H, S // C, N, P, dtype=x.dtype, device=x.V.device)
    dz, dmimo_z = torch.empty_like(x.Z), torch.empty(B, H, R, P, **new)
    dmimo_out = torch.empty_like(dmimo_z)
    _bwd_fwd_kernel[(B * H,)](
        *_arguments(x, sums, grad_out), states, dz, dmimo_z, dmimo_out, S, H, C=C, R=R, N=N, P=P
    )
    return {"states": states, "dz": dz, "dmimo_z": dmimo_z.sum(0), "dmimo_out": dmimo_out.sum(0)}


def bwd_bwd(x: Inputs, sums: Sums, grad_out: Tensor, states: Tensor) -> dict[str, Tensor]:
    """dQ, dK, dV, dMIMO_V, dD, both biases, and the gradients of angles, mixing and decays for torch to finish."""
    B, S, H, _, R, N, P = x.sizes
    C = x.chunk_size
    new = dict(dtype=torch.float32, device=x.V.device)
    dq = torch.empty(B, H, S, R, N, **new)
    dk, dv = torch.empty_like(dq), torch.empty_like(x.V)
    dmimo_v, dd = torch.empty(B, H, R, P, **new), torch.empty(B, H, R, P, **new)
    dtheta, dmixing = torch.empty(B, H, S, N // 2, **new), torch.empty(B, H, S, C, **new)
    dcarry_in, dwhole = torch.empty(B, H, S, **new), torch.empty(B, H, S // C, **new)
    dcarry_out = torch.empty_like(dcarry_in)
    _bwd_bwd_kernel[(B * H,)](
        *_arguments(x, sums, grad_out), states, dq, dk, dv, dmimo_v, dd, dtheta, dmixing, dcarry_in, dcarry_out,
        dwhole, S, H, C=C, R=R, N=N, P=P,
    )  # fmt: skip
    return {
        "dq": dq.sum(1)[:, :, :, None].to(x.dtype), "dk": dk.sum(1)[:, :, :, None].to(x.dtype), "dv": dv,
        "dmimo_v": dmimo_v.sum(0), "dd": dd.sum((0, 2, 3)), "dq_bias": dq.sum((0, 2)), "dk_bias": dk.sum((0, 2)),
        "dtheta": dtheta, "dmixing": dmixing, "dcarry_in": dcarry_in, "dcarry_out": dcarry_out, "dwhole": dwhole,
    }  # fmt: skip
