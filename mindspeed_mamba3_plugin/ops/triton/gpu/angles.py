"""Angles and decays of every token, and the cumulative sums over a sequence behind them, in three launches:
a sum for every chunk, a scan over the chunks of a sequence, and the tokens of every chunk from there.

Angles are in half turns, summed in fp64 and brought into [-1, 1], so that their error does not grow with S.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import sigmoid, tanh, wrap
from ..chunks import Chunks
from ..plan import GpuPlan

# Rows of `Turns.scalars`: log2 of the decay since the start of the block (two fp32 that sum to it), the share s of
# a token, the share gamma of its own step, and the decay from the token to the end of its block.
CHI, CLO, SHARE, OWN, EXIT = (tl.constexpr(i) for i in range(5))


@dataclass(frozen=True)
class Turns:
    """What a call's angles and decays amount to; T = B * S tokens, A = N / divisor."""

    cos: Tensor  # [H, T, A]
    sin: Tensor  # [H, T, A]
    scalars: Tensor  # fp32 [5, H, T]
    decay: Tensor  # fp32 [chunks, H], over a whole chunk
    last: Tensor  # fp64 [sequences, H, A], angle of the last token in half turns


@triton.jit(do_not_specialize=["S"])
def _chunk_sums_kernel(Angles, DT, Sums, table, S, H: tl.constexpr, A: tl.constexpr, L: tl.constexpr, AP: tl.constexpr):
    """Sum over a chunk of tanh(Angles) * DT."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(table + 4 * chunk).to(tl.int64)
    reach = tl.load(table + 4 * chunk + 1)
    batch = tl.load(table + 4 * chunk + 3)
    i, a = tl.arange(0, L), tl.arange(0, AP)
    token = start + i
    dt = tl.load(DT + _by_head(token, batch, h, S, H), mask=i < reach, other=0.0).to(tl.float32)
    at = (token[:, None] * H + h) * A + a[None, :]
    x = tl.load(Angles + at, mask=(i < reach)[:, None] & (a < A)[None, :], other=0.0).to(tl.float32)
    total = tl.sum((tanh(x) * dt[:, None]).to(tl.float64), axis=0)
    tl.store(Sums + (chunk.to(tl.int64) * H + h) * A + a, total, mask=a < A)


@triton.jit
def _by_head(token, batch, h, S, H: tl.constexpr):
    """Offset in [B, H, S] of flattened tokens of one batch entry."""
    return token + batch.to(tl.int64) * S * (H - 1) + h.to(tl.int64) * S


@triton.jit
def _scan_sums_kernel(
    Sums, Before, Last, bounds, H: tl.constexpr, A: tl.constexpr, BC: tl.constexpr, AP: tl.constexpr
):
    """Before[c] = sum of Sums over the chunks of the sequence before c; Last, over all of them."""
    sequence, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    i, a = tl.arange(0, BC), tl.arange(0, AP)
    carry = tl.zeros((AP,), tl.float64)
    for b in range(0, tl.cdiv(end - first, BC)):
        c = first + b * BC + i
        ok = (c < end)[:, None] & (a < A)[None, :]
        at = (c.to(tl.int64) * H + h)[:, None] * A + a[None, :]
        x = tl.load(Sums + at, mask=ok, other=0.0)
        tl.store(Before + at, wrap(tl.cumsum(x, axis=0) - x + carry[None, :]), mask=ok)
        carry = wrap(carry + tl.sum(x, axis=0))
    tl.store(Last + (sequence.to(tl.int64) * H + h) * A + a, carry, mask=a < A)


@triton.jit(do_not_specialize=["T", "S"])
def _tokens_kernel(
    Angles, DT, ADT, Trap, Before, Cos, Sin, Scalars, Decay, table, T, S, H: tl.constexpr, A: tl.constexpr,
    C: tl.constexpr, J: tl.constexpr, AP: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(table + 4 * chunk).to(tl.int64)
    reach = tl.load(table + 4 * chunk + 1)
    batch = tl.load(table + 4 * chunk + 3)
    L: tl.constexpr = C * J
    i, a = tl.arange(0, L), tl.arange(0, AP)
    token, inside = start + i, i < reach
    here = _by_head(token, batch, h, S, H)
    dt = tl.load(DT + here, mask=inside, other=0.0).to(tl.float32)
    ok = inside[:, None] & (a < A)[None, :]
    x = tl.load(Angles + (token[:, None] * H + h) * A + a[None, :], mask=ok, other=0.0).to(tl.float32)
    before = tl.load(Before + (chunk.to(tl.int64) * H + h) * A + a, mask=a < A, other=0.0)
    turns = wrap(before[None, :] + tl.cumsum((tanh(x) * dt[:, None]).to(tl.float64), axis=0)).to(tl.float32)
    out = (token + h.to(tl.int64) * T)[:, None] * A + a[None, :]
    tl.store(Cos + out, tl.cos(turns * 3.141592653589793), mask=ok)
    tl.store(Sin + out, tl.sin(turns * 3.141592653589793), mask=ok)

    # Blocks as rows: decays restart at each of them.
    j, c = tl.arange(0, J)[:, None], tl.arange(0, C)[None, :]
    i2 = j * C + c
    inside2 = i2 < reach
    here2 = _by_head(start + i2, batch, h, S, H)
    adt = tl.load(ADT + here2, mask=inside2, other=0.0).to(tl.float64) * 1.4426950408889634
    since = tl.cumsum(adt, axis=1)
    total = tl.sum(adt, axis=1)
    tl.store(Decay + chunk.to(tl.int64) * H + h, tl.exp2(tl.sum(total, axis=0).to(tl.float32)))
    high = since.to(tl.float32)
    dt2 = tl.load(DT + here2, mask=inside2, other=0.0).to(tl.float32)
    own = dt2 * sigmoid(tl.load(Trap + here2, mask=inside2, other=0.0).to(tl.float32))
    later = i2 + 1 < reach
    next_trap = tl.load(Trap + here2 + 1, mask=later, other=0.0).to(tl.float32)
    share = own + tl.load(DT + here2 + 1, mask=later, other=0.0).to(tl.float32) * sigmoid(-next_trap)
    to = Scalars + h.to(tl.int64) * T + start + i2
    row = tl.cast(T, tl.int64) * H
    tl.store(to + CHI * row, high, mask=inside2)
    tl.store(to + CLO * row, (since - high.to(tl.float64)).to(tl.float32), mask=inside2)
    tl.store(to + SHARE * row, share, mask=inside2)
    tl.store(to + OWN * row, own, mask=inside2)
    tl.store(to + EXIT * row, tl.exp2((total[:, None] - since).to(tl.float32)), mask=inside2)


def turns(x: Inputs, plan: GpuPlan, chunks: Chunks) -> Turns:
    """Angles and decays of a call."""
    B, S, H, _, _, N, _ = x.sizes
    T, A = B * S, N // x.rotary_dim_divisor
    AP, new = triton.next_power_of_2(A), partial(torch.empty, device=x.Q.device)
    sums, before = (new(chunks.count, H, A, dtype=torch.float64) for _ in range(2))
    result = Turns(
        cos=new(H, T, A, dtype=plan.store_dtype),
        sin=new(H, T, A, dtype=plan.store_dtype),
        scalars=new(5, H, T, dtype=torch.float32),
        decay=new(chunks.count, H, dtype=torch.float32),
        last=new(chunks.sequences, H, A, dtype=torch.float64),
    )
    grid = (chunks.count * H,)
    if grid[0]:
        _chunk_sums_kernel[grid](x.Angles, x.DT, sums, chunks.table, S, H, A, plan.L, AP, num_warps=4)
    _scan_sums_kernel[(chunks.sequences * H,)](sums, before, result.last, chunks.bounds, H, A, 32, AP, num_warps=4)
    if grid[0]:
        _tokens_kernel[grid](
            x.Angles, x.DT, x.ADT, x.Trap, before, result.cos, result.sin, result.scalars, result.decay, chunks.table,
            T, S, H, A, plan.C, plan.J, AP, num_warps=4,
        )  # fmt: skip
    return result
