"""Backward of stage `decay`: from the gradients of mixing, carry_in, carry_out and whole to those of A dt, gamma
and s. All sums are over positive index sets, so nothing cancels:

    da_u = sum_{t >= u > j} (mixing . dmixing)[t, j] + sum_{t >= u} dlog(carry_in)_t + sum_{t < u} dlog(carry_out)_t
           + dlog(whole)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import narrow
from ..chunks import Chunks
from ..plan import Plan
from .decay import load_steps, segment_sums


@triton.jit
def _decay_bwd_kernel(
    dmixing, dcarry_in, dcarry_out, dwhole, adt, dt, trap, table, dadt, dgamma, ds, tasks, H, S,
    C: tl.constexpr, RP: tl.constexpr, NH: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, C)
    n = tl.arange(0, NH)
    ranks = tl.arange(0, RP)[None, :, None]
    row = t.to(tl.float32)[:, None]
    col = t.to(tl.float32)[None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64)
        h = task % H
        chunk = task // H
        a, _, _, _, s = load_steps(adt, dt, trap, table, chunk, h, H, S, t)
        pairs = tl.zeros((C, RP, C), dtype=tl.float32)
        block = task * (RP * C * RP * C) + t[:, None, None] * (RP * C) + ranks * C + t[None, None, :]
        for r in range(0, RP):
            pairs += tl.load(dmixing + block + r * (C * RP * C)).to(tl.float32)
        dmix = tl.sum(pairs, axis=1)
        inside = tl.where(col < row, tl.exp(segment_sums(a, row, col)) * dmix, 0.0)
        after = tl.exp(tl.sum(tl.where(col > row, a[None, :], 0.0), axis=1))
        from_state = tl.load(dcarry_out + task * C + t)
        scale_grad = tl.sum(inside, axis=0) + after * from_state
        below = tl.cumsum(inside * s[None, :], axis=0, reverse=True)
        da = tl.sum(tl.where(col < row, below, 0.0), axis=1)
        from_carry = tl.load(dcarry_in + task * C + t)
        da += tl.sum(tl.where(col >= row, from_carry[None, :], 0.0), axis=1)
        da += tl.sum(tl.where(col < row, (s * after * from_state)[None, :], 0.0), axis=1)
        da += tl.sum(tl.load(dwhole + task * NH + n), axis=0)

        start = tl.load(table + chunk * 4)
        batch = tl.load(table + chunk * 4 + 3)
        target = (batch.to(tl.int64) * H + h) * S + (start - batch * S) + t
        here = t < tl.load(table + chunk * 4 + 1)
        tl.store(dadt + target, narrow(da, dadt.dtype.element_ty), mask=here)
        tl.store(ds + target, scale_grad, mask=here)
        tl.store(dgamma + target, tl.sum(tl.where(col == row, dmix, 0.0), axis=1) + scale_grad, mask=here)


def decay_bwd(
    x: Inputs, chunks: Chunks, plan: Plan, dmixing: Tensor, dcarry_in: Tensor, dcarry_out: Tensor, dwhole: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dADT, and the gradients of gamma (its share in s included) and of s, fp32 [B, H, S]."""
    H, S = x.V.shape[2], x.Q.shape[1]
    dadt = torch.empty_like(x.ADT)
    dgamma = torch.empty(x.ADT.shape, dtype=torch.float32, device=x.ADT.device)
    ds = torch.empty_like(dgamma)
    tasks = chunks.count * H
    _decay_bwd_kernel[plan.vector_grid(tasks)](
        dmixing, dcarry_in, dcarry_out, dwhole, x.ADT, x.DT, x.Trap, chunks.table, dadt, dgamma, ds, tasks, H, S,
        C=plan.C, RP=plan.RP, NH=plan.NH,
    )  # fmt: skip
    return dadt, dgamma, ds
