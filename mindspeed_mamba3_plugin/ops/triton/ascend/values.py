"""Stage `values`: the up-projection of V, and its backward with the gradients that need v.

v = V MIMO_V,   v_out = v carry_out
dv = dv_inside + carry_out (k dS) + D dO,   dV = sum_r dv MIMO_V,   dMIMO_V = sum_t dv V,
dD = sum dO v,   d(carry_out) = sum_{r, p} v (k dS)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import first_row, narrow
from ..chunks import Chunks
from ..plan import Plan


@triton.jit
def _values_kernel(
    v, mimo_v, carry_out, table, v_rows, v_out, tasks, H, chunks, K,
    C: tl.constexpr, CS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, RP)[:, None, None]
    p = tl.arange(0, PP)[None, None, :]
    token = tl.arange(0, BT)[None, :, None]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        h = i % H
        first = i // H * K
        up = tl.load(mimo_v + (h * R + r) * P + p, mask=(r < R) & (p < P), other=0.0).to(tl.float32)
        for c in range(first, tl.minimum(first + K, chunks)):
            chunk = tl.cast(c, tl.int64)
            task = chunk * H + h
            start = tl.load(table + chunk * 4).to(tl.int64)
            reach = tl.load(table + chunk * 4 + 1)
            for part in range(0, C // BT):
                t = part * BT + token
                seen = (t < reach) & (p < P)
                value = tl.load(v + ((start + t) * H + h) * P + p, mask=seen, other=0.0).to(tl.float32)
                weight = tl.load(carry_out + task * C + t)
                place = (first_row(task, part * BT, C, CS, RP) + r * CS + token) * PP + p
                tl.store(v_rows + place, narrow(value * up, v_rows.dtype.element_ty))
                tl.store(v_out + place, narrow(value * weight * up, v_out.dtype.element_ty))


def values(x: Inputs, chunks: Chunks, plan: Plan, carry_out: Tensor) -> tuple[Tensor, Tensor]:
    """Returns v and v_out, [chunks, H, M, PP] in the operand dtype; padding is 0."""
    _, _, H, _, R, _, P = x.sizes
    rows = torch.empty(chunks.count, H, plan.M, plan.PP, dtype=plan.dtype, device=x.V.device)
    out = torch.empty_like(rows)
    K = plan.walk(chunks.count, H)
    tasks = -(-chunks.count // K) * H
    _values_kernel[plan.vector_grid(tasks)](
        x.V, x.MIMO_V, carry_out, chunks.table, rows, out, tasks, H, chunks.count, K,
        C=plan.C, CS=plan.CS, R=R, RP=plan.RP, P=P, PP=plan.PP, BT=plan.tokens(plan.PP // 2),
    )  # fmt: skip
    return rows, out


@triton.jit
def _values_bwd_kernel(
    inside, carried, do, v, mimo_v, d, carry_out, table, dv_out, dmimo_v, dd, dcarry_out, tasks, H, chunks, K,
    C: tl.constexpr, CS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BT: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, RP)[:, None, None]
    p = tl.arange(0, PP)[None, None, :]
    rank = tl.arange(0, RP)[:, None]
    col = tl.arange(0, PP)[None, :]
    token = tl.arange(0, BT)
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        h = i % H
        first = i // H * K
        up = tl.load(mimo_v + (h * R + r) * P + p, mask=(r < R) & (p < P), other=0.0).to(tl.float32)
        skip = tl.load(d + h).to(tl.float32) if HAS_D else 0.0
        dup = tl.zeros((RP, PP), dtype=tl.float32)
        through_d = tl.zeros((RP, PP), dtype=tl.float32)
        for c in range(first, tl.minimum(first + K, chunks)):
            chunk = tl.cast(c, tl.int64)
            task = chunk * H + h
            start = tl.load(table + chunk * 4).to(tl.int64)
            reach = tl.load(table + chunk * 4 + 1)
            for part in range(0, C // BT):
                t = part * BT + token[None, :, None]
                place = (first_row(task, part * BT, C, CS, RP) + r * CS + token[None, :, None]) * PP + p
                seen = (t < reach) & (p < P)
                value = tl.load(v + ((start + t) * H + h) * P + p, mask=seen, other=0.0).to(tl.float32)
                weight = tl.load(carry_out + task * C + t)
                from_state = tl.load(carried + place).to(tl.float32)
                grad = tl.load(inside + place).to(tl.float32) + weight * from_state
                if HAS_D:
                    do_rows = tl.load(do + place).to(tl.float32)
                    through_d += tl.sum(do_rows * value, axis=1)
                    grad += skip * do_rows
                dup += tl.sum(grad * value, axis=1)
                row = part * BT + token
                total = tl.sum(grad * up, axis=0)
                target = ((start + row[:, None]) * H + h) * P + col
                seen = (row[:, None] < reach) & (col < P)
                tl.store(dv_out + target, narrow(total, dv_out.dtype.element_ty), mask=seen)
                share = tl.sum(value * up * from_state, axis=0)
                tl.store(dcarry_out + task * C + row, tl.sum(share, axis=1))
        own = (tl.cast(i, tl.int64) * RP + rank) * PP + col
        tl.store(dmimo_v + own, dup)
        if HAS_D:
            up = tl.load(mimo_v + (h * R + rank) * P + col, mask=(rank < R) & (col < P), other=0.0).to(tl.float32)
            tl.store(dd + own, through_d * up)


def values_bwd(
    x: Inputs, chunks: Chunks, plan: Plan, inside: Tensor, carried: Tensor, do: Tensor, carry_out: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """From dv inside the chunk, k dS and dO ([chunks, H, M, PP]) to dV, dMIMO_V, dD and the gradient of
    carry_out, fp32 [chunks, H, C]."""
    _, _, H, _, R, _, P = x.sizes
    dv = torch.empty_like(x.V)
    dcarry_out = torch.empty_like(carry_out)
    K = plan.walk(chunks.count, H)
    dmimo_v = torch.empty(-(-chunks.count // K), H, plan.RP, plan.PP, dtype=torch.float32, device=x.V.device)
    dd = torch.empty_like(dmimo_v) if x.D is not None else None
    tasks = len(dmimo_v) * H
    _values_bwd_kernel[plan.vector_grid(tasks)](
        inside, carried, do, x.V, x.MIMO_V, x.D, carry_out, chunks.table, dv, dmimo_v, dd, dcarry_out, tasks, H,
        chunks.count, K, C=plan.C, CS=plan.CS, R=R, RP=plan.RP, P=P, PP=plan.PP, BT=plan.tokens(plan.PP),
        HAS_D=x.D is not None,
    )  # fmt: skip
    dd = dd.sum(dim=(0, 2, 3)) if dd is not None else None
    return dv, dmimo_v.sum(0)[:, :R, :P], dd, dcarry_out
