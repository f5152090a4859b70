"""`bwd_bwd`'s main kernel: everything that depends on the gradients of the states, all chunks at once: dK, dV and the
sums over each token's sources."""

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
    by_rank, core_gradient, left, load, load_by_row, load_by_token, load_core_parts, load_halves, load_turn,
    per_token, pin, pin_halves, pin_parts, power2, put, rank_columns, right, rotated, store_by_rank, tall,
)  # fmt: skip  # isort: skip


@triton.jit(do_not_specialize=["T"])
def _inputs_kernel(
    Q, K, Q_bias, K_bias, V, Phi, dO, Psi, Z, Zeta, Stored, D, Cos, Sin, Scalars, dStates, dK, dTheta, dV, Sources,
    Part, table, T,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr, A: tl.constexpr,
    C: tl.constexpr, J: tl.constexpr, RP: tl.constexpr, NH: tl.constexpr, PP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The mirror image of the outputs' kernel: rows are sources (k, v), columns their sinks (q, gradient of O), and
    the blocks of a chunk are walked from its end with the gradient of the state at hand."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(table + 4 * chunk).to(tl.int64)
    reach = tl.load(table + 4 * chunk + 1)
    M: tl.constexpr = C * RP
    RE: tl.constexpr = RP if RP > 16 else 16
    rows, c1 = tl.arange(0, M), tl.arange(0, C)
    c, r = c1[:, None, None], tl.arange(0, RP)[None, :, None]
    n, p = tl.arange(0, NH)[None, None, :], tl.arange(0, PP)[None, None, :]
    head = h.to(tl.int64) * T
    dtype: tl.constexpr = dStates.dtype.element_ty
    row = tl.cast(T, tl.int64) * H
    task = chunk.to(tl.int64) * H + h
    at_state = dStates + task * (2 * PP * NH) + tl.arange(0, PP)[:, None] + tl.arange(0, NH)[None, :] * PP
    s_lo = tl.load(at_state)
    s_hi = tl.load(at_state + PP * NH)
    if J > 1:
        s_lo = s_lo.to(tl.float32)
        s_hi = s_hi.to(tl.float32)
    d_phi = tl.zeros((PP, RE), tl.float32)
    b_lo = tl.zeros((NH, RE), tl.float32)
    b_hi = tl.zeros((NH, RE), tl.float32)
    blocks = J if J == 1 else tl.minimum(J, tl.cdiv(reach, C))
    for step in tl.range(0, blocks, num_stages=STAGES):
        j = blocks - 1 - step
        inside = j * C + c < reach
        token = start + j * C + c
        ok = inside & (r < R)
        cos, sin = load_turn(Cos, Sin, head + token, n, inside, A)
        k_halves = load_halves(K, K_bias, token, r, n, ok, h, H, G, R, N)
        q_halves = load_halves(Q, Q_bias, token, r, n, ok, h, H, G, R, N)
        vt = load_by_token(V, token, p, inside, h, H, P)
        phi = load_by_row(Phi, r, p, ok, h, R, P)
        parts = load_core_parts(dO, Psi, Z, Zeta, Stored, token, r, p, inside, h, H, R, P)
        local = j * C + rows // RP
        real = local < reach
        number = Scalars + head + start + local
        chi = tl.load(number + CHI * row, mask=real, other=0.0)
        clo = tl.load(number + CLO * row, mask=real, other=0.0)
        share = tl.load(number + SHARE * row, mask=real, other=0.0)
        own = tl.load(number + OWN * row, mask=real, other=0.0)
        leave = tl.load(number + EXIT * row, mask=real, other=0.0)
        cos = pin(cos).to(tl.float32)
        sin = pin(sin).to(tl.float32)
        k_halves = pin_halves(k_halves)
        q_halves = pin_halves(q_halves)
        vt = pin(vt)
        phi = pin(phi)
        parts = pin_parts(parts)
        reaches = (local[None, :] >= local[:, None]) & real[None, :]
        same = local[None, :] == local[:, None]
        fade = power2(tl.where(reaches, (chi[None, :] - chi[:, None]) + (clo[None, :] - clo[:, None]), -float("inf")))
        q_lo, q_hi = rotated(q_halves, cos, sin)
        q_lo = right(q_lo, dtype)
        q_hi = right(q_hi, dtype)
        g = core_gradient(parts)
        gb = right(g, dtype)
        k_lo, k_hi = rotated(k_halves, cos, sin)
        k_lo = left(k_lo, dtype)
        k_hi = left(k_hi, dtype)
        vb = left(vt.to(tl.float32) * phi.to(tl.float32), dtype)
        kq = dot(k_lo, tl.trans(q_lo))
        kq = dot(k_hi, tl.trans(q_hi), kq)
        vg = dot(vb, tl.trans(gb))
        at_s = head + start + j * C + c1
        real_c = j * C + c1 < reach
        product = fade * (kq * vg)
        put(Sources, at_s, per_token(tl.sum(tl.where(same, 0.0, product), axis=1), C, RP), real_c)
        put(Sources + row, at_s, per_token(tl.sum(tl.where(same, product, 0.0), axis=1), C, RP), real_c)
        mix = tl.where(same, own[:, None], fade * share[:, None])
        gs = pin(narrow(mix * vg, dtype))
        direct = mix * kq
        if D is not None:
            skip = tl.load(D + h).to(tl.float32)
            direct = tl.where(rows[:, None] == rows[None, :], direct + skip, direct)
        direct = pin(narrow(direct, dtype))

        sb_lo = narrow(s_lo, dtype)
        sb_hi = narrow(s_hi, dtype)
        dv = dot(k_lo, tl.trans(sb_lo))
        dv = dot(k_hi, tl.trans(sb_hi), dv) * leave[:, None]
        put(Sources + 2 * row, at_s, per_token(tl.sum(dv * vb.to(tl.float32), axis=1), C, RP), real_c)
        dv = tall(dot(direct, gb, dv * share[:, None]), RP)
        picks = rank_columns(rows % RP, RE, dtype)
        vt = load_by_token(V, token, p, inside, h, H, P).to(tl.float32)
        phi = load_by_row(Phi, r, p, ok, h, R, P).to(tl.float32)
        d_phi = by_rank(dv * vt, picks, d_phi)
        put(dV, (token * H + h) * P + p, tl.sum(dv * phi, axis=1, keep_dims=True), inside & (p < P))

        weight = (share * leave)[:, None]
        lo = tall(dot(gs, q_lo, dot(vb, sb_lo) * weight), RP)
        hi = tall(dot(gs, q_hi, dot(vb, sb_hi) * weight), RP)
        at = (head + token) * A + n
        theta = load(dTheta, at, inside & (n < A))
        cos, sin = load_turn(Cos, Sin, head + token, n, inside, A)
        cos = cos.to(tl.float32)
        sin = sin.to(tl.float32)
        turn = tl.sum(hi * tall(k_lo, RP).to(tl.float32) - lo * tall(k_hi, RP).to(tl.float32), axis=1, keep_dims=True)
        put(dTheta, at, turn + theta, inside & (n < A))
        to = ((token * R + r) * H + h) * N + n
        x = lo * cos + hi * sin
        put(dK, to, x, ok & (n < N // 2))
        b_lo = by_rank(x, picks, b_lo)
        x = hi * cos - lo * sin
        put(dK, to + N // 2, x, ok & (n < N // 2))
        b_hi = by_rank(x, picks, b_hi)
        if J > 1:
            end = start + tl.minimum((j + 1) * C, reach) - 1
            kept = tl.exp2(tl.load(Scalars + head + end + CHI * row))
            gw = tl.trans(pin(narrow(right(g, tl.float32) * power2(chi)[:, None], dtype)))
            s_lo = dot(gw, q_lo, s_lo * kept)
            s_hi = dot(gw, q_hi, s_hi * kept)
    part = Part + task * (R * (N + P))
    n1, p1 = tl.arange(0, NH), tl.arange(0, PP)
    store_by_rank(part, b_lo, n1, N // 2, R, RE, N)
    store_by_rank(part + N // 2, b_hi, n1, N // 2, R, RE, N)
    store_by_rank(part + R * N, d_phi, p1, P, R, RE, P)


def input_gradients(
    x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, d_states: Tensor, grad_out: Tensor, core: Tensor | None,
    d_theta: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """Everything of the backward that the gradients of the states give; adds the keys' share to d_theta in place.

    dk: of each head, un-rotated, [B, S, R, H, N]. dv. sources: fp32 [3, H, T], per token the gradient of its share
    s from its block, of gamma, and of s from later blocks. part: fp32 [chunks, H, R (N + P)], sums over each chunk
    for K_bias and MIMO_V.
    """
    B, S, H, G, R, N, P = x.sizes
    T, new = B * S, partial(torch.empty, device=x.Q.device)
    result = {
        "dk": new(B, S, R, H, N, dtype=x.dtype),
        "dv": new(B, S, H, P, dtype=x.V.dtype),
        "sources": new(3, H, T, dtype=d_theta.dtype),
        "part": new(chunks.count, H, R * (N + P), dtype=d_theta.dtype),
    }
    _inputs_kernel[(chunks.count * H,)](
        x.Q, x.K, x.Q_bias, x.K_bias, x.V, x.MIMO_V, grad_out, x.MIMO_Out, x.Z, x.MIMO_Z, core, x.D, turns.cos,
        turns.sin, turns.scalars, d_states, result["dk"], d_theta, result["dv"], result["sources"], result["part"],
        chunks.table, T, H=H, G=G, R=R, N=N, P=P, A=N // x.rotary_dim_divisor, C=plan.C, J=plan.J, RP=plan.RP,
        NH=plan.NH, PP=plan.PP, STAGES=plan.stages, **plan.inputs,
    )  # fmt: skip
    return result
