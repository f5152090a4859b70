"""Stage `decay`: everything that depends on A dt, dt and Trap alone, once per chunk and head.

With a the decay exponents, C tokens t, u of one chunk and sums taken directly (a difference of cumulative sums
loses bits):
    gamma_t = dt_t sigmoid(Trap_t),   s_t = gamma_t + dt_{t+1} sigmoid(-Trap_{t+1})
    mixing[t, u] = exp(a_{u+1} + ... + a_t) s_u  for u < t,   gamma_t  for u = t,   0 above
    carry_in_t = exp(a_1 + ... + a_t),   carry_out_t = s_t exp(a_{t+1} + ... + a_C),   whole = exp(a_1 + ... + a_C)

A chunk of two parts is put together from theirs: a token of the second mixes with one of the first by
carry_in_t carry_out_u.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import sigmoid
from ..chunks import Chunks
from ..plan import Plan


@triton.jit
def load_steps(adt, dt, trap, place, here, following):
    """Exponents, weights and scales of the heads and tokens at `place`: a, gamma and s, 0 where not `here`.
    `following` tells where there is a next token."""
    a = tl.load(adt + place, mask=here, other=0.0).to(tl.float32)
    d = tl.load(dt + place, mask=here, other=0.0).to(tl.float32)
    gamma = d * sigmoid(tl.load(trap + place, mask=here, other=0.0).to(tl.float32))
    d_next = tl.load(dt + place + 1, mask=following, other=0.0).to(tl.float32)
    rest_next = sigmoid(-tl.load(trap + place + 1, mask=following, other=0.0).to(tl.float32))
    return a, gamma, gamma + d_next * rest_next


@triton.jit
def segment_sums(a, t, u):
    """[CS, HB, CS]: a_{u+1} + ... + a_t for u < t, 0 elsewhere; a is [HB, CS], t [CS, 1, 1] and u [1, 1, CS] fp32."""
    return tl.cumsum(tl.where(u < t, tl.trans(a)[:, :, None], 0.0), axis=0)


@triton.jit
def carries(a, t, u):
    """exp of the sums up to each token, of those after it, [HB, CS] both, and of all, [HB]."""
    before = tl.sum(tl.where(u <= t, a[None, :, :], 0.0), axis=2)
    after = tl.sum(tl.where(u > t, a[None, :, :], 0.0), axis=2)
    return tl.trans(tl.exp(before)), tl.trans(tl.exp(after)), tl.exp(tl.sum(a, axis=1))


@triton.jit
def _decay_kernel(
    adt, dt, trap, table, mixing, carry_in, carry_out, whole, tasks, H, S,
    CS: tl.constexpr, PARTS: tl.constexpr, HB: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = PARTS * CS
    BLOCKS: tl.constexpr = PARTS * (PARTS + 1) // 2
    t = tl.arange(0, CS)
    row = t.to(tl.float32)[:, None, None]
    col = t.to(tl.float32)[None, None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        chunk = tl.cast(i // (H // HB), tl.int64)
        h = (i % (H // HB)) * HB + tl.arange(0, HB)
        start = tl.load(table + chunk * 4)
        reach = tl.load(table + chunk * 4 + 1)
        batch = tl.load(table + chunk * 4 + 3)
        place = (batch.to(tl.int64) * H + h[:, None]) * S + (start - batch * S) + t[None, :]
        pair = chunk * H + h
        square = (pair[None, :, None] * (BLOCKS * CS) + t[:, None, None]) * CS + t[None, None, :]
        vector = pair[:, None] * C + t[None, :]

        a, gamma, s = load_steps(adt, dt, trap, place, t[None, :] < reach, t[None, :] + 1 < reach)
        into, out, every = carries(a, row, col)
        inside = tl.exp(segment_sums(a, row, col)) * s[None, :, :]
        tl.store(mixing + square, tl.where(col < row, inside, tl.where(col == row, gamma[None, :, :], 0.0)))
        out *= s
        tl.store(carry_in + vector, into)
        if PARTS == 2:
            at = CS + t[None, :]
            a, gamma, s = load_steps(adt, dt, trap, place + CS, at < reach, at + 1 < reach)
            into, after, last = carries(a, row, col)
            tl.store(mixing + square + CS * CS, tl.trans(into)[:, :, None] * out[None, :, :])
            inside = tl.exp(segment_sums(a, row, col)) * s[None, :, :]
            mix = tl.where(col < row, inside, tl.where(col == row, gamma[None, :, :], 0.0))
            tl.store(mixing + square + 2 * CS * CS, mix)
            tl.store(carry_in + vector + CS, into * every[:, None])
            tl.store(carry_out + vector + CS, s * after)
            out *= last[:, None]
            every *= last
        tl.store(carry_out + vector, out)
        tl.store(whole + pair, every)


def decay(x: Inputs, chunks: Chunks, plan: Plan) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns, in fp32, mixing [chunks, H, blocks, CS, CS], carry_in and carry_out [chunks, H, C] and whole
    [chunks, H]."""
    H, S = x.V.shape[2], x.Q.shape[1]
    shape = (chunks.count, H)
    mixing = torch.empty(*shape, plan.blocks, plan.CS, plan.CS, dtype=torch.float32, device=x.V.device)
    carry_in = torch.empty(*shape, plan.C, dtype=torch.float32, device=x.V.device)
    carry_out = torch.empty_like(carry_in)
    whole = torch.empty(shape, dtype=torch.float32, device=x.V.device)
    HB = plan.divisor(H, plan.CS * plan.CS)
    tasks = chunks.count * (H // HB)
    _decay_kernel[plan.vector_grid(tasks)](
        x.ADT, x.DT, x.Trap, chunks.table, mixing, carry_in, carry_out, whole, tasks, H, S,
        CS=plan.CS, PARTS=plan.parts, HB=HB,
    )  # fmt: skip
    return mixing, carry_in, carry_out, whole
