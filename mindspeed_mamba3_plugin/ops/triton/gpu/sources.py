"""`bwd_bwd`'s main kernel: everything that the gradients of the states give: dK, dV and the sums over each token as a
source."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..chunks import Chunks
from ..plan import GpuPlan
from .angles import CHI, CLO, EXIT, OWN, SHARE, Turns
from .loads import (
    core_gradient,
    load_by_row,
    load_by_token,
    load_core_parts,
    load_halves,
    load_queries_and_keys,
    load_states,
    load_turn,
    load_values,
)  # fmt: skip
from .outputs import with_skip
from .tiles import (
    anew,
    apart,
    by_column,
    by_state,
    by_state_transposed,
    columns,
    cross,
    flat,
    left,
    left_halves,
    left_matrix,
    load,
    multiply,
    over_ranks,
    per_token,
    pin_all,
    place,
    power2,
    products,
    put,
    put_pair_per_token,
    right,
    right_halves,
    rotated,
    store_by_rank,
    tall,
)  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _sources_kernel(
    Q, K, Q_bias, K_bias, V, Phi, dO, Psi, Z, Zeta, Stored, D, Cos, Sin, Scalars, dStates, dK, dTheta, dV, Sources,
    Part, table, T,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr, A: tl.constexpr,
    C: tl.constexpr, RP: tl.constexpr, NT: tl.constexpr, NW: tl.constexpr, PT: tl.constexpr, PW: tl.constexpr,
    SPLIT: tl.constexpr, ANEW: tl.constexpr = False,
):  # fmt: skip
    """The mirror image of the sinks' kernel: rows are sources (k, v), columns their sinks (q, gradient of O)."""
    chunk, h, start, reach, head, row, token, r, inside = place(table, T, H, C, RP)
    M: tl.constexpr = C * RP
    dtype: tl.constexpr = tl.bfloat16 if SPLIT else dStates.dtype.element_ty
    rows = tl.arange(0, M)
    ok = inside & (r < R)
    task = chunk.to(tl.int64) * H + h
    part = Part + task * (R * (N + P))
    turns, q_halves, k_halves = load_queries_and_keys(
        Q, K, Q_bias, K_bias, Cos, Sin, head, token, r, inside, h, H, G, R, N, A, NT, NW
    )
    values, parts = (), ()
    for u in tl.static_range(PT):
        p = columns(u, PW)
        values = values + (load_values(V, Phi, token, r, p, inside, h, H, R, P),)
        parts = parts + (load_core_parts(dO, Psi, Z, Zeta, Stored, token, r, p, inside, h, H, R, P),)
    if not SPLIT:
        states = load_states(dStates, task, dtype, SPLIT, NT, NW, PT, PW)

    local, sink = rows // RP, tl.arange(0, C)
    numbers = Scalars + head + start
    chi = load(numbers + CHI * row, local, local < reach)
    clo = load(numbers + CLO * row, local, local < reach)
    share = load(numbers + SHARE * row, local, local < reach)
    own = load(numbers + OWN * row, local, local < reach)
    leave = load(numbers + EXIT * row, local, local < reach)
    fade = (load(numbers + CHI * row, sink, sink < reach)[None, :] - chi[:, None]) + (
        load(numbers + CLO * row, sink, sink < reach)[None, :] - clo[:, None]
    )
    fade = power2(tl.where((sink[None, :] >= local[:, None]) & (sink < reach)[None, :], fade, -float("inf")))
    fade = by_column(fade, RP)

    k, q, v, gb = (), (), (), ()
    for i in tl.static_range(NT):
        turn = pin_all(turns[i])
        q = q + (right_halves(rotated(pin_all(q_halves[i]), turn), dtype, SPLIT),)
        k = k + (left_halves(rotated(pin_all(k_halves[i]), turn), dtype, SPLIT),)
    for u in tl.static_range(PT):
        gb = gb + (right(core_gradient(pin_all(parts[u])), dtype, SPLIT),)
        value = pin_all(values[u])
        v = v + (left(value[0].to(tl.float32) * value[1].to(tl.float32), dtype, SPLIT),)
    token, h = anew(token, h, ANEW)
    kq = products(k, q, M)
    vg = products(v, gb, M)
    if SPLIT:  # in v's place, which is made again when k has gone: two programs then fit on a multiprocessor
        states = load_states(dStates, task, dtype, SPLIT, NT, NW, PT, PW)
    same = local[:, None] == local[None, :]
    product = fade * (kq * vg)
    others = tl.sum(tl.where(same, 0.0, product), axis=1)
    itself = tl.sum(tl.where(same, product, 0.0), axis=1)
    put_pair_per_token(Sources + head + start, others, itself, row, reach, C, RP)
    mix = tl.where(same, own[:, None], fade * share[:, None])
    gs = left_matrix(mix * vg, dtype, SPLIT)
    direct = with_skip(mix * kq, D, h, rows, dtype, SPLIT)

    beyond = tl.zeros((M,), tl.float32)
    for u in tl.static_range(PT):
        p = columns(u, PW)
        dv = by_state(k, states, u, M, NT, PT, PW) * leave[:, None]
        if SPLIT:
            value = load_values(V, Phi, token, r, p, inside, h, H, R, P)
            beyond += tl.sum(dv * flat(value[0].to(tl.float32) * value[1].to(tl.float32)), axis=1)
        else:
            beyond += tl.sum(dv * v[u][0].to(tl.float32), axis=1)
        dv = tall(multiply(direct, gb[u], dv * share[:, None]), RP)
        x = dv * load_by_token(V, token, p, inside, h, H, P).to(tl.float32)
        store_by_rank(part + R * N, (x,), 0, u, P, R, P, dtype, SPLIT)
        x = dv * load_by_row(Phi, token, r, p, h, R, P).to(tl.float32)
        put(dV, (token * H + h) * P + p, over_ranks(x), inside & (p < P))
    put(Sources + 2 * row, head + start + sink, per_token(beyond, C, RP), sink < reach)

    if SPLIT:
        v = ()
        for u in tl.static_range(PT):
            value = load_values(V, Phi, token, r, columns(u, PW), inside, h, H, R, P)
            v = v + (left(value[0].to(tl.float32) * value[1].to(tl.float32), dtype, SPLIT),)
    weight = (share * leave)[:, None]
    for i in tl.static_range(NT):
        n = columns(i, NW)
        token, h = anew(token, h, ANEW)
        lo, hi = apart(multiply(gs, q[i], by_state_transposed(v, states, i, M, PT, NW) * weight), RP)
        turn = load_turn(Cos, Sin, head + token, n, inside, A)
        cos = turn[0].to(tl.float32)
        sin = turn[1].to(tl.float32)
        at = ((token * R + r) * H + h) * N + n
        x_lo = lo * cos + hi * sin
        put(dK, at, x_lo, ok & (n < N // 2))
        x_hi = hi * cos - lo * sin
        put(dK, at + N // 2, x_hi, ok & (n < N // 2))
        store_by_rank(part, (x_lo, x_hi), N // 2, i, N // 2, R, N, dtype, SPLIT)
        at = (head + token) * A + n
        d_theta = load(dTheta, at, inside & (n < A))
        keys = load_halves(K, K_bias, token, r, n, ok, h, H, G, R, N)
        d_theta += cross(lo, hi, keys, turn, tl.float32 if SPLIT else dtype)
        put(dTheta, at, d_theta, inside & (n < A))


def source_gradients(
    x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, d_states: Tensor, grad_out: Tensor, core: Tensor | None,
    d_theta: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    """Everything of the backward that the gradients of the states give; adds the keys' share to d_theta in place.

    dk: of each head, un-rotated, [B, S, R, H, N]. dv. sources: fp32 [3, H, T], per token the gradient of its share
    s from its chunk, of gamma, and of s from later chunks. part: [chunks, H, R (N + P)], sums over each chunk
    for K_bias and MIMO_V.
    """
    B, S, H, G, R, N, P = x.sizes
    T, new = B * S, partial(torch.empty, device=x.Q.device)
    result = {
        "dk": new(B, S, R, H, N, dtype=x.dtype),
        "dv": new(B, S, H, P, dtype=x.V.dtype),
        "sources": new(3, H, T, dtype=torch.float32),
        "part": new(chunks.count, H, R * (N + P), dtype=plan.sum_dtype(x.dtype)),
    }
    _sources_kernel[(chunks.count * H,)](
        x.Q, x.K, x.Q_bias, x.K_bias, x.V, x.MIMO_V, grad_out, x.MIMO_Out, x.Z, x.MIMO_Z, core, x.D, turns.cos,
        turns.sin, turns.scalars, d_states, result["dk"], d_theta, result["dv"], result["sources"], result["part"],
        chunks.table, T, H, G, R, N, P, N // x.rotary_dim_divisor, **plan.tiles, **plan.sources,
    )  # fmt: skip
    return result
