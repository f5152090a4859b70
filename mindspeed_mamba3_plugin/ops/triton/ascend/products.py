"""Stages `outputs` and `products`: the matrix products of a chunk, forward and backward.

outputs:   inside = (mixing . q k^T) v,  carried = q S
products:  W = dO v^T;  dq = dO_in S^T + (mixing . W) k,  dk = v_out dS^T + (mixing . W)^T q,
           dv inside = (mixing . q k^T)^T dO,  carried = k dS,  dmixing = sum over rank pairs of q k^T . W
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..blocks import dot, narrow
from ..plan import Plan


@triton.jit
def _outputs_kernel(
    q, k, v, states, mixing, inside, carried, tasks,
    C: tl.constexpr, RP: tl.constexpr, N2: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = RP * C
    m = tl.arange(0, M)
    t = tl.arange(0, C)[:, None]
    n = tl.arange(0, N2)
    p = tl.arange(0, PP)[None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64)
        keys = tl.load(k + task * (M * N2) + m[:, None] * N2 + n[None, :])
        rows = tl.load(v + task * (M * PP) + m[:, None] * PP + p)
        state = tl.load(states + task * (N2 * PP) + n[:, None] * PP + p)
        mix = tl.load(mixing + task * (C * M) + t * M + m[None, :])
        for r in tl.static_range(RP):
            query = tl.load(q + task * (M * N2) + (r * C + t) * N2 + n[None, :])
            scores = narrow(dot(query, tl.trans(keys)) * mix, v.dtype.element_ty)
            place = task * (M * PP) + (r * C + t) * PP + p
            tl.store(inside + place, dot(scores, rows))
            tl.store(carried + place, dot(query, state))


def outputs(q: Tensor, k: Tensor, v: Tensor, states: Tensor, mixing: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Returns `inside` and `carried`, fp32 [chunks, H, M, PP]: O = inside + carry_in carried + D v."""
    inside = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    carried = torch.empty_like(inside)
    tasks = q.shape[0] * q.shape[1]
    _outputs_kernel[plan.cube_grid(tasks)](
        q, k, v, states, mixing, inside, carried, tasks, C=plan.C, RP=plan.RP, N2=plan.N2, PP=plan.PP, **plan.mixed,
    )  # fmt: skip
    return inside, carried


@triton.jit
def _products_kernel(
    q, k, v, v_out, do, do_in, states, dstates, mixing, dq, dk, dv, carried, dmixing, tasks,
    C: tl.constexpr, RP: tl.constexpr, N2: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    M: tl.constexpr = RP * C
    m = tl.arange(0, M)
    t = tl.arange(0, C)[:, None]
    n = tl.arange(0, N2)
    p = tl.arange(0, PP)[None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64)
        keys = tl.load(k + task * (M * N2) + m[:, None] * N2 + n[None, :])
        rows = tl.load(v + task * (M * PP) + m[:, None] * PP + p)
        rows_out = tl.load(v_out + task * (M * PP) + m[:, None] * PP + p)
        state = tl.load(states + task * (N2 * PP) + n[:, None] * PP + p)
        dstate = tl.load(dstates + task * (N2 * PP) + n[:, None] * PP + p)
        mix = tl.load(mixing + task * (C * M) + t * M + m[None, :])
        tl.store(carried + task * (M * PP) + m[:, None] * PP + p, dot(keys, dstate))
        dkeys = dot(rows_out, tl.trans(dstate))
        drows = tl.zeros((M, PP), dtype=tl.float32)
        dmix = tl.zeros((C, M), dtype=tl.float32)
        # Unrolled: a vector value carried through a loop with products keeps older compilers to one vector core.
        for r in tl.static_range(RP):
            query = tl.load(q + task * (M * N2) + (r * C + t) * N2 + n[None, :])
            place = task * (M * PP) + (r * C + t) * PP + p
            grad = tl.load(do + place)
            grad_in = tl.load(do_in + place)
            scores = dot(query, tl.trans(keys))
            w = dot(grad, tl.trans(rows))
            dmix += scores * w
            mixed = narrow(scores * mix, v.dtype.element_ty)
            mixed_w = narrow(w * mix, v.dtype.element_ty)
            drows = dot(tl.trans(mixed), grad, drows)
            dkeys = dot(tl.trans(mixed_w), query, dkeys)
            dquery = dot(mixed_w, keys, dot(grad_in, tl.trans(state)))
            tl.store(dq + task * (M * N2) + (r * C + t) * N2 + n[None, :], narrow(dquery, dq.dtype.element_ty))
        tl.store(dk + task * (M * N2) + m[:, None] * N2 + n[None, :], narrow(dkeys, dk.dtype.element_ty))
        tl.store(dv + task * (M * PP) + m[:, None] * PP + p, drows)
        tl.store(dmixing + task * (C * M) + t * M + m[None, :], dmix)


def products(
    q: Tensor, k: Tensor, v: Tensor, v_out: Tensor, do: Tensor, do_in: Tensor, states: Tensor, dstates: Tensor,
    mixing: Tensor, plan: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns, all in fp32: dq and dk of the rotated rows [chunks, H, M, N2], dv inside the chunk and k dS
    [chunks, H, M, PP], and dmixing [chunks, H, C, RP C], to be summed over its RP blocks.

    dq and dk stay in fp32 because the gradient of an angle is a small difference of large products of them.
    """
    dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    dk = torch.empty_like(dq)
    dv = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    carried = torch.empty_like(dv)
    dmixing = torch.empty_like(mixing)
    tasks = q.shape[0] * q.shape[1]
    _products_kernel[plan.cube_grid(tasks)](
        q, k, v, v_out, do, do_in, states, dstates, mixing, dq, dk, dv, carried, dmixing, tasks,
        C=plan.C, RP=plan.RP, N2=plan.N2, PP=plan.PP, **plan.mixed,
    )  # fmt: skip
    return dq, dk, dv, carried, dmixing
