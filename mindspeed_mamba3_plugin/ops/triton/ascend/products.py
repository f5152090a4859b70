"""The matrix products of a chunk, for the cube alone: whatever is element-wise stands in kernels of its own.

scores:    q k^T and the state k^T v_out that the chunk adds; backward, W = dO v^T and q_in^T dO
outputs:   O = mixed v + q_in S
products:  dq = dO_in S^T + mixed_w k,  dk = v_out dS^T + mixed_w^T q,  dv inside = mixed^T dO,  carried = k dS

A chunk's M rows are cut into one or two parts of L, and products of rows with rows into blocks of L by L: (0, 0),
(1, 0) and (1, 1). What earlier tokens would take from later ones is 0 and left out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..blocks import dot, narrow
from ..plan import Plan


@triton.jit
def _tile(x, index, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to the index-th [ROWS, COLUMNS] tile of those that stand one behind the other."""
    return x + index * (ROWS * COLUMNS) + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _scores_kernel(
    a, b, x, y, scores, sums, tasks,
    L: tl.constexpr, PARTS: tl.constexpr, W: tl.constexpr, N2: tl.constexpr, PP: tl.constexpr,
    X_IS_B: tl.constexpr, Y_IS_A: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = PARTS * (PARTS + 1) // 2
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64)
        part, block = task * PARTS, task * BLOCKS
        rows = tl.load(_tile(a, part, L, W))
        right = tl.load(_tile(b, part, L, W))
        tl.store(_tile(scores, block, L, L), dot(rows, tl.trans(right)))
        left = right if X_IS_B else tl.load(_tile(x, part, L, N2))
        total = dot(tl.trans(left), rows if Y_IS_A else tl.load(_tile(y, part, L, PP)))
        if PARTS == 2:
            later = tl.load(_tile(a, part + 1, L, W))
            tl.store(_tile(scores, block + 1, L, L), dot(later, tl.trans(right)))
            right = tl.load(_tile(b, part + 1, L, W))
            tl.store(_tile(scores, block + 2, L, L), dot(later, tl.trans(right)))
            left = right if X_IS_B else tl.load(_tile(x, part + 1, L, N2))
            total = dot(tl.trans(left), later if Y_IS_A else tl.load(_tile(y, part + 1, L, PP)), total)
        tl.store(_tile(sums, task, N2, PP), total)


def scores(a: Tensor, b: Tensor, x: Tensor, y: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """a b^T as [chunks, H, blocks, L, L] and x^T y [chunks, H, N2, PP] of every chunk and head, both fp32; all are
    [chunks, H, M, columns], and x may be b, or y be a."""
    product = torch.empty(*a.shape[:2], plan.blocks, plan.L, plan.L, dtype=torch.float32, device=a.device)
    sums = torch.empty(*a.shape[:2], plan.N2, plan.PP, dtype=torch.float32, device=a.device)
    tasks = a.shape[0] * a.shape[1]
    _scores_kernel[plan.cube_grid(tasks)](
        a, b, x, y, product, sums, tasks,
        L=plan.L, PARTS=plan.parts, W=a.shape[3], N2=plan.N2, PP=plan.PP, X_IS_B=x is b, Y_IS_A=y is a, **plan.cube,
    )  # fmt: skip
    return product, sums


@triton.jit
def _outputs_kernel(
    q_in, v, states, mixed, o, tasks,
    L: tl.constexpr, PARTS: tl.constexpr, N2: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = PARTS * (PARTS + 1) // 2
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64)
        part, block = task * PARTS, task * BLOCKS
        state = tl.load(_tile(states, task, N2, PP))
        value = tl.load(_tile(v, part, L, PP))
        from_state = dot(tl.load(_tile(q_in, part, L, N2)), state)
        tl.store(_tile(o, part, L, PP), dot(tl.load(_tile(mixed, block, L, L)), value, from_state))
        if PARTS == 2:
            total = dot(tl.load(_tile(q_in, part + 1, L, N2)), state)
            total = dot(tl.load(_tile(mixed, block + 1, L, L)), value, total)
            value = tl.load(_tile(v, part + 1, L, PP))
            tl.store(_tile(o, part + 1, L, PP), dot(tl.load(_tile(mixed, block + 2, L, L)), value, total))


def outputs(q_in: Tensor, v: Tensor, states: Tensor, mixed: Tensor, plan: Plan) -> Tensor:
    """Returns O without D v, fp32 [chunks, H, M, PP]."""
    o = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    tasks = v.shape[0] * v.shape[1]
    _outputs_kernel[plan.cube_grid(tasks)](
        q_in, v, states, mixed, o, tasks, L=plan.L, PARTS=plan.parts, N2=plan.N2, PP=plan.PP, **plan.cube
    )  # fmt: skip
    return o


@triton.jit
def _products_kernel(
    q, k, v_out, do, do_in, states, dstates, mixed, mixed_w, dq, dk, dv, carried, tasks,
    L: tl.constexpr, PARTS: tl.constexpr, N2: tl.constexpr, PP: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = PARTS * (PARTS + 1) // 2
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64)
        part, block = task * PARTS, task * BLOCKS
        keys = tl.load(_tile(k, part, L, N2))
        dstate = tl.load(_tile(dstates, task, N2, PP))
        tl.store(_tile(carried, part, L, PP), narrow(dot(keys, dstate), carried.dtype.element_ty))
        if PARTS == 2:
            later_keys = tl.load(_tile(k, part + 1, L, N2))
            tl.store(_tile(carried, part + 1, L, PP), narrow(dot(later_keys, dstate), carried.dtype.element_ty))

        dvalue = dot(tl.trans(tl.load(_tile(mixed, block, L, L))), tl.load(_tile(do, part, L, PP)))
        if PARTS == 2:
            grad = tl.load(_tile(do, part + 1, L, PP))
            dvalue = dot(tl.trans(tl.load(_tile(mixed, block + 1, L, L))), grad, dvalue)
            later = dot(tl.trans(tl.load(_tile(mixed, block + 2, L, L))), grad)
            tl.store(_tile(dv, part + 1, L, PP), narrow(later, dv.dtype.element_ty))
        tl.store(_tile(dv, part, L, PP), narrow(dvalue, dv.dtype.element_ty))

        weights = tl.load(_tile(mixed_w, block, L, L))
        dkeys = dot(tl.load(_tile(v_out, part, L, PP)), tl.trans(dstate))
        dkeys = dot(tl.trans(weights), tl.load(_tile(q, part, L, N2)), dkeys)
        if PARTS == 2:
            between = tl.load(_tile(mixed_w, block + 1, L, L))
            last = tl.load(_tile(mixed_w, block + 2, L, L))
            query = tl.load(_tile(q, part + 1, L, N2))
            dkeys = dot(tl.trans(between), query, dkeys)
            later = dot(tl.load(_tile(v_out, part + 1, L, PP)), tl.trans(dstate))
            tl.store(_tile(dk, part + 1, L, N2), dot(tl.trans(last), query, later))
        tl.store(_tile(dk, part, L, N2), dkeys)

        state = tl.load(_tile(states, task, N2, PP))
        dquery = dot(tl.load(_tile(do_in, part, L, PP)), tl.trans(state))
        tl.store(_tile(dq, part, L, N2), dot(weights, keys, dquery))
        if PARTS == 2:
            dquery = dot(tl.load(_tile(do_in, part + 1, L, PP)), tl.trans(state))
            tl.store(_tile(dq, part + 1, L, N2), dot(last, later_keys, dot(between, keys, dquery)))


def products(
    q: Tensor, k: Tensor, v_out: Tensor, do: Tensor, do_in: Tensor, states: Tensor, dstates: Tensor, mixed: Tensor,
    mixed_w: Tensor, plan: Plan,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns dq and dk of the rotated rows, fp32 [chunks, H, M, N2]; dv inside the chunk and k dS, [chunks, H, M,
    PP] in plan.share_dtype.

    dq and dk stay in fp32 because the gradient of an angle is a small difference of large products of them.
    """
    dq = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    dk = torch.empty_like(dq)
    dv = torch.empty(do.shape, dtype=plan.share_dtype, device=q.device)
    carried = torch.empty_like(dv)
    tasks = q.shape[0] * q.shape[1]
    _products_kernel[plan.cube_grid(tasks)](
        q, k, v_out, do, do_in, states, dstates, mixed, mixed_w, dq, dk, dv, carried, tasks,
        L=plan.L, PARTS=plan.parts, N2=plan.N2, PP=plan.PP, **plan.largest,
    )  # fmt: skip
    return dq, dk, dv, carried
