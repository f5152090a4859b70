"""`bwd_fwd`'s main kernel: recompute O from the entering states, then back through the gate to everything that the
states give: dQ, dZ, the weights after O, and the sums over each token as a sink."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
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
    load_state,
    load_states,
    load_turn,
    load_values,
)  # fmt: skip
from .norm import norm_gradients
from .outputs import mixing, with_skip
from .tiles import (
    anew,
    apart,
    by_state,
    by_state_transposed,
    columns,
    cross,
    flat,
    left,
    left_halves,
    left_matrix,
    multiply,
    over_ranks,
    pin_all,
    place,
    power2,
    products,
    put,
    put_in_two,
    put_pair_per_token,
    right,
    right_halves,
    rotated,
    sigmoid,
    store_by_rank,
    tall,
    whole,
)  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _sinks_kernel(
    Q, K, Q_bias, K_bias, V, Phi, Z, Zeta, Psi, D, Stored, Cos, Sin, Scalars, States, dO, dQ, dTheta, dZ,
    Sinks, Part, table, T,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr, A: tl.constexpr,
    C: tl.constexpr, RP: tl.constexpr, NT: tl.constexpr, NW: tl.constexpr, PT: tl.constexpr, PW: tl.constexpr,
    SPLIT: tl.constexpr, ANEW: tl.constexpr = False,
):  # fmt: skip
    """With the gradient of O stored there is nothing after O to go back through, and O is not needed."""
    chunk, h, start, reach, head, row, token, r, inside = place(table, T, H, C, RP)
    M: tl.constexpr = C * RP
    dtype: tl.constexpr = tl.bfloat16 if SPLIT else States.dtype.element_ty
    rows = tl.arange(0, M)
    ok = inside & (r < R)
    task = chunk.to(tl.int64) * H + h
    part = Part + task * (R * (N + 3 * P) + 8)
    turns, q_halves, k_halves = load_queries_and_keys(
        Q, K, Q_bias, K_bias, Cos, Sin, head, token, r, inside, h, H, G, R, N, A, NT, NW
    )
    values, parts = (), ()
    for u in tl.static_range(PT):
        p = columns(u, PW)
        values = values + (load_values(V, Phi, token, r, p, inside, h, H, R, P),)
        parts = parts + (load_core_parts(dO, Psi, Z, Zeta, Stored, token, r, p, inside, h, H, R, P),)
    if Stored is None:
        states = load_states(States, task, dtype, SPLIT, NT, NW, PT, PW)
    mix, chi = mixing(Scalars, head + start, row, reach, rows, C, RP)

    k, q, v, gb = (), (), (), ()
    d_skip = 0.0
    for i in tl.static_range(NT):
        turn = pin_all(turns[i])
        k = k + (right_halves(rotated(pin_all(k_halves[i]), turn), dtype, SPLIT),)
        if Stored is None:
            q = q + (left_halves(rotated(pin_all(q_halves[i]), turn), dtype, SPLIT),)
    for u in tl.static_range(PT):
        value = pin_all(values[u])
        x = value[0].to(tl.float32) * value[1].to(tl.float32)
        v = v + (right(x, dtype, SPLIT),)
        g = core_gradient(pin_all(parts[u]))
        gb = gb + (left(g, dtype, SPLIT),)
        if Stored is None and D is not None:
            d_skip += tl.sum(tl.sum(flat(g * x), axis=1), axis=0)
    if Stored is None:
        scores = products(q, k, M) * mix
        direct = with_skip(scores, D, h, rows, dtype, SPLIT)
    since = power2(chi)[:, None]
    from_state = tl.zeros((M,), tl.float32)
    token, h = anew(token, h, ANEW)
    gv = products(gb, v, M)
    same = (rows // RP)[:, None] == (rows // RP)[None, :]
    gs = left_matrix(mix * gv, dtype, SPLIT)
    if Stored is None:
        others = tl.sum(tl.where(same, 0.0, scores * gv), axis=1)
        for u in tl.static_range(PT):
            p = columns(u, PW)
            token, h = anew(token, h, ANEW)
            y = by_state(q, states, u, M, NT, PT, PW) * since
            from_state += tl.sum(y * whole(gb[u]), axis=1)
            y = tall(multiply(direct, v[u], y), RP)
            up = load_out_gradient(dO, token, r, p, inside, h, H, R, P, Psi is not None).to(tl.float32)
            if Psi is not None:
                psi = load_by_row(Psi, token, r, p, h, R, P).to(tl.float32)
            if Z is not None:
                z = load_by_token(Z, token, p, inside, h, H, P).to(tl.float32)
                zeta = load_by_row(Zeta, token, r, p, h, R, P).to(tl.float32)
                gate = z * zeta
                sig = sigmoid(gate)
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
                store_by_rank(part + R * (N if Psi is not None else N + P), sums, R * P, u, P, R, P, dtype, SPLIT)
        if D is not None:
            put_in_two(part + R * (N + 3 * P), d_skip)
        put_pair_per_token(Sinks + head + start, others, from_state, row, reach, C, RP)

    for i in tl.static_range(NT):
        n = columns(i, NW)
        if Stored is None:
            back = by_state_transposed(gb, states, i, M, PT, NW)
        else:  # one tile at a time: two programs then fit on a multiprocessor
            back = tl.zeros((M, 2 * NW), tl.float32)
            for u in tl.static_range(PT):
                back = multiply(gb[u], load_state(States, task, i, u, dtype, SPLIT, NT, NW, PT, PW), back)
        token, h = anew(token, h, ANEW)
        lo, hi = apart(multiply(gs, k[i], back * since), RP)
        turn = load_turn(Cos, Sin, head + token, n, inside, A)
        cos = turn[0].to(tl.float32)
        sin = turn[1].to(tl.float32)
        at = ((token * R + r) * H + h) * N + n
        x_lo = lo * cos + hi * sin
        put(dQ, at, x_lo, ok & (n < N // 2))
        x_hi = hi * cos - lo * sin
        put(dQ, at + N // 2, x_hi, ok & (n < N // 2))
        store_by_rank(part, (x_lo, x_hi), N // 2, i, N // 2, R, N, dtype, SPLIT)
        queries = load_halves(Q, Q_bias, token, r, n, ok, h, H, G, R, N)
        d_theta = cross(lo, hi, queries, turn, tl.float32 if SPLIT else dtype)
        put(dTheta, (head + token) * A + n, d_theta, inside & (n < A))


def sink_gradients(
    x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, states: Tensor, grad_out: Tensor
) -> dict[str, Tensor | None]:
    """Everything of the backward that the states give.

    dq: of each head, un-rotated, [B, S, R, H, N]. d_theta: fp32 [H, T, A], share of the queries. core: gradient
    of O [B, S, H, R, P], only with a norm, fp32. dz. sinks: fp32 [2, H, T], per token the products of O's terms and
    its gradient, from other tokens of its chunk and from the state; with a norm [1, H, T], from both and from the
    token itself. part: [chunks, H, R (N + 3 P) + 8], sums over each chunk for Q_bias, MIMO_Out, MIMO_Z, the norm
    weight and D, as two numbers, and six unused ones, so that rows are aligned; parts of absent arguments are not
    written.
    """
    B, S, H, G, R, N, P = x.sizes
    T, A, new = B * S, N // x.rotary_dim_divisor, partial(torch.empty, device=x.Q.device)
    result = {
        "dq": new(B, S, R, H, N, dtype=x.dtype),
        "d_theta": new(H, T, A, dtype=torch.float32),
        "core": new(B, S, H, R, P, dtype=torch.float32) if x.fuse_norm else None,
        "dz": None if x.Z is None else new(B, S, H, P, dtype=x.Z.dtype),
        "sinks": new(1 if x.fuse_norm else 2, H, T, dtype=torch.float32),
        "part": new(chunks.count, H, R * (N + 3 * P) + 8, dtype=plan.sum_dtype(x.dtype)),
    }
    if x.fuse_norm:
        norm_gradients(x, plan, chunks, turns, states, grad_out, result)
    _sinks_kernel[(chunks.count * H,)](
        x.Q, x.K, x.Q_bias, x.K_bias, x.V, x.MIMO_V, x.Z, x.MIMO_Z, x.MIMO_Out, x.D, result["core"], turns.cos,
        turns.sin, turns.scalars, states, grad_out, result["dq"], result["d_theta"], result["dz"], result["sinks"],
        result["part"], chunks.table, T, H, G, R, N, P, A, **plan.tiles, **plan.sinks,
    )  # fmt: skip
    return result
