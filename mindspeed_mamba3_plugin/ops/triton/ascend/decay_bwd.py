"""Backward of stage `decay`: from the gradients of mixing, O, carry_out and whole to those of A dt, gamma
and s. All sums are over positive index sets, so nothing cancels:

    da_u = sum_{t >= u > j} (mixing . dmixing)[t, j] + sum_{t >= u} dlog(carry_in)_t + sum_{t < u} dlog(carry_out)_t
           + dlog(whole)

With two parts these are a part's own: the chunk's gradients are first handed down to what it was put together from.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import narrow
from ..chunks import Chunks
from ..plan import Plan
from .decay import carries, load_steps, segment_sums


@triton.jit
def _by_token(place):
    """A [HB, CS, CS] tile, loaded in long rows, as [CS, HB, CS]."""
    return tl.permute(tl.load(place), (1, 0, 2))


@triton.jit
def _part_bwd(a, s, after, dmix, dinto, dout, dwhole, row, col):
    """One part's gradients of a, of s, and of gamma without its share in s, [HB, CS]; dinto is that of log(carry_in),
    dwhole that of log(whole), and after is carry_out / s."""
    inside = tl.where(col < row, tl.exp(segment_sums(a, row, col)) * dmix, 0.0)
    from_state = after * dout
    ds = tl.sum(inside, axis=0) + from_state
    below = tl.cumsum(inside * s[None, :, :], axis=0, reverse=True)
    ahead = tl.where(col < row, below + (s * from_state)[None, :, :], dinto[None, :, :])
    da = tl.trans(tl.sum(ahead, axis=2)) + dwhole[:, None]
    return da, ds, tl.sum(tl.where(col == row, dmix, 0.0), axis=0)


@triton.jit
def _decay_bwd_kernel(
    dmixing, inside, dlog_o, dcarry_out, dwhole, adt, dt, trap, table, dadt, dgamma, ds, tasks, H, S,
    CS: tl.constexpr, PARTS: tl.constexpr, NH: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = PARTS * CS
    BLOCKS: tl.constexpr = PARTS * (PARTS + 1) // 2
    t = tl.arange(0, CS)
    row = t.to(tl.float32)[:, None, None]
    col = t.to(tl.float32)[None, None, :]
    n = tl.arange(0, NH)[None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        chunk = tl.cast(i // (H // HB), tl.int64)
        h = (i % (H // HB)) * HB + tl.arange(0, HB)
        start = tl.load(table + chunk * 4)
        reach = tl.load(table + chunk * 4 + 1)
        batch = tl.load(table + chunk * 4 + 3)
        place = (batch.to(tl.int64) * H + h[:, None]) * S + (start - batch * S) + t[None, :]
        pair = chunk * H + h
        square = (pair[:, None, None] * (BLOCKS * CS) + t[None, :, None]) * CS + t[None, None, :]
        vector = pair[:, None] * C + t[None, :]
        block = pair[:, None] * (BLOCKS * CS) + t[None, :]

        a, _, s = load_steps(adt, dt, trap, place, t[None, :] < reach, t[None, :] + 1 < reach)
        _, after, _ = carries(a, row, col)
        dout = tl.load(dcarry_out + vector)
        every = tl.sum(tl.load(dwhole + pair[:, None] * NH + n), axis=1)
        if PARTS == 2:
            at = CS + t[None, :]
            b, _, s_b = load_steps(adt, dt, trap, place + CS, at < reach, at + 1 < reach)
            into_b, after_b, whole_b = carries(b, row, col)
            dout *= whole_b[:, None]
            between = _by_token(dmixing + square + CS * CS) * tl.trans(into_b)[:, :, None]
            dinto_b = tl.load(dlog_o + vector + CS) - tl.load(inside + block + 2 * CS)
            dwhole_b = every + tl.sum(s * after * dout, axis=1)
            every += tl.sum(dinto_b - tl.load(inside + block + CS), axis=1)
            dout += tl.sum(between, axis=0)
            dmix_b = _by_token(dmixing + square + 2 * CS * CS)
            dout_b = tl.load(dcarry_out + vector + CS)
            da_b, ds_b, own_b = _part_bwd(b, s_b, after_b, dmix_b, dinto_b, dout_b, dwhole_b, row, col)
            here = CS + t[None, :] < reach
            tl.store(dadt + place + CS, narrow(da_b, dadt.dtype.element_ty), mask=here)
            tl.store(ds + place + CS, ds_b, mask=here)
            tl.store(dgamma + place + CS, own_b + ds_b, mask=here)
        dinto = tl.load(dlog_o + vector) - tl.load(inside + block)
        da, ds_a, own = _part_bwd(a, s, after, _by_token(dmixing + square), dinto, dout, every, row, col)
        here = t[None, :] < reach
        tl.store(dadt + place, narrow(da, dadt.dtype.element_ty), mask=here)
        tl.store(ds + place, ds_a, mask=here)
        tl.store(dgamma + place, own + ds_a, mask=here)


def decay_bwd(
    x: Inputs, chunks: Chunks, plan: Plan, dmixing: Tensor, inside: Tensor, dlog_o: Tensor, dcarry_out: Tensor,
    dwhole: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dADT, and the gradients of gamma (its share in s included) and of s, fp32 [B, H, S].

    That of log(carry_in) is dlog_o, of all of a token's O, less `inside`, what its chunk has in it.
    """
    H, S = x.V.shape[2], x.Q.shape[1]
    dadt = torch.empty_like(x.ADT)
    dgamma = torch.empty(x.ADT.shape, dtype=torch.float32, device=x.ADT.device)
    ds = torch.empty_like(dgamma)
    HB = plan.divisor(H, plan.CS * plan.CS)
    tasks = chunks.count * (H // HB)
    _decay_bwd_kernel[plan.vector_grid(tasks)](
        dmixing, inside, dlog_o, dcarry_out, dwhole, x.ADT, x.DT, x.Trap, chunks.table, dadt, dgamma, ds, tasks, H, S,
        CS=plan.CS, PARTS=plan.parts, NH=plan.NH, HB=HB,
    )  # fmt: skip
    return dadt, dgamma, ds
