"""States at the bounds of chunks, and their gradients, in one pass: a program walks over the chunks of a sequence
with a tile of the state on chip, and loads ahead while it works. It moves half of the bytes that `states`, parallel
over chunks, moves, and wants states that are large and enough of them."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import narrow
from ..chunks import Chunks
from ..plan import GpuPlan
from .angles import CHI, EXIT, SHARE, Turns
from .loads import load_bias, load_by_row, load_by_token, load_out_gradient, load_rows, load_turn
from .tiles import columns, left_halves, load, multiply, power2, right, rotated, sigmoid, token_and_rank, transposed


@triton.jit(do_not_specialize=["T"])
def _walk_kernel(
    X, Bias, V, Phi, dO, Psi, Z, Zeta, Cos, Sin, Scalars, Decay, States, Entering, Through, Last, table, bounds, T,
    GRADIENT: tl.constexpr, H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    A: tl.constexpr, C: tl.constexpr, RP: tl.constexpr, NH: tl.constexpr, PP: tl.constexpr, NW: tl.constexpr,
    PW: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """States: what enters every chunk, where a chunk adds the sum of exp(.) s v k^T; with GRADIENT, from the end, the
    gradient of what leaves it, where a chunk adds the sum of exp(.) dO q^T. A tile has both halves of NW columns of N
    as rows, and PW columns of P. Last: the state after the end. Through: see `states.leaving`, a summand for every
    half and tile of P."""
    PT: tl.constexpr = PP // PW
    NT: tl.constexpr = NH // NW
    u, i, line = tl.program_id(0) % PT, tl.program_id(0) // PT % NT, tl.program_id(0) // (PT * NT)
    h, sequence = line % H, line // H
    first, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    start = tl.load(table + 4 * first, mask=first < end, other=0).to(tl.int64)
    length = tl.load(table + 4 * first + 1, mask=first < end, other=0)
    head, row = h.to(tl.int64) * T, tl.cast(T, tl.int64) * H
    dtype: tl.constexpr = States.dtype.element_ty
    n, p = columns(0, NW) + i * NW, columns(0, PW) + u * PW
    c, r = token_and_rank(C, RP)
    bias = load_bias(Bias, c, r, n, h, R, N)
    factor = 1.0
    if not GRADIENT:
        factor = load_by_row(Phi, c, r, p, h, R, P).to(tl.float32)
    if GRADIENT and Psi is not None:
        factor = load_by_row(Psi, c, r, p, h, R, P).to(tl.float32)
    if GRADIENT and Z is not None:
        zeta = load_by_row(Zeta, c, r, p, h, R, P).to(tl.float32)
        factor *= zeta
    m, column = tl.arange(0, 2 * NW), (u * PW + tl.arange(0, PW))[None, :]
    half, number = m // NW, i * NW + m % NW
    here = (half * NH + number)[:, None] * PP + column
    there = ((1 - half) * NH + number)[:, None] * PP + column
    kind = tl.arange(0, 2)[None, :]
    sign = tl.where(kind * half[:, None] == 0, 1.0, -1.0)
    state = tl.zeros((2 * NW, PW), tl.float32)
    for step in tl.range(0, end - first, num_stages=AHEAD):
        k = end - first - 1 - step if GRADIENT else step
        task = (first + k).to(tl.int64) * H + h
        inside = c < length - k * C
        at = start + k * C
        turn = load_turn(Cos + (head + at) * A, Sin + (head + at) * A, c, n, inside, A)
        rows = load_rows(X + at * (R * G * N), c, r, n, inside & (r < R), h, H, G, R, N)
        numbers = Scalars + head + at
        if not GRADIENT:
            weight = load(numbers + SHARE * row, c, inside) * load(numbers + EXIT * row, c, inside)
            y = load_by_token(V + at * (H * P), c, p, inside, h, H, P).to(tl.float32) * weight
        else:
            weight = power2(load(numbers + CHI * row, c, inside))
            y = dO + at * (H * P if Psi is not None else H * R * P)
            y = load_out_gradient(y, c, r, p, inside, h, H, R, P, Psi is not None).to(tl.float32) * weight
            if Z is not None:
                z = load_by_token(Z + at * (H * P), c, p, inside, h, H, P).to(tl.float32)
                y = (y * z) * sigmoid(z * zeta)
        decay = tl.load(Decay + task)
        tl.store(States + task * (2 * NH * PP) + here, narrow(state, dtype))
        both = transposed(left_halves(rotated((rows[0], rows[1], bias[0], bias[1]), turn), dtype, False))
        state *= decay
        if GRADIENT:
            entering = Entering + task * (2 * NH * PP)
            over = state * tl.load(entering + here).to(tl.float32)
        state = multiply(both, right(y * factor, dtype, False), state)
        if GRADIENT:
            turned = state * tl.load(entering + there).to(tl.float32)
            to = Through + ((task * PT + u) * 2 + half)[:, None] * (2 * NH) + number[:, None]
            tl.store(to + kind * NH, tl.sum(tl.join(over, turned), axis=1) * sign)
    if Last is not None:
        tl.store(Last + line.to(tl.int64) * (2 * NH * PP) + here, state)


def fits(x: Inputs, plan: GpuPlan, chunks: Chunks) -> bool:
    """Whether to walk: not over packed sequences, of which one may be long, nor with too few programs for a card."""
    if plan.walk is None or chunks.spare:
        return False
    return _programs(x, plan, chunks) >= plan.walkers


def _programs(x: Inputs, plan: GpuPlan, chunks: Chunks) -> int:
    return chunks.sequences * x.V.shape[2] * (plan.NH // plan.walk["NW"]) * (plan.PP // plan.walk["PW"])


def entering(x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, last: bool) -> tuple[Tensor, Tensor | None]:
    """As `states.entering`."""
    H, new = x.V.shape[2], partial(torch.empty, device=x.V.device)
    result = new(chunks.count, H, 2, plan.NH, plan.PP, dtype=x.dtype)
    end = new(chunks.sequences, H, 2, plan.NH, plan.PP, dtype=torch.float32) if last else None
    _walk(x, plan, chunks, turns, None, result, None, None, end)
    return result, end


def leaving(
    x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, out_gradient: Tensor, entering: Tensor
) -> tuple[Tensor, Tensor]:
    """As `states.leaving`."""
    H, summands, result = x.V.shape[2], 2 * plan.PP // plan.walk["PW"], torch.empty_like(entering)
    through = torch.empty(chunks.count, H, summands, 2, plan.NH, dtype=torch.float32, device=x.V.device)
    _walk(x, plan, chunks, turns, out_gradient, result, entering, through, None)
    return result, through


def _walk(x, plan, chunks, turns, out_gradient, states, entering, through, last) -> None:
    B, S, H, G, R, N, P = x.sizes
    gradient = out_gradient is not None
    _walk_kernel[(_programs(x, plan, chunks),)](
        x.Q if gradient else x.K, x.Q_bias if gradient else x.K_bias, x.V, x.MIMO_V, out_gradient, x.MIMO_Out, x.Z,
        x.MIMO_Z, turns.cos, turns.sin, turns.scalars, turns.decay, states, entering, through, last, chunks.table,
        chunks.bounds, B * S, gradient, H, G, R, N, P, N // x.rotary_dim_divisor, plan.C, plan.RP, plan.NH, plan.PP,
        **plan.walk,
    )  # fmt: skip
