"""Stage `rotate`: biases and rotation of q and k, and its backward with the sum over the heads of a group.

Rows of a chunk are in (rank, token) order, and the state dimension is kept in two halves of NH columns, so that a
rotation is element-wise between two tiles of one shape, [heads, ranks, tokens, columns].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import first_row, narrow
from ..chunks import Chunks
from ..plan import Plan
from .slices import can_cut, extract_slice, insert_slice


@triton.jit
def _halves(
    x, rows, seen, HB: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, N: tl.constexpr, NH: tl.constexpr,
    CUT: tl.constexpr,
):  # fmt: skip
    """Both halves of rows of N columns, fp32 [HB, RP, BT, NH], 0 in rows that are not seen and in padding."""
    if CUT and N == 2 * NH:  # one transfer in long rows
        both = tl.load(x + rows + tl.arange(0, N)[None, None, None, :], mask=seen, other=0.0).to(tl.float32)
        lo = extract_slice(both, (0, 0, 0, 0), (HB, RP, BT, NH), (1, 1, 1, 1))
        return lo, extract_slice(both, (0, 0, 0, NH), (HB, RP, BT, NH), (1, 1, 1, 1))
    else:
        n = tl.arange(0, NH)[None, None, None, :]
        inside = seen & (n < N // 2)
        lo = tl.load(x + rows + n, mask=inside, other=0.0).to(tl.float32)
        return lo, tl.load(x + rows + N // 2 + n, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _cosines(
    turns, rows, HB: tl.constexpr, BT: tl.constexpr, NH: tl.constexpr, FILLED: tl.constexpr, CUT: tl.constexpr
):  # fmt: skip
    """Cosines and sines, [HB, 1, BT, NH], from rows of FILLED of both; 1 and 0 in the other columns."""
    if CUT:  # one transfer in long rows
        both = tl.load(turns + rows * (2 * FILLED) + tl.arange(0, 2 * FILLED)[None, None, None, :])
        c = extract_slice(both, (0, 0, 0, 0), (HB, 1, BT, FILLED), (1, 1, 1, 1))
        s = extract_slice(both, (0, 0, 0, FILLED), (HB, 1, BT, FILLED), (1, 1, 1, 1))
        if FILLED < NH:
            wide_c = tl.full((HB, 1, BT, NH), 1.0, dtype=tl.float32)
            wide_s = tl.zeros((HB, 1, BT, NH), dtype=tl.float32)
            c = insert_slice(wide_c, c, (0, 0, 0, 0), (HB, 1, BT, FILLED), (1, 1, 1, 1))
            s = insert_slice(wide_s, s, (0, 0, 0, 0), (HB, 1, BT, FILLED), (1, 1, 1, 1))
        return c, s
    else:
        n = tl.arange(0, NH)[None, None, None, :]
        place = turns + rows * (2 * FILLED) + n
        c = tl.load(place, mask=n < FILLED, other=1.0)
        return c, tl.load(place + FILLED, mask=n < FILLED, other=0.0)


@triton.jit
def _rotate_kernel(
    q, k, q_bias, k_bias, turns, carry_in, table, q_out, q_in, k_out, tasks, H, G,
    C: tl.constexpr, CS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, N: tl.constexpr, NH: tl.constexpr,
    BT: tl.constexpr, HB: tl.constexpr, CUT: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    SHARE: tl.constexpr = C // BT
    r = tl.arange(0, RP)[None, :, None, None]
    n = tl.arange(0, NH)[None, None, None, :]
    token = tl.arange(0, BT)[None, None, :, None]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        before = (i % SHARE) * BT
        g = (i // SHARE) % G
        chunk = tl.cast(i // (SHARE * G), tl.int64)
        start = tl.load(table + chunk * 4).to(tl.int64)
        t = before + token
        seen = (r < R) & (t < tl.load(table + chunk * 4 + 1))
        source = ((start + t) * R + r) * (G * N) + g * N
        q_lo, q_hi = _halves(q, source, seen, 1, RP, BT, N, NH, CUT)
        k_lo, k_hi = _halves(k, source, seen, 1, RP, BT, N, NH, CUT)
        for first in range(g * (H // G), (g + 1) * (H // G), HB):
            h = first + tl.arange(0, HB)[:, None, None, None]
            task = chunk * H + h
            c, s = _cosines(turns, task * C + t, HB, BT, NH, FILLED, CUT)
            out = (first_row(task, before, C, CS, RP) + r * CS + token) * (2 * NH) + n
            # Rows past the end of the sequence become the rotated bias: everything they are multiplied with is 0.
            b_lo, b_hi = _halves(q_bias, (h * R + r) * N, r < R, HB, RP, 1, N, NH, CUT)
            lo = q_lo + b_lo
            hi = q_hi + b_hi
            carry = tl.load(carry_in + task * C + t)
            turned = lo * c - hi * s
            tl.store(q_out + out, narrow(turned, q_out.dtype.element_ty))
            tl.store(q_in + out, narrow(turned * carry, q_out.dtype.element_ty))
            turned = lo * s + hi * c
            tl.store(q_out + out + NH, narrow(turned, q_out.dtype.element_ty))
            tl.store(q_in + out + NH, narrow(turned * carry, q_out.dtype.element_ty))
            b_lo, b_hi = _halves(k_bias, (h * R + r) * N, r < R, HB, RP, 1, N, NH, CUT)
            lo = k_lo + b_lo
            hi = k_hi + b_hi
            tl.store(k_out + out, narrow(lo * c - hi * s, k_out.dtype.element_ty))
            tl.store(k_out + out + NH, narrow(lo * s + hi * c, k_out.dtype.element_ty))


def rotate(x: Inputs, chunks: Chunks, plan: Plan, turns: Tensor, carry_in: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q, q carry_in and rotated k, [chunks, H, M, N2] in the operand dtype, by the table of `angles`; padding
    of R, N is 0."""
    _, _, H, G, R, N, _ = x.sizes
    q = torch.empty(chunks.count, H, plan.M, plan.N2, dtype=plan.dtype, device=x.Q.device)
    q_in, k = torch.empty_like(q), torch.empty_like(q)
    width = plan.NH if plan.RP > 2 else 2 * plan.NH  # cosines and sines take as much as two ranks
    BT = plan.tokens(width)
    tasks = chunks.count * G * (plan.C // BT)
    _rotate_kernel[plan.vector_grid(tasks)](
        x.Q, x.K, x.Q_bias, x.K_bias, turns, carry_in, chunks.table, q, q_in, k, tasks, H, G,
        C=plan.C, CS=plan.CS, R=R, RP=plan.RP, N=N, NH=plan.NH, BT=BT,
        HB=plan.divisor(H // G, plan.RP * BT * width), CUT=can_cut(plan), FILLED=plan.rotated(x.Angles.shape[3]),
    )  # fmt: skip
    return q, q_in, k


@triton.jit
def _over_heads(x, HB: tl.constexpr):
    """The sum over the heads of a tile, as a tile of one."""
    if HB == 1:
        return x
    else:
        return tl.sum(x, axis=0)[None, :, :, :]


@triton.jit
def _head_bwd(
    dx, rows, lo, hi, x_bias, bias, ranks, c, s, dtype: tl.constexpr,
    HB: tl.constexpr, RP: tl.constexpr, BT: tl.constexpr, N: tl.constexpr, NH: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Gradients of both halves before bias and rotation, and that of the angle before the sum over ranks, by heads.

    The rotated rows are computed again and rounded as the products had them: turning a whole sequence changes
    nothing, and its gradient is 0 with these rows alone.
    """
    b_lo, b_hi = _halves(x_bias, bias, ranks, HB, RP, 1, N, NH, CUT)
    lo += b_lo
    hi += b_hi
    every = tl.arange(0, RP)[None, :, None, None] < RP
    d_lo, d_hi = _halves(dx, rows, every, HB, RP, BT, 2 * NH, NH, CUT)
    turn = d_hi * narrow(lo * c - hi * s, dtype).to(tl.float32)
    turn -= d_lo * narrow(lo * s + hi * c, dtype).to(tl.float32)
    return d_lo * c + d_hi * s, d_hi * c - d_lo * s, turn


@triton.jit
def _rotate_bwd_kernel(
    dq, dk, q, k, q_bias, k_bias, turns, table, dq_out, dk_out, dq_bias, dk_bias, dtheta, tasks, H, G,
    C: tl.constexpr, CS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, N: tl.constexpr, NH: tl.constexpr,
    BT: tl.constexpr, HB: tl.constexpr, CUT: tl.constexpr, FILLED: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = N // 2
    SHARE: tl.constexpr = C // BT
    r = tl.arange(0, RP)[None, :, None, None]
    n = tl.arange(0, NH)[None, None, None, :]
    token = tl.arange(0, BT)[None, None, :, None]
    col = tl.arange(0, NH)[None, None, :]
    dtype: tl.constexpr = q.dtype.element_ty if ROUND else tl.float32
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        share = i % SHARE
        g = (i // SHARE) % G
        chunk = tl.cast(i // (SHARE * G), tl.int64)
        start = tl.load(table + chunk * 4).to(tl.int64)
        t = share * BT + token
        seen = (r < R) & (t < tl.load(table + chunk * 4 + 1))
        source = ((start + t) * R + r) * (G * N) + g * N
        q_lo, q_hi = _halves(q, source, seen, 1, RP, BT, N, NH, CUT)
        k_lo, k_hi = _halves(k, source, seen, 1, RP, BT, N, NH, CUT)
        dq_lo = tl.zeros((1, RP, BT, NH), dtype=tl.float32)
        dq_hi = tl.zeros((1, RP, BT, NH), dtype=tl.float32)
        dk_lo = tl.zeros((1, RP, BT, NH), dtype=tl.float32)
        dk_hi = tl.zeros((1, RP, BT, NH), dtype=tl.float32)
        for first in range(g * (H // G), (g + 1) * (H // G), HB):
            heads = first + tl.arange(0, HB)
            h = heads[:, None, None, None]
            task = chunk * H + h
            c, s = _cosines(turns, task * C + t, HB, BT, NH, FILLED, CUT)
            rows = (first_row(task, share * BT, C, CS, RP) + r * CS + token) * (2 * NH)
            own = chunk * H + heads[:, None, None]
            dbias = ((own * SHARE + share) * RP + tl.arange(0, RP)[None, :, None]) * (2 * NH) + col
            bias = (h * R + r) * N
            lo, hi, turn = _head_bwd(dq, rows, q_lo, q_hi, q_bias, bias, r < R, c, s, dtype, HB, RP, BT, N, NH, CUT)
            dq_lo += _over_heads(lo, HB)
            dq_hi += _over_heads(hi, HB)
            tl.store(dq_bias + dbias, tl.sum(lo, axis=2))
            tl.store(dq_bias + dbias + NH, tl.sum(hi, axis=2))
            lo, hi, k_turn = _head_bwd(dk, rows, k_lo, k_hi, k_bias, bias, r < R, c, s, dtype, HB, RP, BT, N, NH, CUT)
            dk_lo += _over_heads(lo, HB)
            dk_hi += _over_heads(hi, HB)
            tl.store(dk_bias + dbias, tl.sum(lo, axis=2))
            tl.store(dk_bias + dbias + NH, tl.sum(hi, axis=2))
            angle = (own * C + share * BT + tl.arange(0, BT)[None, :, None]) * FILLED + col
            tl.store(dtheta + angle, tl.sum(turn + k_turn, axis=1), mask=col < FILLED)
        seen = seen & (n < HALF)
        tl.store(dq_out + source + n, narrow(dq_lo, dq_out.dtype.element_ty), mask=seen)
        tl.store(dq_out + source + n + HALF, narrow(dq_hi, dq_out.dtype.element_ty), mask=seen)
        tl.store(dk_out + source + n, narrow(dk_lo, dk_out.dtype.element_ty), mask=seen)
        tl.store(dk_out + source + n + HALF, narrow(dk_hi, dk_out.dtype.element_ty), mask=seen)


def rotate_bwd(
    x: Inputs, chunks: Chunks, plan: Plan, dq: Tensor, dk: Tensor, turns: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From gradients of the rotated q and k to dQ, dK, dQ_bias, dK_bias and dtheta, fp32
    [chunks, H, C, plan.rotated(A)]."""
    _, _, H, G, R, N, _ = x.sizes
    dq_out, dk_out = torch.empty_like(x.Q), torch.empty_like(x.K)
    BT = plan.tokens(2 * plan.NH)  # four accumulators beside the tiles of one head
    shares = plan.C // BT
    bias = torch.empty(2, chunks.count, H, shares, plan.RP, plan.N2, dtype=torch.float32, device=x.Q.device)
    filled = plan.rotated(x.Angles.shape[3])
    dtheta = torch.empty(chunks.count, H, plan.C, filled, dtype=torch.float32, device=x.Q.device)
    tasks = chunks.count * G * shares
    _rotate_bwd_kernel[plan.vector_grid(tasks)](
        dq, dk, x.Q, x.K, x.Q_bias, x.K_bias, turns, chunks.table, dq_out, dk_out, bias[0], bias[1], dtheta,
        tasks, H, G, C=plan.C, CS=plan.CS, R=R, RP=plan.RP, N=N, NH=plan.NH, BT=BT,
        HB=plan.divisor(H // G, 2 * plan.RP * BT * plan.NH), CUT=can_cut(plan), FILLED=filled,
        ROUND=plan.dtype != torch.float32,
    )  # fmt: skip
    bias = bias.sum(dim=(1, 3))[:, :, :R]
    bias = torch.cat((bias[..., : N // 2], bias[..., plan.NH : plan.NH + N // 2]), dim=-1)
    return dq_out, dk_out, bias[0], bias[1], dtheta
