"""Stages `state` and `scan`: the state that enters every chunk, and the gradient of the state that leaves it.

own_c = k^T (v carry_out),   S_{c+1} = whole_c S_c + own_c
down_c = q^T (dO carry_in),  dS_{c-1} = whole_c dS_c + down_c   (dS_c: gradient of the state after chunk c)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..blocks import narrow
from ..chunks import Chunks
from ..plan import Plan
from .slices import can_cut, extract_slice


@triton.jit
def _scan_kernel(
    own, whole, bounds, states, final, tasks, H, N2: tl.constexpr, PP: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    p = tl.arange(0, PP)[None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        place = ((i % (N2 // BN)) * BN + tl.arange(0, BN)[:, None]) * PP + p
        task = tl.cast(i // (N2 // BN), tl.int64)
        h = task % H
        sequence = task // H
        state = tl.zeros((BN, PP), dtype=tl.float32)
        for chunk in range(tl.load(bounds + sequence), tl.load(bounds + sequence + 1)):
            at = (chunk * H + h).to(tl.int64) * (N2 * PP) + place
            tl.store(states + at, narrow(state, states.dtype.element_ty))
            state = state * tl.load(whole + chunk * H + h) + tl.load(own + at)
        tl.store(final + task * (N2 * PP) + place, state)


def scan(own: Tensor, whole: Tensor, chunks: Chunks, plan: Plan) -> tuple[Tensor, Tensor]:
    """States entering the chunks, [chunks, H, N2, PP] in the operand dtype; the last, fp32 [sequences, H, N2, PP]."""
    H = own.shape[1]
    states = chunks.new(own, plan.dtype)
    final = torch.empty(chunks.sequences, *own.shape[1:], dtype=torch.float32, device=own.device)
    BN = min(plan.N2, max(1, plan.state_elements // plan.PP))
    tasks = chunks.sequences * H * (plan.N2 // BN)
    _scan_kernel[plan.vector_grid(tasks)](
        own, whole, chunks.bounds, states, final, tasks, H, N2=plan.N2, PP=plan.PP, BN=BN
    )
    return states, final


@triton.jit
def _half(x, half: tl.constexpr, BN: tl.constexpr, PP: tl.constexpr, CUT: tl.constexpr):
    """One half, [BN, PP], of a [2, BN, PP] tile."""
    if CUT:
        return tl.reshape(extract_slice(x, (half, 0, 0), (1, BN, PP), (1, 1, 1)), (BN, PP))
    else:
        return tl.sum(tl.where(tl.arange(0, 2)[:, None, None] == half, x, 0.0), axis=0)


@triton.jit
def _reverse_scan_kernel(
    down, whole, states, bounds, dstates, dwhole, dturn, tasks, H,
    NH: tl.constexpr, PP: tl.constexpr, BN: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    half = tl.arange(0, 2)[:, None, None]
    p = tl.arange(0, PP)[None, None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        rows = (i % (NH // BN)) * BN + tl.arange(0, BN)
        place = (half * NH + rows[None, :, None]) * PP + p
        task = tl.cast(i // (NH // BN), tl.int64)
        h = task % H
        sequence = task // H
        first = tl.load(bounds + sequence)
        last = tl.load(bounds + sequence + 1)
        grad = tl.zeros((2, BN, PP), dtype=tl.float32)
        for back in range(0, last - first):
            block = ((last - 1 - back) * H + h).to(tl.int64)
            at = block * (2 * NH * PP) + place
            scale = tl.load(whole + block)
            tl.store(dstates + at, narrow(grad, dstates.dtype.element_ty))
            state = tl.load(states + at).to(tl.float32)
            both = state * grad
            both = _half(both, 0, BN, PP, CUT) + _half(both, 1, BN, PP, CUT)
            tl.store(dwhole + block * NH + rows, scale * tl.sum(both, axis=1))
            grad = grad * scale + tl.load(down + at)
            turn = _half(state, 1, BN, PP, CUT) * _half(grad, 0, BN, PP, CUT)
            turn -= _half(state, 0, BN, PP, CUT) * _half(grad, 1, BN, PP, CUT)
            tl.store(dturn + block * NH + rows, tl.sum(turn, axis=1))


def reverse_scan(
    down: Tensor, whole: Tensor, states: Tensor, chunks: Chunks, plan: Plan
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of the states leaving the chunks, like `states`; whole <S, dS> by pairs of rows; and
    the gradient of turning everything from the chunk's first token on. The last two are fp32 [chunks, H, NH].

    That turn moves only what crosses the chunk's start, so it is read off the entering state and its gradient:
    no sum over the rest of the sequence, in which nearly everything cancels.
    """
    H = down.shape[1]
    dstates = chunks.new(down, states.dtype)
    dwhole = chunks.new(down[:, :, : plan.NH, 0], torch.float32)
    dturn = chunks.new(dwhole, torch.float32)
    BN = min(plan.NH, max(1, plan.state_elements // plan.PP))
    tasks = chunks.sequences * H * (plan.NH // BN)
    _reverse_scan_kernel[plan.vector_grid(tasks)](
        down, whole, states, chunks.bounds, dstates, dwhole, dturn, tasks, H,
        NH=plan.NH, PP=plan.PP, BN=BN, CUT=can_cut(plan),
    )  # fmt: skip
    return dstates, dwhole, dturn
