"""The forward's last stage: O and the operator's output from the entering states, all chunks at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..chunks import Chunks
from ..plan import GpuPlan
from .angles import CHI, CLO, OWN, SHARE, Turns
from .loads import (
    load_by_rank,
    load_by_token,
    load_queries_and_keys,
    load_states,
    load_values,
)  # fmt: skip
from .tiles import (
    by_column,
    by_state,
    columns,
    left_halves,
    left_matrix,
    load,
    multiply,
    over_ranks,
    pin_all,
    place,
    power2,
    products,
    put,
    right,
    right_halves,
    rotated,
    sigmoid,
    tall,
)  # fmt: skip


@triton.jit
def mixing(Scalars, at, row, reach, rows, C: tl.constexpr, RP: tl.constexpr):
    """What a row (query) takes of every column (key) of its chunk, [M, M], and log2 of its decay since the start."""
    local, source = rows // RP, tl.arange(0, C)
    numbers = Scalars + at
    chi = load(numbers + CHI * row, local, local < reach)
    clo = load(numbers + CLO * row, local, local < reach)
    fade = (chi[:, None] - load(numbers + CHI * row, source, source < reach)[None, :]) + (
        clo[:, None] - load(numbers + CLO * row, source, source < reach)[None, :]
    )
    fade = power2(tl.where((local[:, None] >= source[None, :]) & (local < reach)[:, None], fade, -float("inf")))
    fade *= load(numbers + SHARE * row, source, source < reach)[None, :]
    own = load(numbers + OWN * row, source, source < reach)
    return by_column(tl.where(local[:, None] == source[None, :], own[None, :], fade), RP), chi


@triton.jit
def with_skip(scores, D, h, rows, dtype: tl.constexpr, SPLIT: tl.constexpr):
    """The scores as a left operand, with D on the diagonal, which adds D v to the product with v."""
    if D is not None:
        scores = tl.where(rows[:, None] == rows[None, :], scores + tl.load(D + h).to(tl.float32), scores)
    return left_matrix(scores, dtype, SPLIT)


@triton.jit(do_not_specialize=["T"])
def _outputs_kernel(
    Q, K, Q_bias, K_bias, V, Phi, Z, Zeta, Psi, D, Weight, Cos, Sin, Scalars, States, Out, table, T, eps,
    NORM: tl.constexpr, H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    A: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, NT: tl.constexpr, NW: tl.constexpr, PT: tl.constexpr,
    PW: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    chunk, h, start, reach, head, row, token, r, inside = place(table, T, H, C, RP)
    M: tl.constexpr = C * RP
    dtype: tl.constexpr = States.dtype.element_ty
    rows = tl.arange(0, M)
    ok = inside & (r < R)
    turns, q_halves, k_halves = load_queries_and_keys(
        Q, K, Q_bias, K_bias, Cos, Sin, head, token, r, inside, h, H, G, R, N, A, NT, NW
    )
    values = ()
    for u in tl.static_range(PT):
        values = values + (load_values(V, Phi, token, r, columns(u, PW), inside, h, H, R, P),)
    states = load_states(States, chunk.to(tl.int64) * H + h, dtype, SPLIT, NT, NW, PT, PW)
    mix, chi = mixing(Scalars, head + start, row, reach, rows, C, RP)

    k, q, v = (), (), ()
    for i in tl.static_range(NT):
        turn = pin_all(turns[i])
        k = k + (right_halves(rotated(pin_all(k_halves[i]), turn), dtype, SPLIT),)
        q = q + (left_halves(rotated(pin_all(q_halves[i]), turn), dtype, SPLIT),)
    for u in tl.static_range(PT):
        value = pin_all(values[u])
        v = v + (right(value[0].to(tl.float32) * value[1].to(tl.float32), dtype, SPLIT),)
    scores = with_skip(products(q, k, M) * mix, D, h, rows, dtype, SPLIT)
    ys, gates = (), ()
    square = 0.0
    for u in tl.static_range(PT):
        p = columns(u, PW)
        gate = 1.0
        if Z is not None:
            gate = load_by_token(Z, token, p, inside, h, H, P).to(tl.float32)
            gate = gate * load_by_rank(Zeta, r, p, h, R, P).to(tl.float32)
            gate *= sigmoid(gate)
        if Psi is not None:
            gate *= load_by_rank(Psi, r, p, h, R, P).to(tl.float32)
        if NORM and Weight is not None:
            gate *= load(Weight, h * P + p, p < P).to(tl.float32)
        y = by_state(q, states, u, M, NT, PT, PW) * power2(chi)[:, None]
        y = tall(multiply(scores, v[u], y), RP)
        if NORM:
            square += tl.sum(y * y, axis=3, keep_dims=True)
        ys, gates = ys + (y,), gates + (gate,)
    for u in tl.static_range(PT):
        p = columns(u, PW)
        y = ys[u] * gates[u]
        if NORM:
            y *= tl.rsqrt(square / P + eps)
        if Psi is not None:
            put(Out, (token * H + h) * P + p, over_ranks(y), inside & (p < P))
        else:
            put(Out, ((token * R + r) * H + h) * P + p, y, ok & (p < P))


def outputs(x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, states: Tensor) -> Tensor:
    """The operator's output from the states entering each chunk."""
    B, S, H, G, R, N, P = x.sizes
    shape = (B, S, H, P) if x.MIMO_Out is not None else (B, S, R, H, P)
    out = torch.empty(shape, dtype=x.dtype, device=x.Q.device)
    _outputs_kernel[(chunks.count * H,)](
        x.Q, x.K, x.Q_bias, x.K_bias, x.V, x.MIMO_V, x.Z, x.MIMO_Z, x.MIMO_Out, x.D, x.outproj_norm_weight,
        turns.cos, turns.sin, turns.scalars, states, out, chunks.table, B * S, x.norm_eps, x.fuse_norm,
        H, G, R, N, P, N // x.rotary_dim_divisor, **plan.tiles, **plan.outputs,
    )  # fmt: skip
    return out
