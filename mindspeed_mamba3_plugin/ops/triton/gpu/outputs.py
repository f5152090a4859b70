"""The scan's output O from the entering states, all chunks at once; and `bwd_fwd`, which recomputes it and goes back
through the gate, the norm and everything that depends on the states: dQ, and the sums over each token's sinks."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import dot, narrow
from ..chunks import Chunks
from ..plan import GpuPlan
from .angles import CHI, CLO, EXIT, OWN, SHARE, Turns
from .tiles import (
    by_rank, core_gradient, left, load, load_by_rank, load_by_row, load_by_token, load_core_parts, load_halves, load_out_gradient, load_turn, per_token, pin,
    pin_halves, pin_parts, power2, put, rank_columns, right, rotated, sigmoid, store_by_rank, tall,
)  # fmt: skip  # isort: skip


@triton.jit
def _through_scores(gb, vb, scores, mix, same, dtype: tl.constexpr):
    """From the gradient of O to that of the products q k^T, and the sum of each row over other tokens of the block."""
    gv = dot(gb, tl.trans(vb))
    inner = tl.sum(tl.where(same, 0.0, scores * gv), axis=1)
    return pin(narrow(mix * gv, dtype)), inner


@triton.jit(do_not_specialize=["T"])
def _outputs_kernel(
    Q, K, Q_bias, K_bias, V, Phi, Z, Zeta, Psi, D, Weight, Cos, Sin, Scalars, States, Out, dO, dQ, dTheta, dCore,
    dZ, Sinks, Part, table, T, eps, NORM: tl.constexpr, GRAD: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr, A: tl.constexpr,
    C: tl.constexpr, J: tl.constexpr, RP: tl.constexpr, NH: tl.constexpr, PP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(table + 4 * chunk).to(tl.int64)
    reach = tl.load(table + 4 * chunk + 1)
    M: tl.constexpr = C * RP
    RE: tl.constexpr = RP if RP > 16 else 16
    rows, c1 = tl.arange(0, M), tl.arange(0, C)
    c, r = c1[:, None, None], tl.arange(0, RP)[None, :, None]
    n, p = tl.arange(0, NH)[None, None, :], tl.arange(0, PP)[None, None, :]
    head = h.to(tl.int64) * T
    dtype: tl.constexpr = States.dtype.element_ty
    row = tl.cast(T, tl.int64) * H
    task = chunk.to(tl.int64) * H + h
    at_state = States + task * (2 * PP * NH) + tl.arange(0, PP)[:, None] + tl.arange(0, NH)[None, :] * PP
    s_lo = tl.load(at_state)
    s_hi = tl.load(at_state + PP * NH)
    if J > 1:
        s_lo = s_lo.to(tl.float32)
        s_hi = s_hi.to(tl.float32)
    if GRAD:
        d_psi = tl.zeros((PP, RE), tl.float32)
        d_zeta = tl.zeros((PP, RE), tl.float32)
        d_weight = tl.zeros((PP, RE), tl.float32)
        b_lo = tl.zeros((NH, RE), tl.float32)
        b_hi = tl.zeros((NH, RE), tl.float32)
        d_skip = 0.0
    for j in tl.range(0, J if J == 1 else tl.minimum(J, tl.cdiv(reach, C)), num_stages=STAGES):
        inside = j * C + c < reach
        token = start + j * C + c
        ok = inside & (r < R)
        cos, sin = load_turn(Cos, Sin, head + token, n, inside, A)
        k_halves = load_halves(K, K_bias, token, r, n, ok, h, H, G, R, N)
        q_halves = load_halves(Q, Q_bias, token, r, n, ok, h, H, G, R, N)
        v_token = load_by_token(V, token, p, inside, h, H, P)
        phi = load_by_row(Phi, r, p, ok, h, R, P)
        if GRAD and not NORM:
            parts = load_core_parts(dO, Psi, Z, Zeta, None, token, r, p, inside, h, H, R, P)
        local = j * C + rows // RP
        real = local < reach
        number = Scalars + head + start + local
        chi = tl.load(number + CHI * row, mask=real, other=0.0)
        clo = tl.load(number + CLO * row, mask=real, other=0.0)
        share = tl.load(number + SHARE * row, mask=real, other=0.0)
        own = tl.load(number + OWN * row, mask=real, other=0.0)
        cos = pin(cos).to(tl.float32)
        sin = pin(sin).to(tl.float32)
        k_halves = pin_halves(k_halves)
        q_halves = pin_halves(q_halves)
        v_token = pin(v_token)
        phi = pin(phi)
        if GRAD and not NORM:
            parts = pin_parts(parts)
        reaches = (local[:, None] >= local[None, :]) & real[:, None]
        same = local[:, None] == local[None, :]
        mix = power2(tl.where(reaches, (chi[:, None] - chi[None, :]) + (clo[:, None] - clo[None, :]), -float("inf")))
        mix = tl.where(same, own[None, :], mix * share[None, :])
        since = power2(chi)[:, None]
        k_lo, k_hi = rotated(k_halves, cos, sin)
        k_lo = right(k_lo, dtype)
        k_hi = right(k_hi, dtype)
        v = v_token.to(tl.float32) * phi.to(tl.float32)
        vb = right(v, dtype)
        q_lo, q_hi = rotated(q_halves, cos, sin)
        q_lo = left(q_lo, dtype)
        q_hi = left(q_hi, dtype)
        if GRAD and not NORM:
            g = core_gradient(parts)
            gb = left(g, dtype)
            if D is not None:
                d_skip += tl.sum(tl.sum(tl.sum(g * v, axis=2), axis=1), axis=0)

        scores = dot(q_lo, tl.trans(k_lo))
        scores = dot(q_hi, tl.trans(k_hi), scores) * mix
        direct = scores
        if D is not None:
            direct = tl.where(rows[:, None] == rows[None, :], scores + tl.load(D + h).to(tl.float32), scores)
        direct = pin(narrow(direct, dtype))
        if GRAD and not NORM:
            gs, inner = _through_scores(gb, vb, scores, mix, same, dtype)
        if Psi is not None:
            psi = load_by_rank(Psi, r, p, h, R, P).to(tl.float32)
        if Z is not None:
            z = load_by_token(Z, token, p, inside, h, H, P).to(tl.float32)
            zeta = load_by_rank(Zeta, r, p, h, R, P).to(tl.float32)
            gate = z * zeta
            sig = sigmoid(gate)
        if GRAD:
            up = load_out_gradient(dO, token, r, p, inside, h, H, R, P, Psi is not None).to(tl.float32)
        sb_lo = narrow(s_lo, dtype)
        sb_hi = narrow(s_hi, dtype)
        y = dot(q_lo, tl.trans(sb_lo))
        y = dot(q_hi, tl.trans(sb_hi), y) * since
        y = tall(dot(direct, vb, y), RP)

        if NORM:
            scale = tl.rsqrt(tl.sum(y * y, axis=2, keep_dims=True) / P + eps)
            unit = y * scale
            y = unit
            if Weight is not None:
                weight = load(Weight, h * P + p, p < P).to(tl.float32)
                y *= weight
        if not GRAD:
            if Z is not None:
                y *= gate * sig
            if Psi is not None:
                put(Out, (token * H + h) * P + p, tl.sum(y * psi, axis=1, keep_dims=True), inside & (p < P))
            else:
                put(Out, ((token * R + r) * H + h) * P + p, y, ok & (p < P))
        else:
            picks = rank_columns(rows % RP, RE, dtype)
            y *= up
            if Psi is not None:
                d_psi = by_rank(y * (gate * sig) if Z is not None else y, picks, d_psi)
                y *= psi
            if Z is not None:
                y *= sig * (1.0 + gate * (1.0 - sig))
                d_zeta = by_rank(y * z, picks, d_zeta)
                put(dZ, (token * H + h) * P + p, tl.sum(y * zeta, axis=1, keep_dims=True), inside & (p < P))
            if NORM:
                g = up * psi * (gate * sig)
                if Weight is not None:
                    d_weight = by_rank(g * unit, picks, d_weight)
                    g *= weight
                g = scale * (g - unit * (tl.sum(g * unit, axis=2, keep_dims=True) / P))
                put(dCore, ((token * H + h) * R + r) * P + p, g, ok & (p < P))
                gb = left(g, dtype)
                gs, inner = _through_scores(gb, vb, scores, mix, same, dtype)
                if D is not None:
                    d_skip += tl.sum(tl.sum(tl.sum(g * v, axis=2), axis=1), axis=0)
            lo = dot(gb, sb_lo) * since
            hi = dot(gb, sb_hi) * since
            from_state = tl.sum(lo * q_lo.to(tl.float32) + hi * q_hi.to(tl.float32), axis=1)
            at_s = head + start + j * C + c1
            put(Sinks, at_s, per_token(inner, C, RP), j * C + c1 < reach)
            put(Sinks + row, at_s, per_token(from_state, C, RP), j * C + c1 < reach)
            lo = tall(dot(gs, k_lo, lo), RP)
            hi = tall(dot(gs, k_hi, hi), RP)
            cos, sin = load_turn(Cos, Sin, head + token, n, inside, A)
            cos = cos.to(tl.float32)
            sin = sin.to(tl.float32)
            turn = hi * tall(q_lo, RP).to(tl.float32) - lo * tall(q_hi, RP).to(tl.float32)
            put(dTheta, (head + token) * A + n, tl.sum(turn, axis=1, keep_dims=True), inside & (n < A))
            to = ((token * R + r) * H + h) * N + n
            x = lo * cos + hi * sin
            put(dQ, to, x, ok & (n < N // 2))
            b_lo = by_rank(x, picks, b_lo)
            x = hi * cos - lo * sin
            put(dQ, to + N // 2, x, ok & (n < N // 2))
            b_hi = by_rank(x, picks, b_hi)
        if J > 1:
            leave = share * tl.load(number + EXIT * row, mask=real, other=0.0)
            end = start + tl.minimum((j + 1) * C, reach) - 1
            kept = tl.exp2(tl.load(Scalars + head + end + CHI * row))
            vw = tl.trans(pin(narrow(right(v, tl.float32) * leave[:, None], dtype)))
            s_lo = dot(vw, k_lo, s_lo * kept)
            s_hi = dot(vw, k_hi, s_hi * kept)
    if GRAD:
        part = Part + task * (R * (N + 3 * P) + 1)
        n1, p1 = tl.arange(0, NH), tl.arange(0, PP)
        store_by_rank(part, b_lo, n1, N // 2, R, RE, N)
        store_by_rank(part + N // 2, b_hi, n1, N // 2, R, RE, N)
        store_by_rank(part + R * N, d_psi, p1, P, R, RE, P)
        store_by_rank(part + R * (N + P), d_zeta, p1, P, R, RE, P)
        store_by_rank(part + R * (N + 2 * P), d_weight, p1, P, R, RE, P)
        tl.store(part + R * (N + 3 * P), d_skip)


def outputs(x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, states: Tensor) -> Tensor:
    """The operator's output from the states entering each chunk."""
    B, S, H, _, R, _, P = x.sizes
    out = torch.empty((B, S, H, P) if x.MIMO_Out is not None else (B, S, R, H, P), dtype=x.dtype, device=x.Q.device)
    _launch(x, plan, chunks, turns, states, plan.forward, Out=out, GRAD=False)
    return out


def output_gradients(
    x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, states: Tensor, grad_out: Tensor
) -> dict[str, Tensor | None]:
    """Everything of the backward that the states give.

    dq: of each head, un-rotated, [B, S, R, H, N]. d_theta: fp32 [H, T, A], share of the queries. core: gradient
    of O [B, S, H, R, P], only with a norm. dz. sinks: fp32 [2, H, T], per token the products of O and its
    gradient, from its block and from the state. part: fp32 [chunks, H, R (N + 3 P) + 1], sums over each chunk for
    Q_bias, MIMO_Out, MIMO_Z, the norm weight and D.
    """
    B, S, H, _, R, N, P = x.sizes
    T, A, new = B * S, N // x.rotary_dim_divisor, partial(torch.empty, device=x.Q.device)
    result = {
        "dq": new(B, S, R, H, N, dtype=x.dtype),
        "d_theta": new(H, T, A, dtype=turns.scalars.dtype),
        "core": new(B, S, H, R, P, dtype=x.dtype) if x.fuse_norm else None,
        "dz": None if x.Z is None else new(B, S, H, P, dtype=x.Z.dtype),
        "sinks": new(2, H, T, dtype=turns.scalars.dtype),
        "part": new(chunks.count, H, R * (N + 3 * P) + 1, dtype=turns.scalars.dtype),
    }
    names = {"dq": "dQ", "d_theta": "dTheta", "core": "dCore", "dz": "dZ", "sinks": "Sinks", "part": "Part"}
    arrays = {names[k]: v for k, v in result.items()}
    _launch(x, plan, chunks, turns, states, plan.outputs, dO=grad_out, GRAD=True, **arrays)
    return result


def _launch(x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, states: Tensor, how: dict, **arrays) -> None:
    B, S, H, G, R, N, P = x.sizes
    absent = dict.fromkeys(("Out", "dO", "dQ", "dTheta", "dCore", "dZ", "Sinks", "Part"))
    _outputs_kernel[(chunks.count * H,)](
        x.Q, x.K, x.Q_bias, x.K_bias, x.V, x.MIMO_V, x.Z, x.MIMO_Z, x.MIMO_Out, x.D, x.outproj_norm_weight,
        turns.cos, turns.sin, turns.scalars, states, table=chunks.table, T=B * S, eps=x.norm_eps, NORM=x.fuse_norm,
        H=H, G=G, R=R, N=N, P=P, A=N // x.rotary_dim_divisor, C=plan.C, J=plan.J, RP=plan.RP, NH=plan.NH,
        PP=plan.PP, STAGES=plan.stages, **{**absent, **arrays}, **how,
    )  # fmt: skip
