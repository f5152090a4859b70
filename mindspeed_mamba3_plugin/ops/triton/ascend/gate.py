"""Stage `gate`: from O to the output, and the whole of its backward (the element-wise part of bwd_fwd).

O = o + D v;   y = O rstd weight with the fused norm, else O
out = sum_r MIMO_Out y silu(Z MIMO_Z)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import first_row, narrow, opened, sigmoid
from ..chunks import Chunks
from ..plan import Plan


@triton.jit
def _gate_kernel(
    o, v, mimo_v, d, z, mimo_z, mimo_out, norm_weight, table, out, tasks, H, eps,
    C: tl.constexpr, CS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BT: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, REDUCE: tl.constexpr, NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, RP)[:, None, None]
    p = tl.arange(0, PP)[None, None, :]
    col = tl.arange(0, PP)[None, :]
    token = tl.arange(0, BT)
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        part = i % (C // BT)
        task = tl.cast(i // (C // BT), tl.int64)
        h = task % H
        chunk = task // H
        start = tl.load(table + chunk * 4).to(tl.int64)
        reach = tl.load(table + chunk * 4 + 1)
        t = part * BT + token[None, :, None]
        rank = (h * R + r) * P + p
        known = (r < R) & (p < P)
        seen = (t < reach) & (p < P)
        source = ((start + t) * H + h) * P + p
        place = (first_row(task, part * BT, C, CS, RP) + r * CS + token[None, :, None]) * PP + p
        y = tl.load(o + place)
        if HAS_D:
            up = tl.load(mimo_v + rank, mask=known, other=0.0).to(tl.float32)
            y += tl.load(d + h).to(tl.float32) * tl.load(v + source, mask=seen, other=0.0).to(tl.float32) * up
        if NORM:
            y *= tl.rsqrt(tl.sum(y * y, axis=2)[:, :, None] / P + eps)
        if WEIGHT:
            y *= tl.load(norm_weight + h * P + p, mask=p < P, other=0.0).to(tl.float32)
        if HAS_Z:
            gate = tl.load(z + source, mask=seen, other=0.0).to(tl.float32)
            gate *= tl.load(mimo_z + rank, mask=known, other=0.0).to(tl.float32)
            y *= gate * sigmoid(gate)
        if REDUCE:
            y *= tl.load(mimo_out + rank, mask=known, other=0.0).to(tl.float32)
            row = part * BT + token[:, None]
            target = ((start + row) * H + h) * P + col
            tl.store(out + target, narrow(tl.sum(y, axis=0), out.dtype.element_ty), mask=(row < reach) & (col < P))
        else:
            target = (((start + t) * R + r) * H + h) * P + p
            tl.store(out + target, narrow(y, out.dtype.element_ty), mask=seen & (r < R))


def _options(x: Inputs) -> dict[str, bool]:
    return {
        "HAS_D": x.D is not None,
        "HAS_Z": x.Z is not None,
        "REDUCE": x.MIMO_Out is not None,
        "NORM": x.fuse_norm,
        "WEIGHT": x.outproj_norm_weight is not None,
    }


def gate(x: Inputs, chunks: Chunks, plan: Plan, o: Tensor) -> Tensor:
    """The operator's output, [B, S, H, P] or [B, S, R, H, P]."""
    B, S, H, _, R, _, P = x.sizes
    shape = (B, S, H, P) if x.MIMO_Out is not None else (B, S, R, H, P)
    out = torch.empty(shape, dtype=x.dtype, device=x.V.device)
    BT = plan.tokens(2 * plan.PP)
    tasks = chunks.count * H * (plan.C // BT)
    _gate_kernel[plan.vector_grid(tasks)](
        o, x.V, x.MIMO_V, x.D, x.Z, x.MIMO_Z, x.MIMO_Out, x.outproj_norm_weight, chunks.table, out, tasks, H,
        x.norm_eps, C=plan.C, CS=plan.CS, R=R, RP=plan.RP, P=P, PP=plan.PP, BT=BT, **_options(x),
    )  # fmt: skip
    return out


@triton.jit
def _gate_bwd_kernel(
    grad_out, o, carry_in, v, mimo_v, d, z, mimo_z, mimo_out, norm_weight, table,
    do, do_in, dz, dmimo_z, dmimo_out, dnorm_weight, dlog_o, tasks, H, chunks, K, eps,
    C: tl.constexpr, CS: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, P: tl.constexpr, PP: tl.constexpr,
    BT: tl.constexpr, HAS_D: tl.constexpr, HAS_Z: tl.constexpr, REDUCE: tl.constexpr, NORM: tl.constexpr,
    WEIGHT: tl.constexpr,
):  # fmt: skip
    r = tl.arange(0, RP)[:, None, None]
    p = tl.arange(0, PP)[None, None, :]
    ranks = tl.arange(0, RP)[:, None]
    col = tl.arange(0, PP)[None, :]
    token = tl.arange(0, BT)
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        h = i % H
        first = i // H * K
        rank = (h * R + r) * P + p
        known = (r < R) & (p < P)
        # What multiplies a tile is multiplied together before, where it is one row a rank.
        if HAS_D:
            skip = tl.load(d + h).to(tl.float32)
            up = skip * tl.load(mimo_v + rank, mask=known, other=0.0).to(tl.float32)
        if REDUCE:
            down = tl.load(mimo_out + rank, mask=known, other=0.0).to(tl.float32)
        if HAS_Z:
            up_z = tl.load(mimo_z + rank, mask=known, other=0.0).to(tl.float32)
            back_z = up_z * down if REDUCE else up_z
            minus_up_z = -up_z
        if WEIGHT:
            weight = tl.load(norm_weight + h * P + p, mask=p < P, other=0.0).to(tl.float32)
        sum_out = tl.zeros((RP, PP), dtype=tl.float32)
        sum_z = tl.zeros((RP, PP), dtype=tl.float32)
        sum_weight = tl.zeros((RP, PP), dtype=tl.float32)
        for c in range(first, tl.minimum(first + K, chunks)):
            chunk = tl.cast(c, tl.int64)
            task = chunk * H + h
            start = tl.load(table + chunk * 4).to(tl.int64)
            reach = tl.load(table + chunk * 4 + 1)
            for part in range(0, C // BT):
                t = part * BT + token[None, :, None]
                row = part * BT + token
                seen = (t < reach) & (p < P)
                source = ((start + t) * H + h) * P + p
                place = (first_row(task, part * BT, C, CS, RP) + r * CS + token[None, :, None]) * PP + p
                if REDUCE:
                    g = tl.load(grad_out + source, mask=seen, other=0.0).to(tl.float32)
                else:
                    of_rank = (((start + t) * R + r) * H + h) * P + p
                    g = tl.load(grad_out + of_rank, mask=seen & (r < R), other=0.0).to(tl.float32)
                # Through out = sum_r down y silu(x), x = z up_z: first y's factors, while y takes no room.
                if HAS_Z:
                    zr = tl.load(z + source, mask=seen, other=0.0).to(tl.float32)
                    minus_x = zr * minus_up_z
                    open_ = opened(minus_x)
                    minus_passed = minus_x * open_ * g
                    through_x = open_ * (g + minus_passed) - minus_passed
                own = tl.load(o + place)
                y = own
                if HAS_D:
                    y = own + tl.load(v + source, mask=seen, other=0.0).to(tl.float32) * up
                if NORM:
                    rstd = tl.rsqrt(tl.sum(y * y, axis=2)[:, :, None] / P + eps)
                    y *= rstd
                    unit = y
                if WEIGHT:
                    y *= weight
                if HAS_Z:
                    if REDUCE:
                        sum_out -= tl.sum(y * minus_passed, axis=1)
                    dx = y * through_x
                    sum_z += tl.sum(dx * zr, axis=1)
                    target = ((start + row[:, None]) * H + h) * P + col
                    tl.store(
                        dz + target,
                        narrow(tl.sum(dx * back_z, axis=0), dz.dtype.element_ty),
                        mask=(row[:, None] < reach) & (col < P),
                    )
                    dy = minus_passed * (-down if REDUCE else -1.0)
                else:
                    dy = g
                    if REDUCE:
                        sum_out += tl.sum(y * g, axis=1)
                        dy = g * down
                if NORM:
                    if WEIGHT:
                        sum_weight += tl.sum(dy * unit, axis=1)
                        dy *= weight
                    dy = rstd * (dy - unit * (tl.sum(dy * unit, axis=2)[:, :, None] / P))
                rounded = narrow(dy, do.dtype.element_ty)
                tl.store(do + place, rounded)
                tl.store(do_in + place, narrow(dy * tl.load(carry_in + task * C + t), do_in.dtype.element_ty))
                dy = rounded.to(tl.float32)
                tl.store(dlog_o + task * C + row, tl.sum(tl.sum(dy * own, axis=0), axis=1))
        own = (tl.cast(i, tl.int64) * RP + ranks) * PP + col
        rank = (h * R + ranks) * P + col
        known = (ranks < R) & (col < P)
        if REDUCE:
            tl.store(dmimo_out + own, sum_out)
        if HAS_Z:
            through = sum_z
            if REDUCE:
                through *= tl.load(mimo_out + rank, mask=known, other=0.0).to(tl.float32)
            tl.store(dmimo_z + own, through)
        if WEIGHT:
            tl.store(dnorm_weight + own, sum_weight)


class GateGradients(NamedTuple):
    """do and do_in (dO carry_in) are [chunks, H, M, PP] in the operand dtype; dlog_o is the gradient
    of a common factor of a token's O without D v, fp32 [chunks, H, C]; the rest are final, fp32 but for dz. None
    where the argument was absent."""

    do: Tensor
    do_in: Tensor
    dlog_o: Tensor
    dz: Tensor | None
    dmimo_z: Tensor | None
    dmimo_out: Tensor | None
    dnorm_weight: Tensor | None


def gate_bwd(x: Inputs, chunks: Chunks, plan: Plan, grad_out: Tensor, o: Tensor, carry_in: Tensor) -> GateGradients:
    """Backward of `gate`, and dO for the products."""
    _, _, H, _, R, _, P = x.sizes
    do = torch.empty(o.shape, dtype=plan.dtype, device=x.V.device)
    do_in, dlog_o = torch.empty_like(do), torch.empty_like(carry_in)
    dz = torch.empty_like(x.Z) if x.Z is not None else None

    K = plan.walk(chunks.count, H)
    groups = -(-chunks.count // K)

    def partial(given: Tensor | None) -> Tensor | None:
        if given is None:
            return None
        return torch.empty(groups, H, plan.RP, plan.PP, dtype=torch.float32, device=x.V.device)

    dmimo_z, dmimo_out, dnorm_weight = map(partial, (x.MIMO_Z, x.MIMO_Out, x.outproj_norm_weight))
    tasks = groups * H
    _gate_bwd_kernel[plan.vector_grid(tasks)](
        grad_out, o, carry_in, x.V, x.MIMO_V, x.D, x.Z, x.MIMO_Z, x.MIMO_Out, x.outproj_norm_weight,
        chunks.table, do, do_in, dz, dmimo_z, dmimo_out, dnorm_weight, dlog_o, tasks, H, chunks.count, K,
        x.norm_eps, C=plan.C, CS=plan.CS, R=R, RP=plan.RP, P=P, PP=plan.PP, BT=plan.tokens(plan.PP), **_options(x),
    )  # fmt: skip
    return GateGradients(
        do,
        do_in,
        dlog_o,
        dz,
        dmimo_z.sum(0)[:, :R, :P] if dmimo_z is not None else None,
        dmimo_out.sum(0)[:, :R, :P] if dmimo_out is not None else None,
        dnorm_weight.sum(dim=(0, 2))[:, :P] if dnorm_weight is not None else None,
    )
