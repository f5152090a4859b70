"""The plain Triton family: what an NPU runs. It also runs on any GPU and in the CPU interpreter.

Chunk-parallel, in small stages: pure products for the cube, element-wise kernels for the vector cores.
A stage's kernel and its launcher stand in one file; this one only strings them together.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ... import registry
from ...types import Gradients, Inputs, State
from ..chunks import Chunks, cut
from ..plan import Plan, operand_dtype, plain_plan, target_of
from .angles import angles, angles_bwd
from .decay import decay
from .decay_bwd import decay_bwd
from .gate import GateGradients, gate, gate_bwd
from .mixing import mix, mix_bwd
from .products import outputs, products, scores
from .rank_one import carries, mix_one, mix_one_bwd
from .rotate import rotate, rotate_bwd
from .states import reverse_scan, scan
from .values import values, values_bwd

NAME = "triton-ascend"


class _Rows(NamedTuple):
    """What the forward computes before the gate; the backward computes it again from the inputs."""

    mixing: Tensor | None  # none at rank 1
    carry_in: Tensor
    carry_out: Tensor
    whole: Tensor
    turns: Tensor
    angle: Tensor
    q: Tensor
    q_in: Tensor
    k: Tensor
    v: Tensor
    v_out: Tensor
    states: Tensor
    last_state: Tensor
    scores: Tensor
    mixed: Tensor
    o: Tensor


class Residuals(NamedTuple):
    """What bwd_fwd leaves for bwd_bwd."""

    chunks: Chunks
    plan: Plan
    rows: _Rows
    gate: GateGradients


def forward(x: Inputs) -> tuple[Tensor, State | None]:
    """Returns out ([B, S, H, P], or [B, S, R, H, P] without MIMO_Out) and the final state when it is asked for."""
    registry.count(NAME, "forward")
    x, chunks, plan = _prepare(x)
    rows = _rows(x, chunks, plan)
    out = gate(x, chunks, plan, rows.o)
    return out, _state(x, chunks, plan, rows) if x.return_state else None


def bwd_fwd(x: Inputs, grad_out: Tensor) -> Residuals:
    """The first half of the backward: recompute O, then the gradients of everything behind it (Z, MIMO_Z, MIMO_Out,
    norm weight) and dO."""
    registry.count(NAME, "bwd_fwd")
    x, chunks, plan = _prepare(x)
    rows = _rows(x, chunks, plan)
    behind = gate_bwd(x, chunks, plan, grad_out.contiguous(), rows.o, rows.carry_in)
    return Residuals(chunks, plan, rows, behind)


def bwd_bwd(x: Inputs, residuals: Residuals) -> Gradients:
    """The second half: from dO through the scan to every other gradient."""
    registry.count(NAME, "bwd_bwd")
    x = x.contiguous()
    chunks, plan, rows, behind = residuals
    w, down = scores(behind.do, rows.v, rows.q_in, behind.do, plan)
    dstates, dwhole, dturn = reverse_scan(down, rows.whole, rows.states, chunks, plan)
    if rows.mixing is None:
        mixed_w, dmixing, inside = mix_one_bwd(x, chunks, plan, rows.scores, w)
    else:
        mixed_w, dmixing, inside = mix_bwd(rows.scores, w, rows.mixing, plan)
    dq, dk, dv_inside, dv_carried = products(
        rows.q, rows.k, rows.v_out, behind.do, behind.do_in, rows.states, dstates, rows.mixed, mixed_w, plan
    )
    dv, dmimo_v, dd, dcarry_out = values_bwd(x, chunks, plan, dv_inside, dv_carried, behind.do, rows.carry_out)
    dadt, dgamma, ds = decay_bwd(x, chunks, plan, dmixing, inside, behind.dlog_o, dcarry_out, dwhole)
    dQ, dK, dq_bias, dk_bias, dtheta = rotate_bwd(x, chunks, plan, dq, dk, rows.turns)
    dangles, ddt, dtrap = angles_bwd(x, chunks, plan, dtheta, dturn, dgamma, ds)
    return Gradients(
        dQ, dK, dv, dadt, ddt, dtrap, dq_bias, dk_bias, dmimo_v, behind.dmimo_z, behind.dmimo_out, dangles,
        dd, behind.dz, behind.dnorm_weight,
    )  # fmt: skip


def backward(x: Inputs, grad_out: Tensor) -> Gradients:
    """All gradients, from the inputs alone: bwd_fwd, then bwd_bwd."""
    return bwd_bwd(x, bwd_fwd(x, grad_out))


def _prepare(x: Inputs) -> tuple[Inputs, Chunks, Plan]:
    _, _, _, _, R, N, P = x.sizes
    if x.dtype == torch.float64:
        raise ValueError("dtype is torch.float64: the Triton kernels take float16, bfloat16 or float32")
    plan = plain_plan(N, P, R, operand_dtype(x), target_of(x.Q.device))
    return x.contiguous(), cut(x, plan.C), plan


def _rows(x: Inputs, chunks: Chunks, plan: Plan) -> _Rows:
    one = plan.RP == 1
    mixing, carry_in, carry_out, whole = (None, *carries(x, chunks, plan)) if one else decay(x, chunks, plan)
    turns, angle = angles(x, chunks, plan)
    q, q_in, k = rotate(x, chunks, plan, turns, carry_in)
    v, v_out = values(x, chunks, plan, carry_out)
    products_of_rows, own = scores(q, k, k, v_out, plan)
    states, last_state = scan(own, whole, chunks, plan)
    mixed = mix_one(x, chunks, plan, products_of_rows) if one else mix(products_of_rows, mixing, plan)
    o = outputs(q_in, v, states, mixed, plan)
    return _Rows(
        mixing, carry_in, carry_out, whole, turns, angle, q, q_in, k, v, v_out, states, last_state, products_of_rows,
        mixed, o,
    )  # fmt: skip


def _state(x: Inputs, chunks: Chunks, plan: Plan, rows: _Rows) -> State:
    """The state each sequence leaves behind, out of the padded buffers."""
    _, _, H, _, R, N, P = x.sizes
    chunk, step, used = chunks.last_tokens()
    ssm = rows.last_state.transpose(-1, -2)[:, :, :P]
    v = x.V.flatten(0, 1)
    v = v[chunks.table[chunk, 0] + step] if v.shape[0] else v.new_zeros(len(chunk), H, P)
    return State(
        angle=rows.angle,
        ssm=_halves(ssm, N // 2, plan.NH).contiguous(),
        k=last_keys(rows.k, chunks, plan, R, N).to(x.dtype),
        v=torch.where(used[:, None, None], v, 0),
    )


def last_keys(k: Tensor, chunks: Chunks, plan: Plan, R: int, N: int) -> Tensor:
    """The rotated k of the last token of each sequence, [sequences, R, H, N], out of rows [chunks, H, M, N2]; 0 where
    a sequence has no token."""
    chunk, step, used = chunks.last_tokens()
    sequence = torch.arange(len(step), device=step.device)
    k = plan.by_rank(k[chunk])[sequence, :, :R, step].transpose(1, 2)
    return torch.where(used[:, None, None, None], _halves(k, N // 2, plan.NH), 0)


def _halves(y: Tensor, half: int, NH: int) -> Tensor:
    return torch.cat((y[..., :half], y[..., NH : NH + half]), dim=-1)
