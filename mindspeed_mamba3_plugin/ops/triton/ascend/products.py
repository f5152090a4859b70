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
from .decay import MIXING_UNIT


@triton.jit
def _outputs_kernel(
    q, k, v, states, mixing, inside, carried, tasks, M: tl.constexpr, N2: tl.constexpr, PP: tl.constexpr
):  # fmt: skip
    m = tl.arange(0, M)
    row = m[:, None]
    n = tl.arange(0, N2)
    p = tl.arange(0, PP)[None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64)
        wide = task * (M * N2) + row * N2 + n[None, :]
        place = task * (M * PP) + row * PP + p
        query = tl.load(q + wide)
        mix = tl.load(mixing + task * (M * M) + row * M + m[None, :]).to(tl.float32) * (1.0 / MIXING_UNIT)
        scores = dot(query, tl.trans(tl.load(k + wide))) * mix
        tl.store(inside + place, dot(narrow(scores, v.dtype.element_ty), tl.load(v + place)))
        state = tl.load(states + task * (N2 * PP) + n[:, None] * PP + p)
        tl.store(carried + place, dot(query, state))


def outputs(q: Tensor, k: Tensor, v: Tensor, states: Tensor, mixing: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Returns `inside` and `carried`, fp32 [chunks, H, M, PP]: O = inside + carry_in carried + D v."""
    inside = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    carried = torch.empty_like(inside)
    tasks = q.shape[0] * q.shape[1]
    _outputs_kernel[plan.cube_grid(tasks)](
        q, k, v, states, mixing, inside, carried, tasks, M=plan.M, N2=plan.N2, PP=plan.PP, **plan.mixed
    )  # fmt: skip
    return inside, carried


@triton.jit
def _products_kernel(
    q, k, v, v_out, do, do_in, states, dstates, mixing, dq, dk, dv, carried, dmixing, tasks,
    M: tl.constexpr, N2: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, M)
    row = m[:, None]
    n = tl.arange(0, N2)
    p = tl.arange(0, PP)[None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64)
        wide = task * (M * N2) + row * N2 + n[None, :]
        place = task * (M * PP) + row * PP + p
        square = task * (M * M) + row * M + m[None, :]
        turned = task * (N2 * PP) + n[:, None] * PP + p
        query = tl.load(q + wide)
        keys = tl.load(k + wide)
        grad = tl.load(do + place)
        scores = dot(query, tl.trans(keys))
        w = dot(grad, tl.trans(tl.load(v + place)))
        mix = tl.load(mixing + square).to(tl.float32) * (1.0 / MIXING_UNIT)
        tl.store(dmixing + square, narrow(scores * w, dmixing.dtype.element_ty))
        mixed = narrow(scores * mix, v.dtype.element_ty)
        mixed_w = narrow(w * mix, v.dtype.element_ty)
        dstate = tl.load(dstates + turned)
        tl.store(carried + place, dot(keys, dstate))
        tl.store(dv + place, dot(tl.trans(mixed), grad))
        dkeys = dot(tl.load(v_out + place), tl.trans(dstate))
        tl.store(dk + wide, narrow(dot(tl.trans(mixed_w), query, dkeys), dk.dtype.element_ty))
        dquery = dot(tl.load(do_in + place), tl.trans(tl.load(states + turned)))
        tl.store(dq + wide, narrow(dot(mixed_w, keys, dquery), dq.dtype.element_ty))


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
    dmixing = torch.empty(mixing.shape, dtype=torch.float32, device=q.device)
    tasks = q.shape[0] * q.shape[1]
    _products_kernel[plan.cube_grid(tasks)](
        q, k, v, v_out, do, do_in, states, dstates, mixing, dq, dk, dv, carried, dmixing, tasks,
        M=plan.M, N2=plan.N2, PP=plan.PP, **plan.mixed,
    )  # fmt: skip
    return dq, dk, dv, carried, dmixing
