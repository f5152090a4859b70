"""Stages `decay` and `mix` at rank 1: mixing, there as large as the scores, is not kept but made where it is used,
forward and backward.

Within a part of a chunk as in `decay`; a token t of the second mixes with u of the first by carry_in_t carry_out_u.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import narrow
from ..chunks import Chunks
from ..plan import Plan
from .decay import load_steps


@triton.jit
def _carries_kernel(
    adt, dt, trap, table, carry_in, carry_out, whole, tasks, blocks, H, S, C: tl.constexpr, HB: tl.constexpr
):  # fmt: skip
    t = tl.arange(0, C)[None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        chunk = tl.cast(i // blocks, tl.int64)
        h = (i % blocks) * HB + tl.arange(0, HB)
        start = tl.load(table + chunk * 4)
        reach = tl.load(table + chunk * 4 + 1)
        batch = tl.load(table + chunk * 4 + 3)
        place = (batch.to(tl.int64) * H + h[:, None]) * S + (start - batch * S) + t
        known = h[:, None] < H
        following = known & (t + 1 < reach)
        a, _, s = load_steps(adt, dt, trap, place, known & (t < reach), following)
        later = tl.load(adt + place + 1, mask=following & (t + 1 < C), other=0.0).to(tl.float32)
        vector = (chunk * H + h[:, None]) * C + t
        tl.store(carry_in + vector, tl.trans(tl.exp(tl.cumsum(tl.trans(a), axis=0))), mask=known)
        after = tl.trans(tl.exp(tl.cumsum(tl.trans(later), axis=0, reverse=True)))
        tl.store(carry_out + vector, s * after, mask=known)
        tl.store(whole + chunk * H + h, tl.exp(tl.sum(a, axis=1)), mask=h < H)


def carries(x: Inputs, chunks: Chunks, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, in fp32, carry_in and carry_out [chunks, H, C] and whole [chunks, H]."""
    H, S = x.V.shape[2], x.Q.shape[1]
    carry_in = torch.empty(chunks.count, H, plan.C, dtype=torch.float32, device=x.V.device)
    carry_out = torch.empty_like(carry_in)
    whole = torch.empty(chunks.count, H, dtype=torch.float32, device=x.V.device)
    HB = max(2, plan.heads(H, plan.C))  # sums along the tokens of a single head would be taken one by one
    blocks = -(-H // HB)
    tasks = chunks.count * blocks
    _carries_kernel[plan.vector_grid(tasks)](
        x.ADT, x.DT, x.Trap, chunks.table, carry_in, carry_out, whole, tasks, blocks, H, S, C=plan.C, HB=HB
    )
    return carry_in, carry_out, whole


@triton.jit
def _mix(
    mixing, row, scores, w, mixed, dmixing, inside, CS: tl.constexpr, BACK: tl.constexpr
):  # fmt: skip
    """What is made with a block of mixing, whose rows are those from `row` on."""
    rows = row + tl.arange(0, CS)
    at = rows[:, None] * CS + tl.arange(0, CS)[None, :]
    score = tl.load(scores + at)
    product = narrow(score * mixing, mixed.dtype.element_ty)
    if BACK:
        here = tl.load(w + at)
        tl.store(dmixing + at, here * score)
        tl.store(mixed + at, narrow(here * mixing, mixed.dtype.element_ty))
        tl.store(inside + rows, tl.sum(here * product.to(tl.float32), axis=1))
    else:
        tl.store(mixed + at, product)


@triton.jit
def _mix_one_kernel(
    adt, dt, trap, table, scores, w, mixed, dmixing, inside, tasks, H, S,
    CS: tl.constexpr, PARTS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, CS)
    t = token.to(tl.float32)[:, None]
    u = token.to(tl.float32)[None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64)
        chunk = task // H
        start = tl.load(table + chunk * 4)
        reach = tl.load(table + chunk * 4 + 1)
        batch = tl.load(table + chunk * 4 + 3)
        place = (batch.to(tl.int64) * H + task % H) * S + (start - batch * S)
        row = task * (PARTS * (PARTS + 1) // 2 * CS)
        carry_out = tl.zeros((CS,), dtype=tl.float32)  # of the first part, to its end
        for part in range(0, PARTS):
            at = part * CS + token
            a, gamma, s = load_steps(adt, dt, trap, place + at, at < reach, at + 1 < reach)
            steps = tl.where(u < t, a[:, None], 0.0)
            mixing = tl.exp(tl.cumsum(steps, axis=0)) * s[None, :]
            mixing = tl.where(u < t, mixing, tl.where(u == t, gamma[None, :], 0.0))
            _mix(mixing, row + 2 * part * CS, scores, w, mixed, dmixing, inside, CS, BACK)
            carry_out += s * tl.exp(tl.sum(steps, axis=0)) * tl.cast(1 - part, tl.float32)
        if PARTS == 2:
            a = tl.load(adt + place + CS + token, mask=CS + token < reach, other=0.0).to(tl.float32)
            carry_in = tl.exp(tl.sum(tl.where(u <= t, a[None, :], 0.0), axis=1))
            mixing = carry_in[:, None] * carry_out[None, :]
            _mix(mixing, row + CS, scores, w, mixed, dmixing, inside, CS, BACK)


def mix_one(x: Inputs, chunks: Chunks, plan: Plan, scores: Tensor) -> Tensor:
    """mixing . scores in the operand dtype, from fp32 scores [chunks, H, blocks, CS, CS]."""
    mixed = torch.empty(scores.shape, dtype=plan.dtype, device=scores.device)
    _launch(x, chunks, plan, scores, mixed)
    return mixed


def mix_one_bwd(x: Inputs, chunks: Chunks, plan: Plan, scores: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As `mix_bwd`."""
    mixed_w = torch.empty(w.shape, dtype=plan.dtype, device=w.device)
    dmixing = torch.empty_like(w)
    inside = torch.empty(w.shape[:-1], dtype=torch.float32, device=w.device)
    _launch(x, chunks, plan, scores, mixed_w, w, dmixing, inside)
    return mixed_w, dmixing, inside


def _launch(x: Inputs, chunks: Chunks, plan: Plan, scores: Tensor, mixed: Tensor, *back: Tensor) -> None:
    H, S = x.V.shape[2], x.Q.shape[1]
    w, dmixing, inside = back or (None, None, None)
    tasks = chunks.count * H
    _mix_one_kernel[plan.vector_grid(tasks)](
        x.ADT, x.DT, x.Trap, chunks.table, scores, w, mixed, dmixing, inside, tasks, H, S,
        CS=plan.CS, PARTS=plan.parts, BACK=bool(back),
    )  # fmt: skip
