"""`bwd_fwd`'s main kernel: recompute O from the entering states, then back through the gate and the norm to
everything that the states give: dQ, dZ, the weights after O, and the sums over each token as a sink."""

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
from .angles import Turns
from .loads import (
    core_gradient,
    load_by_row,
    load_by_token,
    load_core_parts,
    load_halves,
    load_out_gradient,
    load_queries_and_keys,
    load_states,
    load_turn,
    load_values,
)  # fmt: skip
from .outputs import mixing, with_skip
from .tiles import (
    apart,
    by_state,
    by_state_transposed,
    columns,
    cross,
    flat,
    left,
    left_halves,
    load,
    over_ranks,
    pin,
    pin_all,
    place,
    power2,
    products,
    put,
    put_pair_per_token,
    right,
    right_halves,
    rotated,
    sigmoid,
    store_by_rank,
    tall,
)  # fmt: skip


@triton.jit
def _through_scores(gb, v, scores, mix, rows, RP: tl.constexpr, M: tl.constexpr, dtype: tl.constexpr):
    """From the gradient of O to that of q k^T, and the sum over each row of what comes from other tokens."""
    gv = products(gb, v, M)
    same = (rows // RP)[:, None] == (rows // RP)[None, :]
    return pin(narrow(mix * gv, dtype)), tl.sum(tl.where(same, 0.0, scores * gv), axis=1)


@triton.jit(do_not_specialize=["T"])
def _sinks_kernel(
    Q, K, Q_bias, K_bias, V, Phi, Z, Zeta, Psi, D, Weight, Cos, Sin, Scalars, States, dO, dQ, dTheta, dCore, dZ,
    Sinks, Part, table, T, eps, NORM: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr, A: tl.constexpr,
    C: tl.constexpr, RP: tl.constexpr, NT: tl.constexpr, NW: tl.constexpr, PT: tl.constexpr, PW: tl.constexpr,
):  # fmt: skip
    chunk, h, start, reach, head, row, token, r, inside = place(table, T, H, C, RP)
    M: tl.constexpr = C * RP
    dtype: tl.constexpr = States.dtype.element_ty
    rows = tl.arange(0, M)
    ok = inside & (r < R)
    task = chunk.to(tl.int64) * H + h
    part = Part + task * (R * (N + 3 * P) + 4)
    turns, q_halves, k_halves = load_queries_and_keys(
        Q, K, Q_bias, K_bias, Cos, Sin, head, token, r, inside, h, H, G, R, N, A, NT, NW
    )
    values, parts = (), ()
    for u in tl.static_range(PT):
        p = columns(u, PW)
        values = values + (load_values(V, Phi, token, r, p, inside, h, H, R, P),)
        if not NORM:
            parts = parts + (load_core_parts(dO, Psi, Z, Zeta, None, token, r, p, inside, h, H, R, P),)
    states = load_states(States, task, NT, NW, PT, PW)
    mix, chi = mixing(Scalars, head + start, row, reach, rows, C, RP)

    k, q, v, gb = (), (), (), ()
    d_skip = 0.0
    for i in tl.static_range(NT):
        turn = pin_all(turns[i])
        k = k + (right_halves(rotated(pin_all(k_halves[i]), turn), dtype),)
        q = q + (left_halves(rotated(pin_all(q_halves[i]), turn), dtype),)
    for u in tl.static_range(PT):
        value = pin_all(values[u])
        x = value[0].to(tl.float32) * value[1].to(tl.float32)
        v = v + (right(x, dtype),)
        if not NORM:
            g = core_gradient(pin_all(parts[u]))
            gb = gb + (left(g, dtype),)
            if D is not None:
                d_skip += tl.sum(tl.sum(flat(g * x), axis=1), axis=0)
    scores = products(q, k, M) * mix
    direct = with_skip(scores, D, h, rows, dtype)
    since = power2(chi)[:, None]
    from_state = tl.zeros((M,), tl.float32)
    if not NORM:
        gs, others = _through_scores(gb, v, scores, mix, rows, RP, M, dtype)
    else:
        ys, gs_core = (), ()
        square, along = 0.0, 0.0
        for u in tl.static_range(PT):
            y = tall(dot(direct, v[u], by_state(q, states, u, M, NT, PT, PW) * since), RP)
            square += tl.sum(y * y, axis=3, keep_dims=True)
            ys = ys + (y,)
        scale = tl.rsqrt(square / P + eps)
    for u in tl.static_range(PT):
        p = columns(u, PW)
        if not NORM:
            y = by_state(q, states, u, M, NT, PT, PW) * since
            from_state += tl.sum(y * gb[u].to(tl.float32), axis=1)
            y = tall(dot(direct, v[u], y), RP)
        up = load_out_gradient(dO, token, r, p, inside, h, H, R, P, Psi is not None).to(tl.float32)
        if Psi is not None:
            psi = load_by_row(Psi, token, r, p, h, R, P).to(tl.float32)
        if Z is not None:
            z = load_by_token(Z, token, p, inside, h, H, P).to(tl.float32)
            zeta = load_by_row(Zeta, token, r, p, h, R, P).to(tl.float32)
            gate = z * zeta
            sig = sigmoid(gate)
        if NORM:
            unit = ys[u] * scale
            y = unit
            g = up * psi * (gate * sig)
            if Weight is not None:
                weight = load(Weight, h * P + p, p < P).to(tl.float32)
                y *= weight
                store_by_rank(part + R * (N + 2 * P), (g * unit,), 0, u, P, R, P, dtype)
                g *= weight
            along += tl.sum(g * unit, axis=3, keep_dims=True)
            gs_core = gs_core + (g,)
        y *= up
        sums = ()
        if Psi is not None:
            sums = (y * (gate * sig) if Z is not None else y,)
            y *= psi
        if Z is not None:
            y *= sig * (1.0 + gate * (1.0 - sig))
            sums = sums + (y * z,)
            put(dZ, (token * H + h) * P + p, over_ranks(y * zeta), inside & (p < P))
        if len(sums) > 0:
            store_by_rank(part + R * (N if Psi is not None else N + P), sums, R * P, u, P, R, P, dtype)
    if NORM:
        for u in tl.static_range(PT):
            p = columns(u, PW)
            g = scale * (gs_core[u] - ys[u] * scale * (along / P))
            put(dCore, ((token * H + h) * R + r) * P + p, g, ok & (p < P))
            gb = gb + (left(g, dtype),)
            y = by_state(q, states, u, M, NT, PT, PW) * since
            from_state += tl.sum(y * gb[u].to(tl.float32), axis=1)
            if D is not None:
                x = load_by_token(V, token, p, inside, h, H, P).to(tl.float32)
                x *= load_by_row(Phi, token, r, p, h, R, P).to(tl.float32)
                d_skip += tl.sum(tl.sum(flat(g * x), axis=1), axis=0)
        gs, others = _through_scores(gb, v, scores, mix, rows, RP, M, dtype)
    tl.store(part + R * (N + 3 * P), d_skip)
    put_pair_per_token(Sinks + head + start, others, from_state, row, reach, C, RP)

    for i in tl.static_range(NT):
        n = columns(i, NW)
        lo, hi = apart(dot(gs, k[i], by_state_transposed(gb, states, i, M, PT, NW) * since), RP)
        turn = load_turn(Cos, Sin, head + token, n, inside, A)
        cos = turn[0].to(tl.float32)
        sin = turn[1].to(tl.float32)
        at = ((token * R + r) * H + h) * N + n
        x_lo = lo * cos + hi * sin
        put(dQ, at, x_lo, ok & (n < N // 2))
        x_hi = hi * cos - lo * sin
        put(dQ, at + N // 2, x_hi, ok & (n < N // 2))
        store_by_rank(part, (x_lo, x_hi), N // 2, i, N // 2, R, N, dtype)
        d_theta = cross(lo, hi, load_halves(Q, Q_bias, token, r, n, ok, h, H, G, R, N), turn, dtype)
        put(dTheta, (head + token) * A + n, d_theta, inside & (n < A))


def sink_gradients(
    x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, states: Tensor, grad_out: Tensor
) -> dict[str, Tensor | None]:
    """Everything of the backward that the states give.

    dq: of each head, un-rotated, [B, S, R, H, N]. d_theta: fp32 [H, T, A], share of the queries. core: gradient
    of O [B, S, H, R, P], only with a norm. dz. sinks: fp32 [2, H, T], per token the products of O and its
    gradient, from its chunk and from the state. part: fp32 [chunks, H, R (N + 3 P) + 4], sums over each chunk for
    Q_bias, MIMO_Out, MIMO_Z, the norm weight and D, which three unused numbers follow, so that rows are aligned;
    parts of absent arguments are not written.
    """
    B, S, H, G, R, N, P = x.sizes
    T, A, new = B * S, N // x.rotary_dim_divisor, partial(torch.empty, device=x.Q.device)
    result = {
        "dq": new(B, S, R, H, N, dtype=x.dtype),
        "d_theta": new(H, T, A, dtype=torch.float32),
        "core": new(B, S, H, R, P, dtype=x.dtype) if x.fuse_norm else None,
        "dz": None if x.Z is None else new(B, S, H, P, dtype=x.Z.dtype),
        "sinks": new(2, H, T, dtype=torch.float32),
        "part": new(chunks.count, H, R * (N + 3 * P) + 4, dtype=torch.float32),
    }
    _sinks_kernel[(chunks.count * H,)](
        x.Q, x.K, x.Q_bias, x.K_bias, x.V, x.MIMO_V, x.Z, x.MIMO_Z, x.MIMO_Out, x.D, x.outproj_norm_weight,
        turns.cos, turns.sin, turns.scalars, states, grad_out, result["dq"], result["d_theta"], result["core"],
        result["dz"], result["sinks"], result["part"], chunks.table, T, x.norm_eps, x.fuse_norm,
        H, G, R, N, P, A, **plan.tiles, **plan.sinks,
    )  # fmt: skip
    return result
