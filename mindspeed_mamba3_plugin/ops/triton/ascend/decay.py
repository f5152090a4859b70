"""Stage `decay`: everything that depends on A dt, dt and Trap alone, once per chunk and head.

With a the decay exponents, C tokens t, u of one chunk and sums taken directly (a difference of cumulative sums
loses bits):
    gamma_t = dt_t sigmoid(Trap_t),   s_t = gamma_t + dt_{t+1} sigmoid(-Trap_{t+1})
    mixing[t, u] = exp(a_{u+1} + ... + a_t) s_u  for u < t,   gamma_t  for u = t,   0 above
    carry_in_t = exp(a_1 + ... + a_t),   carry_out_t = s_t exp(a_{t+1} + ... + a_C),   whole = exp(a_1 + ... + a_C)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import narrow, sigmoid
from ..chunks import Chunks
from ..plan import Plan

# mixing is kept in units of 1 / this, so that fp16 holds it from 4e-9 to 4094: steps are 1e-7 to 1e3.
MIXING_UNIT = tl.constexpr(16.0)


@triton.jit
def load_steps(adt, dt, trap, table, chunk, h, H, S, t):
    """The chunk's exponents, weights and scales: a, dt, sigmoid(trap), gamma, s as [C], 0 past its end."""
    start = tl.load(table + chunk * 4)
    reach = tl.load(table + chunk * 4 + 1)
    batch = tl.load(table + chunk * 4 + 3)
    base = (batch.to(tl.int64) * H + h) * S + (start - batch * S)
    here = t < reach
    following = t + 1 < reach
    a = tl.load(adt + base + t, mask=here, other=0.0).to(tl.float32)
    d = tl.load(dt + base + t, mask=here, other=0.0).to(tl.float32)
    weight = sigmoid(tl.load(trap + base + t, mask=here, other=0.0).to(tl.float32))
    d_next = tl.load(dt + base + t + 1, mask=following, other=0.0).to(tl.float32)
    rest_next = sigmoid(-tl.load(trap + base + t + 1, mask=following, other=0.0).to(tl.float32))
    gamma = d * weight
    return a, d, weight, gamma, gamma + d_next * rest_next


@triton.jit
def segment_sums(a, t, u):
    """[C, C]: a_{u+1} + ... + a_t for u < t, 0 elsewhere; t is [C, 1], u is [1, C], both fp32."""
    return tl.cumsum(tl.where(u < t, a[:, None], 0.0), axis=0)


@triton.jit
def _decay_kernel(
    adt, dt, trap, table, mixing, carry_in, carry_out, whole, tasks, H, S, C: tl.constexpr, R: tl.constexpr
):  # fmt: skip
    t = tl.arange(0, C)
    row = t.to(tl.float32)[:, None]
    col = t.to(tl.float32)[None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64)
        h = task % H
        a, _, _, gamma, s = load_steps(adt, dt, trap, table, task // H, h, H, S, t)
        inside = tl.exp(segment_sums(a, row, col)) * s[None, :]
        mix = tl.where(col < row, inside, tl.where(col == row, gamma[:, None], 0.0))
        wide = tl.broadcast_to(narrow(mix * MIXING_UNIT, mixing.dtype.element_ty)[:, None, :], (C, R, C))
        place = (
            task * (R * C * R * C)
            + t[:, None, None] * (R * C)
            + tl.arange(0, R)[None, :, None] * C
            + t[None, None, :]
        )
        for r in tl.static_range(R):
            tl.store(mixing + place + r * (C * R * C), wide)
        before = tl.sum(tl.where(col <= row, a[None, :], 0.0), axis=1)
        after = tl.sum(tl.where(col > row, a[None, :], 0.0), axis=1)
        tl.store(carry_in + task * C + t, tl.exp(before))
        tl.store(carry_out + task * C + t, s * tl.exp(after))
        tl.store(whole + task, tl.exp(tl.sum(a, axis=0)))


def mixing_dtype(plan: Plan) -> torch.dtype:
    """fp16 for 16-bit operands: of a number from 0 on it keeps more bits than they have."""
    return torch.float32 if plan.dtype == torch.float32 else torch.float16


def spread(mixing: Tensor, plan: Plan) -> Tensor:
    """mixing [chunks, H, C, C] as the products take it: for every pair of ranks, [chunks, H, M, M]."""
    return (mixing * MIXING_UNIT.value).to(mixing_dtype(plan)).repeat(1, 1, plan.RP, plan.RP)


def decay(x: Inputs, chunks: Chunks, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns mixing as `spread` has it, [chunks, H, M, M], and in fp32 carry_in and carry_out [chunks, H, C] and
    whole [chunks, H]."""
    H, S = x.V.shape[2], x.Q.shape[1]
    shape = (chunks.count, H, plan.C)
    mixing = torch.empty(*shape[:2], plan.M, plan.M, dtype=mixing_dtype(plan), device=x.V.device)
    carry_in = torch.empty(shape, dtype=torch.float32, device=x.V.device)
    carry_out = torch.empty_like(carry_in)
    whole = torch.empty(shape[:2], dtype=torch.float32, device=x.V.device)
    tasks = chunks.count * H
    _decay_kernel[plan.vector_grid(tasks)](
        x.ADT, x.DT, x.Trap, chunks.table, mixing, carry_in, carry_out, whole, tasks, H, S, C=plan.C, R=plan.RP
    )  # fmt: skip
    return mixing, carry_in, carry_out, whole
