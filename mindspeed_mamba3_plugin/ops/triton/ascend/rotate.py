"""Stage `rotate`: biases and rotation of q and k, and its backward with the sum over the heads of a group.

Rows of a chunk are in (rank, token) order, and the state dimension is kept in two halves of NH columns, so that a
rotation is element-wise between two tiles of one shape.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import narrow
from ..chunks import Chunks
from ..plan import Plan

try:  # from triton-ascend 3.2.1 on
    from triton.language.extra.cann.extension import extract_slice
except ImportError:  # 3.2.0 has it in the language; elsewhere no tile is cut
    extract_slice = getattr(tl, "extract_slice", None)


def _cut(plan: Plan) -> bool:
    return plan.cut_tiles and extract_slice is not None


@triton.jit
def _halves(x, rows, seen, RP: tl.constexpr, BT: tl.constexpr, N: tl.constexpr, NH: tl.constexpr, CUT: tl.constexpr):
    """Both halves of rows of N columns, fp32 [RP, BT, NH], 0 in rows that are not seen and in padding."""
    if CUT and N == 2 * NH:  # one transfer in long rows
        both = tl.load(x + rows + tl.arange(0, N)[None, None, :], mask=seen, other=0.0).to(tl.float32)
        lo = extract_slice(both, (0, 0, 0), (RP, BT, NH), (1, 1, 1))
        return lo, extract_slice(both, (0, 0, NH), (RP, BT, NH), (1, 1, 1))
    else:
        n = tl.arange(0, NH)[None, None, :]
        inside = seen & (n < N // 2)
        lo = tl.load(x + rows + n, mask=inside, other=0.0).to(tl.float32)
        return lo, tl.load(x + rows + N // 2 + n, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _column(place, n, rest: tl.constexpr, FILLED: tl.constexpr, NH: tl.constexpr):
    """Rows of a table of which FILLED columns are set, `rest` in the others."""
    if FILLED < NH:
        return tl.load(place, mask=n < FILLED, other=rest)
    else:
        return tl.load(place)


@triton.jit
def _rotate_kernel(
    q, k, q_bias, k_bias, cos, sin, table, q_out, k_out, tasks, H, G,
    C: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, N: tl.constexpr, NH: tl.constexpr, BT: tl.constexpr,
    CUT: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = C // BT
    r = tl.arange(0, RP)[:, None, None]
    n = tl.arange(0, NH)[None, None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        g = (i // PARTS) % G
        chunk = tl.cast(i // (PARTS * G), tl.int64)
        start = tl.load(table + chunk * 4).to(tl.int64)
        t = (i % PARTS) * BT + tl.arange(0, BT)[None, :, None]
        seen = (r < R) & (t < tl.load(table + chunk * 4 + 1))
        source = ((start + t) * R + r) * (G * N) + g * N
        q_lo, q_hi = _halves(q, source, seen, RP, BT, N, NH, CUT)
        k_lo, k_hi = _halves(k, source, seen, RP, BT, N, NH, CUT)
        for h in range(g * (H // G), (g + 1) * (H // G)):
            task = chunk * H + h
            turn = (task * C + t) * NH + n
            c = _column(cos + turn, n, 1.0, FILLED, NH)
            s = _column(sin + turn, n, 0.0, FILLED, NH)
            out = (task * RP * C + r * C + t) * (2 * NH) + n
            # Rows past the end of the sequence become the rotated bias: everything they are multiplied with is 0.
            b_lo, b_hi = _halves(q_bias, (h * R + r) * N, r < R, RP, 1, N, NH, CUT)
            lo = q_lo + b_lo
            hi = q_hi + b_hi
            tl.store(q_out + out, narrow(lo * c - hi * s, q_out.dtype.element_ty))
            tl.store(q_out + out + NH, narrow(lo * s + hi * c, q_out.dtype.element_ty))
            b_lo, b_hi = _halves(k_bias, (h * R + r) * N, r < R, RP, 1, N, NH, CUT)
            lo = k_lo + b_lo
            hi = k_hi + b_hi
            tl.store(k_out + out, narrow(lo * c - hi * s, k_out.dtype.element_ty))
            tl.store(k_out + out + NH, narrow(lo * s + hi * c, k_out.dtype.element_ty))


def rotate(x: Inputs, chunks: Chunks, plan: Plan, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated q and k, [chunks, H, M, N2] in the operand dtype; padding of R and N is 0."""
    _, _, H, G, R, N, _ = x.sizes
    q = torch.empty(chunks.count, H, plan.M, plan.N2, dtype=plan.dtype, device=x.Q.device)
    k = torch.empty_like(q)
    BT = plan.tokens(plan.NH if plan.RP > 2 else 2 * plan.NH)  # cosines and sines take as much as two ranks
    tasks = chunks.count * G * (plan.C // BT)
    _rotate_kernel[plan.vector_grid(tasks)](
        x.Q, x.K, x.Q_bias, x.K_bias, cos, sin, chunks.table, q, k, tasks, H, G,
        C=plan.C, R=R, RP=plan.RP, N=N, NH=plan.NH, BT=BT, CUT=_cut(plan),
        FILLED=plan.rotated(x.Angles.shape[3]),
    )  # fmt: skip
    return q, k


@triton.jit
def _head_bwd(
    dx, rows, lo, hi, x_bias, bias, ranks, c, s, dtype: tl.constexpr,
    RP: tl.constexpr, BT: tl.constexpr, N: tl.constexpr, NH: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """One head's gradients of both halves before bias and rotation, and that of the angle before the sum over ranks.

    The rotated rows are computed again and rounded as the products had them: turning a whole sequence changes
    nothing, and its gradient is 0 with these rows alone.
    """
    b_lo, b_hi = _halves(x_bias, bias, ranks, RP, 1, N, NH, CUT)
    lo += b_lo
    hi += b_hi
    every = tl.arange(0, RP)[:, None, None] < RP
    d_lo, d_hi = _halves(dx, rows, every, RP, BT, 2 * NH, NH, CUT)
    turn = d_hi * narrow(lo * c - hi * s, dtype).to(tl.float32)
    turn -= d_lo * narrow(lo * s + hi * c, dtype).to(tl.float32)
    return d_lo * c + d_hi * s, d_hi * c - d_lo * s, turn


@triton.jit
def _rotate_bwd_kernel(
    dq, dk, q, k, q_bias, k_bias, cos, sin, table, dq_out, dk_out, dq_bias, dk_bias, dtheta, tasks, H, G,
    C: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, N: tl.constexpr, NH: tl.constexpr, BT: tl.constexpr,
    CUT: tl.constexpr, FILLED: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = N // 2
    PARTS: tl.constexpr = C // BT
    r = tl.arange(0, RP)[:, None, None]
    n = tl.arange(0, NH)[None, None, :]
    rank = tl.arange(0, RP)[:, None]
    col = tl.arange(0, NH)[None, :]
    token = tl.arange(0, BT)
    dtype: tl.constexpr = q.dtype.element_ty if ROUND else tl.float32
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        part = i % PARTS
        g = (i // PARTS) % G
        chunk = tl.cast(i // (PARTS * G), tl.int64)
        start = tl.load(table + chunk * 4).to(tl.int64)
        t = part * BT + token[None, :, None]
        seen = (r < R) & (t < tl.load(table + chunk * 4 + 1))
        source = ((start + t) * R + r) * (G * N) + g * N
        q_lo, q_hi = _halves(q, source, seen, RP, BT, N, NH, CUT)
        k_lo, k_hi = _halves(k, source, seen, RP, BT, N, NH, CUT)
        dq_lo = tl.zeros((RP, BT, NH), dtype=tl.float32)
        dq_hi = tl.zeros((RP, BT, NH), dtype=tl.float32)
        dk_lo = tl.zeros((RP, BT, NH), dtype=tl.float32)
        dk_hi = tl.zeros((RP, BT, NH), dtype=tl.float32)
        for h in range(g * (H // G), (g + 1) * (H // G)):
            task = chunk * H + h
            turn = (task * C + t) * NH + n
            c = _column(cos + turn, n, 1.0, FILLED, NH)
            s = _column(sin + turn, n, 0.0, FILLED, NH)
            rows = (task * RP * C + r * C + t) * (2 * NH)
            dbias = ((task * PARTS + part) * RP + rank) * (2 * NH) + col
            bias = (h * R + r) * N
            lo, hi, turn = _head_bwd(dq, rows, q_lo, q_hi, q_bias, bias, r < R, c, s, dtype, RP, BT, N, NH, CUT)
            dq_lo += lo
            dq_hi += hi
            tl.store(dq_bias + dbias, tl.sum(lo, axis=1))
            tl.store(dq_bias + dbias + NH, tl.sum(hi, axis=1))
            lo, hi, k_turn = _head_bwd(dk, rows, k_lo, k_hi, k_bias, bias, r < R, c, s, dtype, RP, BT, N, NH, CUT)
            dk_lo += lo
            dk_hi += hi
            tl.store(dk_bias + dbias, tl.sum(lo, axis=1))
            tl.store(dk_bias + dbias + NH, tl.sum(hi, axis=1))
            own = tl.sum(turn + k_turn, axis=0)
            tl.store(dtheta + (task * C + part * BT + token[:, None]) * NH + col, own)
        seen = seen & (n < HALF)
        tl.store(dq_out + source + n, narrow(dq_lo, dq_out.dtype.element_ty), mask=seen)
        tl.store(dq_out + source + n + HALF, narrow(dq_hi, dq_out.dtype.element_ty), mask=seen)
        tl.store(dk_out + source + n, narrow(dk_lo, dk_out.dtype.element_ty), mask=seen)
        tl.store(dk_out + source + n + HALF, narrow(dk_hi, dk_out.dtype.element_ty), mask=seen)


def rotate_bwd(
    x: Inputs, chunks: Chunks, plan: Plan, dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """From gradients of the rotated q and k to dQ, dK, dQ_bias, dK_bias and dtheta [chunks, H, C, NH] fp32."""
    _, _, H, G, R, N, _ = x.sizes
    dq_out, dk_out = torch.empty_like(x.Q), torch.empty_like(x.K)
    BT = plan.tokens(2 * plan.NH)  # four accumulators beside the tiles of one head
    parts = plan.C // BT
    bias = torch.empty(2, chunks.count, H, parts, plan.RP, plan.N2, dtype=torch.float32, device=x.Q.device)
    dtheta = torch.empty(chunks.count, H, plan.C, plan.NH, dtype=torch.float32, device=x.Q.device)
    tasks = chunks.count * G * parts
    _rotate_bwd_kernel[plan.vector_grid(tasks)](
        dq, dk, x.Q, x.K, x.Q_bias, x.K_bias, cos, sin, chunks.table, dq_out, dk_out, bias[0], bias[1], dtheta,
        tasks, H, G, C=plan.C, R=R, RP=plan.RP, N=N, NH=plan.NH, BT=BT, CUT=_cut(plan),
        FILLED=plan.rotated(x.Angles.shape[3]),
        ROUND=plan.dtype != torch.float32,
    )  # fmt: skip
    bias = bias.sum(dim=(1, 3))[:, :, :R]
    bias = torch.cat((bias[..., : N // 2], bias[..., plan.NH : plan.NH + N // 2]), dim=-1)
    return dq_out, dk_out, bias[0], bias[1], dtheta
