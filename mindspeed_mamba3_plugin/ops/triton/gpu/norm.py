"""The fused norm's share of `bwd_fwd`: recompute O from the entering states, then back through the gate and the norm
to the gradient of O, from which everything else goes on."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..chunks import Chunks
from ..plan import GpuPlan
from .angles import Turns
from .loads import (
    load_by_row,
    load_by_token,
    load_queries_and_keys,
    load_state,
    load_values,
)  # fmt: skip
from .outputs import mixing, with_skip
from .tiles import (
    columns,
    left_halves,
    load,
    multiply,
    over_ranks,
    pin_all,
    place,
    power2,
    products,
    put,
    put_in_two,
    right,
    right_halves,
    rotated,
    sigmoid,
    store_by_rank,
    tall,
    transposed,
)  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _norm_kernel(
    Q, K, Q_bias, K_bias, V, Phi, Z, Zeta, Psi, D, Weight, Cos, Sin, Scalars, States, dO, dCore, dZ, Sinks, Part,
    table, T, eps,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr, A: tl.constexpr,
    C: tl.constexpr, RP: tl.constexpr, NT: tl.constexpr, NW: tl.constexpr, PT: tl.constexpr, PW: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    chunk, h, start, reach, head, row, token, r, inside = place(table, T, H, C, RP)
    M: tl.constexpr = C * RP
    dtype: tl.constexpr = tl.bfloat16 if SPLIT else States.dtype.element_ty
    rows = tl.arange(0, M)
    ok = inside & (r < R)
    task = chunk.to(tl.int64) * H + h
    part = Part + task * (R * (N + 3 * P) + 8) + R * N
    turns, q_halves, k_halves = load_queries_and_keys(
        Q, K, Q_bias, K_bias, Cos, Sin, head, token, r, inside, h, H, G, R, N, A, NT, NW
    )
    k, q = (), ()
    for i in tl.static_range(NT):
        turn = pin_all(turns[i])
        k = k + (right_halves(rotated(pin_all(k_halves[i]), turn), dtype, SPLIT),)
        q = q + (left_halves(rotated(pin_all(q_halves[i]), turn), dtype, SPLIT),)
    mix, chi = mixing(Scalars, head + start, row, reach, rows, C, RP)
    scores = with_skip(products(q, k, M) * mix, D, h, rows, dtype, SPLIT)
    ys = ()
    square = 0.0
    for u in tl.static_range(PT):  # loaded late: in k's place, and two programs fit on a multiprocessor
        y = tl.zeros((M, PW), tl.float32)
        for i in tl.static_range(NT):
            y = multiply(q[i], transposed(load_state(States, task, i, u, dtype, SPLIT, NT, NW, PT, PW)), y)
        value = load_values(V, Phi, token, r, columns(u, PW), inside, h, H, R, P)
        v = right(value[0].to(tl.float32) * value[1].to(tl.float32), dtype, SPLIT)
        y = tall(multiply(scores, v, y * power2(chi)[:, None]), RP)
        square += tl.sum(y * y, axis=3, keep_dims=True)
        ys = ys + (y,)
    scale = tl.rsqrt(square / P + eps)

    gs = ()
    along = 0.0
    for u in tl.static_range(PT):
        p = columns(u, PW)
        up = load_by_token(dO, token, p, inside, h, H, P).to(tl.float32)
        psi = load_by_row(Psi, token, r, p, h, R, P).to(tl.float32)
        z = load_by_token(Z, token, p, inside, h, H, P).to(tl.float32)
        zeta = load_by_row(Zeta, token, r, p, h, R, P).to(tl.float32)
        gate = z * zeta
        sig = sigmoid(gate)
        unit = ys[u] * scale
        y = unit
        g = up * psi * (gate * sig)
        if Weight is not None:
            weight = load(Weight, h * P + p, p < P).to(tl.float32)
            y *= weight
            store_by_rank(part + 2 * R * P, (g * unit,), 0, u, P, R, P, dtype, SPLIT)
            g *= weight
        along += tl.sum(g * unit, axis=3, keep_dims=True)
        gs = gs + (g,)
        y *= up
        of_psi = y * (gate * sig)
        y *= psi * (sig * (1.0 + gate * (1.0 - sig)))
        put(dZ, (token * H + h) * P + p, over_ranks(y * zeta), inside & (p < P))
        store_by_rank(part, (of_psi, y * z), R * P, u, P, R, P, dtype, SPLIT)

    # dO . O is 0 but for eps, and exact so; D's share taken off, it is what the keys and the state give.
    given = along * eps * scale * scale
    skip = 0.0
    for u in tl.static_range(PT):
        p = columns(u, PW)
        g = scale * (gs[u] - ys[u] * scale * (along / P))
        put(dCore, ((token * H + h) * R + r) * P + p, g, ok & (p < P))
        if D is not None:
            x = load_by_token(V, token, p, inside, h, H, P).to(tl.float32)
            x *= load_by_row(Phi, token, r, p, h, R, P).to(tl.float32)
            skip += tl.sum(g * x, axis=3, keep_dims=True)
    if D is not None:
        given -= skip * tl.load(D + h).to(tl.float32)
        put_in_two(part + R * 3 * P, tl.sum(tl.reshape(skip, (M,)), axis=0))
    put(Sinks, head + token, over_ranks(given), inside)


def norm_gradients(
    x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, states: Tensor, grad_out: Tensor,
    into: dict[str, Tensor | None],
) -> None:  # fmt: skip
    """Fill core, dz, sinks and, of part, all but the sums for Q_bias (see `sinks.sink_gradients`)."""
    B, S, H, G, R, N, P = x.sizes
    _norm_kernel[(chunks.count * H,)](
        x.Q, x.K, x.Q_bias, x.K_bias, x.V, x.MIMO_V, x.Z, x.MIMO_Z, x.MIMO_Out, x.D, x.outproj_norm_weight,
        turns.cos, turns.sin, turns.scalars, states, grad_out, into["core"], into["dz"], into["sinks"], into["part"],
        chunks.table, B * S, x.norm_eps, H, G, R, N, P, N // x.rotary_dim_divisor, **plan.tiles, **plan.norm,
    )  # fmt: skip
