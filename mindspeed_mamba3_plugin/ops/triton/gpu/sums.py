"""Reductions after the main kernels: dQ and dK over the heads of a group, and every token's scalar gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import narrow
from ..chunks import Chunks
from ..plan import GpuPlan
from .angles import OWN, _by_head
from .tiles import sigmoid, tanh


@triton.jit(do_not_specialize=["rows"])
def _over_heads_kernel(X, Out, rows, HEADS: tl.constexpr, N: tl.constexpr, BR: tl.constexpr, NP: tl.constexpr):
    """Out [rows, N] = sum over the heads of X [rows, HEADS, N]."""
    r, n = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, NP)
    ok = (r < rows)[:, None] & (n < N)[None, :]
    at = X + r[:, None] * (HEADS * N) + n[None, :]
    total = tl.zeros((BR, NP), tl.float32)
    for h in tl.range(0, HEADS, num_stages=4):
        total += tl.load(at + h * N, mask=ok, other=0.0).to(tl.float32)
    tl.store(Out + r[:, None] * N + n[None, :], narrow(total, Out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["rows"])
def _over_chunks_kernel(X, Out, rows, width: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Out [width] = sum over the rows of X [rows, width]."""
    w, r = tl.program_id(0) * BW + tl.arange(0, BW), tl.arange(0, BR)
    ok = w < width
    total = tl.zeros((BR, BW), tl.float32)
    for start in tl.range(0, rows, BR, num_stages=4):
        at = (start + r).to(tl.int64)[:, None] * width + w[None, :]
        total += tl.load(X + at, mask=(start + r < rows)[:, None] & ok[None, :], other=0.0).to(tl.float32)
    tl.store(Out + w, tl.sum(total, axis=0), mask=ok)


@triton.jit(do_not_specialize=["T", "S"])
def _scalars_kernel(
    Angles, DT, Trap, dTheta, Through, Scalars, Sinks, Sources, dAngles, dADT, dDT, dTrap, table, T, S,
    H: tl.constexpr, A: tl.constexpr, C: tl.constexpr, AP: tl.constexpr, NH: tl.constexpr, NORM: tl.constexpr,
    SUMMANDS: tl.constexpr,
):  # fmt: skip
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(table + 4 * chunk).to(tl.int64)
    reach = tl.load(table + 4 * chunk + 1)
    done = tl.load(table + 4 * chunk + 2)
    batch = tl.load(table + 4 * chunk + 3)
    i, a = tl.arange(0, C), tl.arange(0, AP)
    inside, first = i < reach, i + done == 0
    token, head, row = start + i, h.to(tl.int64) * T, tl.cast(T, tl.int64) * H
    here = _by_head(token, batch, h, S, H)
    task = chunk.to(tl.int64) * H + h

    # An angle turns all that reaches later tokens: what crosses the start of the chunk, less what turned since then.
    # The end of the chunk is known too, with a rounding of its own: half the gap to it is spread over the tokens.
    ok = inside[:, None] & (a < A)[None, :]
    dt = tl.load(DT + here, mask=inside, other=0.0).to(tl.float32)
    at = (token[:, None] * H + h) * A + a[None, :]
    t = tanh(tl.load(Angles + at, mask=ok, other=0.0).to(tl.float32))
    theta = tl.load(dTheta + (head + token)[:, None] * A + a[None, :], mask=ok, other=0.0)
    of, more = Through + task * (SUMMANDS * 2 * NH), reach > C
    turn, end, over = tl.zeros((AP,), tl.float32), tl.zeros((AP,), tl.float32), 0.0
    for k in tl.static_range(SUMMANDS):
        over += tl.sum(tl.load(of + 2 * k * NH + tl.arange(0, NH)), axis=0)
        turn += tl.load(of + (2 * k + 1) * NH + a, mask=a < A, other=0.0)
        end += tl.load(of + (2 * (H * SUMMANDS + k) + 1) * NH + a, mask=a < tl.where(more, A, 0), other=0.0)
    turn, end = turn[None, :], end[None, :]
    gap = 0.5 * (end - turn + tl.sum(theta, axis=0)[None, :]) / tl.minimum(reach, C).to(tl.float32)
    turn = (turn + theta - tl.cumsum(theta, axis=0) + gap * i.to(tl.float32)[:, None]) * 3.141592653589793
    tl.store(dAngles + at, narrow(turn * dt[:, None] * (1.0 - t * t), dAngles.dtype.element_ty), mask=ok)
    d_dt = tl.sum(turn * t, axis=1)

    # A token's share of a step is its own plus the next token's: d_share of the token before belongs to this one.
    trap = sigmoid(tl.load(Trap + here, mask=inside, other=0.0).to(tl.float32))
    source = Sources + head + token
    beyond = tl.load(source + 2 * row, mask=inside, other=0.0)
    itself = tl.load(source + row, mask=inside, other=0.0)
    own = itself + (tl.load(source, mask=inside, other=0.0) + beyond)
    before = inside & (first == 0)
    past = tl.load(source - 1, mask=before, other=0.0) + tl.load(source - 1 + 2 * row, mask=before, other=0.0)
    tl.store(dDT + here, narrow(d_dt + own * trap + past * (1.0 - trap), dDT.dtype.element_ty), mask=inside)
    tl.store(dTrap + here, narrow((own - past) * dt * trap * (1.0 - trap), dTrap.dtype.element_ty), mask=inside)

    # A decay scales all that goes over its token: over the whole chunk, from before the chunk to sinks from here on,
    # from sources before here to after the chunk, and pair by pair inside it.
    share = tl.load(Scalars + 2 * row + head + token, mask=inside, other=0.0)
    if NORM:
        sunk = -tl.load(Scalars + OWN * row + head + token, mask=inside, other=0.0) * itself
    else:
        sunk = tl.load(Sinks + row + head + token, mask=inside, other=0.0)
    sunk += tl.load(Sinks + head + token, mask=inside, other=0.0) - share * tl.load(source, mask=inside, other=0.0)
    sent = beyond * share
    over += tl.cumsum(sunk, axis=0, reverse=True) + tl.cumsum(sent, axis=0) - sent
    tl.store(dADT + here, narrow(over, dADT.dtype.element_ty), mask=inside)


def over_heads(per_head: Tensor, x: Inputs) -> Tensor:
    """[B, S, R, H, N] of each head -> [B, S, R, G, N] of each group."""
    B, S, H, G, R, N, _ = x.sizes
    result = torch.empty(B, S, R, G, N, dtype=x.Q.dtype, device=x.Q.device)
    if G == H:
        return result.copy_(per_head)
    rows, NP = B * S * R * G, triton.next_power_of_2(N)
    BR = max(1, 2048 // NP)
    _over_heads_kernel[(triton.cdiv(rows, BR),)](per_head, result, rows, H // G, N, BR, NP, num_warps=4)
    return result


def over_chunks(part: Tensor) -> Tensor:
    """Sum of [chunks, H, w] over the chunks, in fp32."""
    chunks, H, w = part.shape
    result = torch.empty(H, w, dtype=torch.float32, device=part.device)
    _over_chunks_kernel[(triton.cdiv(H * w, 64),)](part, result, chunks, H * w, 32, 64, num_warps=4)
    return result


def scalar_gradients(
    x: Inputs, plan: GpuPlan, chunks: Chunks, d_theta: Tensor, through: Tensor, scalars: Tensor,
    sinks: Tensor, sources: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of Angles, ADT, DT and Trap."""
    B, S, H, *_ = x.sizes
    A = d_theta.shape[-1]
    AP = triton.next_power_of_2(A)
    d_angles, d_adt, d_dt, d_trap = (torch.empty_like(t) for t in (x.Angles, x.ADT, x.DT, x.Trap))
    _scalars_kernel[(chunks.count * H,)](
        x.Angles, x.DT, x.Trap, d_theta, through, scalars, sinks, sources, d_angles, d_adt, d_dt, d_trap,
        chunks.table, B * S, S, H, A, plan.C, AP, plan.NH, x.fuse_norm, through.shape[2],
        num_warps=max(1, min(4, plan.C * AP // 512)),
    )  # fmt: skip
    return d_angles, d_adt, d_dt, d_trap
