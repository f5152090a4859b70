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


@triton.jit
def _rotate_kernel(
    q, k, q_bias, k_bias, cos, sin, table, q_out, k_out, tasks, H, G,
    C: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, N: tl.constexpr, NH: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = N // 2
    r = tl.arange(0, RP)[:, None, None]
    n = tl.arange(0, NH)[None, None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        part = i % (C // BT)
        task = tl.cast(i // (C // BT), tl.int64)
        h = task % H
        chunk = task // H
        start = tl.load(table + chunk * 4).to(tl.int64)
        reach = tl.load(table + chunk * 4 + 1)
        t = part * BT + tl.arange(0, BT)[None, :, None]
        seen = (r < R) & (t < reach) & (n < HALF)
        source = ((start + t) * R + r) * (G * N) + (h // (H // G)) * N + n
        bias = (h * R + r) * N + n
        known = (r < R) & (n < HALF)
        turn = (task * C + t) * NH + n
        c = tl.load(cos + turn)
        s = tl.load(sin + turn)
        out = (task * RP * C + r * C + t) * (2 * NH) + n
        for which in tl.static_range(2):
            x = q if which == 0 else k
            b = q_bias if which == 0 else k_bias
            o = q_out if which == 0 else k_out
            lo = tl.load(x + source, mask=seen, other=0.0).to(tl.float32)
            hi = tl.load(x + source + HALF, mask=seen, other=0.0).to(tl.float32)
            # Rows past the end of the sequence become the rotated bias: everything they are multiplied with is 0.
            lo += tl.load(b + bias, mask=known, other=0.0).to(tl.float32)
            hi += tl.load(b + bias + HALF, mask=known, other=0.0).to(tl.float32)
            tl.store(o + out, narrow(lo * c - hi * s, o.dtype.element_ty))
            tl.store(o + out + NH, narrow(lo * s + hi * c, o.dtype.element_ty))


def rotate(x: Inputs, chunks: Chunks, plan: Plan, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated q and k, [chunks, H, M, N2] in the operand dtype; padding of R and N is 0."""
    _, _, H, G, R, N, _ = x.sizes
    q = torch.empty(chunks.count, H, plan.M, plan.N2, dtype=plan.dtype, device=x.Q.device)
    k = torch.empty_like(q)
    BT = plan.tokens(plan.NH)
    tasks = chunks.count * H * (plan.C // BT)
    _rotate_kernel[plan.vector_grid(tasks)](
        x.Q, x.K, x.Q_bias, x.K_bias, cos, sin, chunks.table, q, k, tasks, H, G,
        C=plan.C, R=R, RP=plan.RP, N=N, NH=plan.NH, BT=BT,
    )  # fmt: skip
    return q, k


@triton.jit
def _unrotate(dx, x, rows, c, s, NH: tl.constexpr):
    """Gradients of both halves before the rotation, and that of the angle, from those after it."""
    d_lo = tl.load(dx + rows).to(tl.float32)
    d_hi = tl.load(dx + rows + NH).to(tl.float32)
    lo = tl.load(x + rows).to(tl.float32)
    hi = tl.load(x + rows + NH).to(tl.float32)
    return d_lo * c + d_hi * s, d_hi * c - d_lo * s, tl.sum(d_hi * lo - d_lo * hi, axis=0)


@triton.jit
def _rotate_bwd_kernel(
    dq, dk, q, k, cos, sin, table, dq_out, dk_out, dq_bias, dk_bias, dtheta, tasks, H, G,
    C: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, N: tl.constexpr, NH: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = N // 2
    PARTS: tl.constexpr = C // BT
    r = tl.arange(0, RP)[:, None, None]
    n = tl.arange(0, NH)[None, None, :]
    rank = tl.arange(0, RP)[:, None]
    col = tl.arange(0, NH)[None, :]
    token = tl.arange(0, BT)
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        part = i % PARTS
        g = (i // PARTS) % G
        chunk = tl.cast(i // (PARTS * G), tl.int64)
        start = tl.load(table + chunk * 4).to(tl.int64)
        reach = tl.load(table + chunk * 4 + 1)
        t = part * BT + token[None, :, None]
        q_lo = tl.zeros((RP, BT, NH), dtype=tl.float32)
        q_hi = tl.zeros((RP, BT, NH), dtype=tl.float32)
        k_lo = tl.zeros((RP, BT, NH), dtype=tl.float32)
        k_hi = tl.zeros((RP, BT, NH), dtype=tl.float32)
        for h in range(g * (H // G), (g + 1) * (H // G)):
            task = chunk * H + h
            turn = (task * C + t) * NH + n
            c = tl.load(cos + turn)
            s = tl.load(sin + turn)
            rows = (task * RP * C + r * C + t) * (2 * NH) + n
            bias = ((task * PARTS + part) * RP + rank) * (2 * NH) + col
            lo, hi, q_turn = _unrotate(dq, q, rows, c, s, NH)
            q_lo += lo
            q_hi += hi
            tl.store(dq_bias + bias, tl.sum(lo, axis=1))
            tl.store(dq_bias + bias + NH, tl.sum(hi, axis=1))
            lo, hi, k_turn = _unrotate(dk, k, rows, c, s, NH)
            k_lo += lo
            k_hi += hi
            tl.store(dk_bias + bias, tl.sum(lo, axis=1))
            tl.store(dk_bias + bias + NH, tl.sum(hi, axis=1))
            tl.store(dtheta + (task * C + part * BT + token[:, None]) * NH + col, q_turn + k_turn)
        seen = (r < R) & (t < reach) & (n < HALF)
        target = ((start + t) * R + r) * (G * N) + g * N + n
        tl.store(dq_out + target, narrow(q_lo, dq_out.dtype.element_ty), mask=seen)
        tl.store(dq_out + target + HALF, narrow(q_hi, dq_out.dtype.element_ty), mask=seen)
        tl.store(dk_out + target, narrow(k_lo, dk_out.dtype.element_ty), mask=seen)
        tl.store(dk_out + target + HALF, narrow(k_hi, dk_out.dtype.element_ty), mask=seen)


def rotate_bwd(
    x: Inputs, chunks: Chunks, plan: Plan, dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
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
        dq, dk, q, k, cos, sin, chunks.table, dq_out, dk_out, bias[0], bias[1], dtheta, tasks, H, G,
        C=plan.C, R=R, RP=plan.RP, N=N, NH=plan.NH, BT=BT,
    )  # fmt: skip
    bias = bias.sum(dim=(1, 3))[:, :, :R]
    bias = torch.cat((bias[..., : N // 2], bias[..., plan.NH : plan.NH + N // 2]), dim=-1)
    return dq_out, dk_out, bias[0], bias[1], dtheta
