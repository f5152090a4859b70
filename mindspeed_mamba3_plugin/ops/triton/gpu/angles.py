"""Angles and decays of every token, and the cumulative sums over a sequence behind them, in three launches:
a sum for every chunk, a scan over the chunks of a sequence, and the tokens of every chunk from there.

Angles are in half turns, summed over chunks in fp64 and brought into [-1, 1]: their error does not grow with S.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import wrap
from ..chunks import Chunks
from ..plan import GpuPlan
from .tiles import sigmoid, tanh

# Rows of `Turns.scalars`: log2 of the decay since the start of the chunk (two fp32 that sum to it), the share s of
# a token, the share gamma of its own step, and the decay from the token to the end of its chunk.
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
def _chunk_sums_kernel(
    Angles, DT, Sums, table, S, H: tl.constexpr, A: tl.constexpr, C: tl.constexpr, AP: tl.constexpr
):
    """Sum over a chunk of tanh(Angles) * DT."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(table + 4 * chunk).to(tl.int64)
    reach = tl.load(table + 4 * chunk + 1)
    batch = tl.load(table + 4 * chunk + 3)
    i, a = tl.arange(0, C), tl.arange(0, AP)
    token = start + i
    dt = tl.load(DT + _by_head(token, batch, h, S, H), mask=i < reach, other=0.0).to(tl.float32)
    at = (token[:, None] * H + h) * A + a[None, :]
    x = tl.load(Angles + at, mask=(i < reach)[:, None] & (a < A)[None, :], other=0.0).to(tl.float32)
    total = tl.sum((tanh(x) * dt[:, None]).to(tl.float64), axis=0)
    tl.store(Sums + (chunk.to(tl.int64) * H + h) * A + a, total, mask=a < A)


@triton.jit
def _cos_sin(u):
    """Cosine and sine of pi u, -1 <= u <= 1, within a few ulp: polynomials for an eighth turn, then symmetry."""
    quarters = tl.floor(2.0 * u + 0.5)
    x = (u - 0.5 * quarters) * 3.141592653589793
    z = x * x
    s = x + x * z * (-1.6666654611e-1 + z * (8.3321608736e-3 + z * -1.9515295891e-4))
    c = 1.0 - 0.5 * z + z * z * (4.166664568298827e-2 + z * (-1.388731625493765e-3 + z * 2.443315711809948e-5))
    even = 1.0 - tl.abs(quarters)  # 1 at no turn, -1 at a half turn, 0 at a quarter
    return even * c - (quarters - quarters * tl.abs(even)) * s, even * s + (quarters - quarters * tl.abs(even)) * c


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
    C: tl.constexpr, AP: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(table + 4 * chunk).to(tl.int64)
    reach = tl.load(table + 4 * chunk + 1)
    batch = tl.load(table + 4 * chunk + 3)
    i, a = tl.arange(0, C), tl.arange(0, AP)
    token, inside = start + i, i < reach
    here = _by_head(token, batch, h, S, H)
    dt = tl.load(DT + here, mask=inside, other=0.0).to(tl.float32)
    ok = inside[:, None] & (a < A)[None, :]
    x = tl.load(Angles + (token[:, None] * H + h) * A + a[None, :], mask=ok, other=0.0).to(tl.float32)
    before = tl.load(Before + (chunk.to(tl.int64) * H + h) * A + a, mask=a < A, other=0.0)
    turns = wrap(before.to(tl.float32)[None, :] + tl.cumsum(tanh(x) * dt[:, None], axis=0))
    out = (token + h.to(tl.int64) * T)[:, None] * A + a[None, :]
    cos, sin = _cos_sin(turns)
    tl.store(Cos + out, cos.to(Cos.dtype.element_ty), mask=ok)
    tl.store(Sin + out, sin.to(Sin.dtype.element_ty), mask=ok)

    adt = tl.load(ADT + here, mask=inside, other=0.0).to(tl.float64) * 1.4426950408889634
    since, total = tl.cumsum(adt, axis=0), tl.sum(adt, axis=0)
    tl.store(Decay + chunk.to(tl.int64) * H + h, tl.exp2(total.to(tl.float32)))
    high = since.to(tl.float32)
    own = dt * sigmoid(tl.load(Trap + here, mask=inside, other=0.0).to(tl.float32))
    later = i + 1 < reach
    next_trap = tl.load(Trap + here + 1, mask=later, other=0.0).to(tl.float32)
    share = own + tl.load(DT + here + 1, mask=later, other=0.0).to(tl.float32) * sigmoid(-next_trap)
    to = Scalars + h.to(tl.int64) * T + token
    row = tl.cast(T, tl.int64) * H
    tl.store(to + CHI * row, high, mask=inside)
    tl.store(to + CLO * row, (since - high.to(tl.float64)).to(tl.float32), mask=inside)
    tl.store(to + SHARE * row, share, mask=inside)
    tl.store(to + OWN * row, own, mask=inside)
    tl.store(to + EXIT * row, tl.exp2((total - since).to(tl.float32)), mask=inside)


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
    grid, warps = (chunks.count * H,), max(1, min(4, plan.C * AP // 512))
    if grid[0]:
        _chunk_sums_kernel[grid](x.Angles, x.DT, sums, chunks.table, S, H, A, plan.C, AP, num_warps=warps)
    _scan_sums_kernel[(chunks.sequences * H,)](sums, before, result.last, chunks.bounds, H, A, 32, AP, num_warps=4)
    if grid[0]:
        _tokens_kernel[grid](
            x.Angles, x.DT, x.ADT, x.Trap, before, result.cos, result.sin, result.scalars, result.decay, chunks.table,
            T, S, H, A, plan.C, AP, num_warps=warps,
        )  # fmt: skip
    return result
