"""The plain family's stages in terms of what state-spaces/mamba's kernels are given: rotation angles (theta), decays
summed inside the caller's chunks, and the caller's chunk size.

The stages that only depend on angles and decays are replaced by a few lines of torch; all others are the family's.
Letters: c a chunk of the table, C its tokens padded to the plan's, U the caller's chunk size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from . import registry
from .checks import checked
from .sums import running_sum
from .triton import ascend
from .triton.ascend.gate import GateGradients, gate_bwd
from .triton.ascend.mixing import as_blocks, as_square, mix, mix_bwd
from .triton.ascend.products import outputs, products, scores
from .triton.ascend.rotate import rotate, rotate_bwd
from .triton.ascend.states import reverse_scan, scan
from .triton.ascend.values import values, values_bwd
from .triton.chunks import Chunks, cut
from .triton.plan import Plan, next_power_of_2, plain_plan, target_of
from .types import Inputs

_MOST_ROWS = 128  # of a chunk: more do not fit on a chip


class Layout:
    """Moves tensors between upstream's layouts and the chunks of the table."""

    def __init__(self, x: Inputs, chunks: Chunks, C: int):
        self.B, self.S = x.Q.shape[:2]
        self.U = x.chunk_size
        start, reach, done, batch = chunks.table.long().unbind(1)
        step = torch.arange(C, device=start.device)
        self.here = step < reach[:, None]  # [c, C]
        self.token = torch.where(self.here, start[:, None] + step, 0)
        self.ends = (reach - 1).clamp_min(0)[:, None, None]
        self.used = reach > 0
        starts = torch.zeros(self.S, dtype=torch.bool, device=start.device)
        if x.cu_seqlens is None:
            starts[0] = True
            slot = done // self.U
        else:
            first = x.cu_seqlens[:-1].long()
            starts[first[first < self.S]] = True
            rows = torch.arange(chunks.count, device=start.device)
            sequence = torch.searchsorted(chunks.bounds.long(), rows, right=True) - 1
            slot = torch.where(self.used, (start - done) // self.U + sequence + done // self.U, 0)
        self.starts = starts  # [S], first tokens of the sequences
        self.place = batch, slot

    def steps(self, y: Tensor) -> Tensor:
        """[B, H, S] -> fp32 [c, H, C], 0 past a chunk's end."""
        return self.tokens(y.transpose(1, 2))

    def tokens(self, y: Tensor) -> Tensor:
        """[B, S, H, ...] -> fp32 [c, H, C, ...], 0 past a chunk's end."""
        y = y.flatten(0, 1)[self.token].float()
        here = self.here.view(*self.here.shape, *(1,) * (y.ndim - 2))
        return torch.where(here, y, 0.0).transpose(1, 2)

    def back_to_steps(self, y: Tensor) -> Tensor:
        """[c, H, C] -> [B, H, S]."""
        return self.back_to_tokens(y).transpose(1, 2).contiguous()

    def back_to_tokens(self, y: Tensor) -> Tensor:
        """[c, H, C, ...] -> [B, S, H, ...]."""
        out = y.new_zeros(self.B * self.S, y.shape[1], *y.shape[3:])
        out[self.token[self.here]] = y.transpose(1, 2)[self.here]
        return out.view(self.B, self.S, *out.shape[1:])

    def slots(self, y: Tensor) -> Tensor:
        """[B, H, slots, ...] -> [c, H, ...]: upstream numbers the chunks of a packed sequence i from
        cu_seqlens[i] // U + i on, and leaves gaps."""
        return y.transpose(1, 2)[self.place]

    def back_to_slots(self, y: Tensor, out: Tensor) -> None:
        """Writes [c, H, ...] into [B, H, slots, ...]."""
        batch, slot = (index[self.used] for index in self.place)
        out.transpose(1, 2)[batch, slot] = y[self.used].to(out.dtype)


@dataclass
class Call:
    """The arguments of one upstream call, and what depends on angles and decays alone."""

    x: Inputs  # ADT holds dA_cs and Angles theta
    chunks: Chunks
    plan: Plan
    layout: Layout
    turns: Tensor  # the cosines and sines of theta, as the family's `angles` has them
    scale: Tensor  # s [c, H, C]
    decay: Tensor  # exp(segsum) below the diagonal, 0 elsewhere [c, H, C, C]
    mixing: Tensor  # [c, H, blocks, CS, CS]
    carry_in: Tensor  # [c, H, C]
    to_end: Tensor  # exp(dA_cs_rev) [c, H, C]
    whole: Tensor  # [c, H]

    @property
    def carry_out(self) -> Tensor:
        return (self.scale * self.to_end).contiguous()


class Rows(NamedTuple):
    """What the forward computes before the gate, as in the family."""

    q: Tensor
    q_in: Tensor
    k: Tensor
    v: Tensor
    v_out: Tensor
    states: Tensor  # entering the chunks [c, H, N2, PP]
    last_state: Tensor | None
    scores: Tensor
    mixed: Tensor
    o: Tensor


class ScanGradients(NamedTuple):
    """bwd_bwd's results in upstream's terms. With s_k the scale of token k and W = dmixing[q, k] the gradient of
    (decay s_k), or of gamma_k for q = k, summed over ranks:

    dfactor of s; dgamma_diag of gamma; dSSdA[k, q] = s_k W of exp(segsum), unmasked; ddA of a whole chunk's decay,
    repeated for its tokens; ddA_cs and ddA_cs_rev of exp(dA_cs) and exp(dA_cs_rev).
    """

    dk: Tensor
    dv: Tensor
    dmimo_v: Tensor
    dq: Tensor
    dfactor: Tensor  # this and the next: [B, H, S]
    dgamma_diag: Tensor
    dangles: Tensor  # of theta [B, S, H, N / divisor]
    ddA: Tensor  # [B, H, S]
    dSSdA: Tensor  # [c, H, C, C]
    ddA_cs_rev: Tensor  # [B, H, S]
    ddA_cs: Tensor
    dq_bias: Tensor
    dk_bias: Tensor
    dD: Tensor | None


def prepare(
    q: Tensor, k: Tensor, v: Tensor, q_bias: Tensor, k_bias: Tensor, mimo_v: Tensor, mimo_o: Tensor | None,
    z: Tensor | None, D: Tensor | None, mimo_z: Tensor | None, angles: Tensor, dA_cs: Tensor, dA_cs_rev: Tensor,
    dt: Tensor, trap: Tensor, segsum: Tensor, chunk_size: int, rotary_dim_divisor: int, dtype: torch.dtype | str,
    *, cu_seqlens: Tensor | None = None, norm: bool = False, norm_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
) -> Call:  # fmt: skip
    """Check the arguments of an upstream call.

    Raises:
        ValueError, TypeError: as `mamba3_mimo`; dA_cs is called ADT there, dt DT, trap Trap, mimo_o MIMO_Out.
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)
    if norm and norm_weight is None:
        norm_weight = torch.ones(v.shape[-2:], dtype=torch.float32, device=v.device)
    x = Inputs(
        q, k, v, dA_cs, dt, trap, q_bias, k_bias, mimo_v, mimo_z if z is not None else None, mimo_o, angles, D, z,
        norm_weight if norm else None, cu_seqlens, chunk_size, rotary_dim_divisor, dtype, False, norm, norm_eps,
    )  # fmt: skip
    x = checked(x)
    B, S, H, _, R, N, P = x.sizes
    if S == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}: must have at least one token")
    U, C = chunk_size, max(16, next_power_of_2(chunk_size))
    if (rows := next_power_of_2(R) * C) > _MOST_ROWS:
        raise ValueError(
            f"chunk_size is {U} and q has R = {R}: chunks of {rows} rows (both as powers of two, chunk_size at least "
            f"16); must be at most {_MOST_ROWS}"
        )
    slots = -(-S // U) if cu_seqlens is None else S // U + len(cu_seqlens) - 1
    for name, tensor, shape in (("dA_cs_rev", dA_cs_rev, (B, H, S)), ("segsum", segsum, (B, H, slots, U, U))):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must be {shape} to match q and chunk_size")
    registry.resolve(ascend.NAME, q.device.type)
    x = x.contiguous()

    plan = replace(plain_plan(N, P, R, x.dtype, target_of(q.device)), C=C)
    chunks = cut(x, U)
    table = chunks.table.clone()
    table[:, 1].clamp_(max=U)  # the kernels' chunks are padded: let them see the caller's tokens only
    chunks = replace(chunks, table=table)
    layout = Layout(x, chunks, plan.C)

    theta = layout.tokens(x.Angles)
    pad = (0, plan.rotated(theta.shape[-1]) - theta.shape[-1])
    weight, rest = torch.sigmoid(x.Trap.float()), torch.sigmoid(-x.Trap.float())
    gamma = x.DT.float() * weight
    beta = (x.DT.float() * rest).masked_fill(layout.starts, 0)
    scale = layout.steps(gamma + F.pad(beta[..., 1:], (0, 1)))
    below = torch.ones(plan.C, plan.C, dtype=torch.bool, device=q.device).tril(-1) & layout.here[:, None, :, None]
    sums = F.pad(layout.slots(segsum).float(), (0, plan.C - U, 0, plan.C - U))
    decay = torch.exp(sums.masked_fill(~below, -torch.inf))
    mixing = decay * scale[..., None, :] + torch.diag_embed(layout.steps(gamma))
    log_in = layout.steps(x.ADT)
    return Call(
        x, chunks, plan, layout,
        turns=torch.cat((F.pad(torch.cos(theta), pad, value=1.0), F.pad(torch.sin(theta), pad)), dim=-1),
        scale=scale,
        decay=decay,
        mixing=as_blocks(mixing, plan),
        carry_in=torch.exp(log_in).contiguous(),
        to_end=torch.exp(layout.steps(dA_cs_rev)),
        whole=torch.exp(log_in.gather(2, layout.ends.expand(-1, log_in.shape[1], 1))).squeeze(2).contiguous(),
    )  # fmt: skip


def compute_rows(call: Call, states: Tensor | None = None) -> Rows:
    """The family's forward before the gate, from given entering states where there are any."""
    x, chunks, plan = call.x, call.chunks, call.plan
    q, q_in, k = rotate(x, chunks, plan, call.turns, call.carry_in)
    v, v_out = values(x, chunks, plan, call.carry_out)
    product, own = scores(q, k, k, v_out, plan)
    last = None
    if states is None:
        states, last = scan(own, call.whole, chunks, plan)
    mixed = mix(product, call.mixing, plan)
    o = outputs(q_in, v, states, mixed, plan)
    return Rows(q, q_in, k, v, v_out, states, last, product, mixed, o)


def behind_the_scan(call: Call, rows: Rows, dout: Tensor) -> GateGradients:
    """bwd_fwd after the recomputation: gradients of the gate and the norm, and dO."""
    registry.count(ascend.NAME, "bwd_fwd")
    return gate_bwd(call.x, call.chunks, call.plan, dout.contiguous(), rows.o, call.carry_in)


def through_the_scan(call: Call, rows: Rows, behind: GateGradients) -> ScanGradients:
    """bwd_bwd from dO on."""
    registry.count(ascend.NAME, "bwd_bwd")
    x, chunks, plan, layout = call.x, call.chunks, call.plan, call.layout
    w, down = scores(behind.do, rows.v, rows.q_in, behind.do, plan)
    dstates, dwhole, _ = reverse_scan(down, call.whole, rows.states, chunks, plan)
    mixed_w, dmixing, _ = mix_bwd(rows.scores, w, call.mixing, plan)
    dq, dk, dv_inside, dv_carried = products(
        rows.q, rows.k, rows.v_out, behind.do, behind.do_in, rows.states, dstates, rows.mixed, mixed_w, plan
    )
    dv, dmimo_v, dD, dcarry_out = values_bwd(x, chunks, plan, dv_inside, dv_carried, behind.do, call.carry_out)
    dQ, dK, dq_bias, dk_bias, dtheta = rotate_bwd(x, chunks, plan, dq, dk, call.turns)
    W = as_square(dmixing, plan)
    carried = rows.q.float() @ rows.states.float()
    from_state = (behind.do.float() * carried).unflatten(2, (plan.parts, plan.RP, plan.CS))
    from_state = from_state.sum((3, 5)).flatten(2)
    every = dwhole.sum(-1)[..., None].expand_as(from_state)
    steps = layout.back_to_steps
    return ScanGradients(
        dK, dv, dmimo_v, dQ,
        dfactor=steps((call.decay * W).sum(-2) + call.to_end * dcarry_out),
        dgamma_diag=steps(W.diagonal(dim1=-2, dim2=-1)),
        dangles=layout.back_to_tokens(dtheta[..., : x.Angles.shape[-1]]),
        ddA=steps(every),
        dSSdA=(W * call.scale[..., None, :]).transpose(-1, -2),
        ddA_cs_rev=steps(call.scale * dcarry_out),
        ddA_cs=steps(from_state),
        dq_bias=dq_bias,
        dk_bias=dk_bias,
        dD=dD,
    )  # fmt: skip


def decay_gradient(call: Call, found: ScanGradients) -> Tensor:
    """The gradient of A dt [B, H, S] from those of its sums."""
    layout = call.layout
    log_in = call.carry_in * layout.steps(found.ddA_cs)
    log_out = call.to_end * layout.steps(found.ddA_cs_rev)
    pairs = call.decay * found.dSSdA.transpose(-1, -2)  # [i, j] decays from token j to token i
    later = running_sum(pairs.flip(-2), -2).flip(-2)  # [t, j]: the pairs with i >= t
    own = later.tril(-1).sum(-1) + running_sum(log_in.flip(-1), -1).flip(-1)
    own = own + F.pad(running_sum(log_out, -1)[..., :-1], (1, 0))
    return found.ddA + layout.back_to_steps(own)


def weight_gradients(call: Call, found: ScanGradients) -> tuple[Tensor, Tensor]:
    """The gradients of dt, without the share through the angles, and of trap [B, H, S]."""
    trap, dt = call.x.Trap.float(), call.x.DT.float()
    weight, rest = torch.sigmoid(trap), torch.sigmoid(-trap)
    dgamma = found.dfactor + found.dgamma_diag
    dbeta = F.pad(found.dfactor[..., :-1], (1, 0)).masked_fill(call.layout.starts, 0)
    return dgamma * weight + dbeta * rest, (dgamma - dbeta) * dt * weight * rest


def unpadded(states: Tensor, call: Call) -> Tensor:
    """[..., N2, PP] -> [..., N, P]."""
    *_, N, P = call.x.sizes
    half, NH = N // 2, call.plan.NH
    return torch.cat((states[..., :half, :P], states[..., NH : NH + half, :P]), dim=-2)


def padded(states: Tensor, call: Call) -> Tensor:
    """[..., N, P] -> [..., N2, PP] in the operand dtype."""
    *_, N, P = call.x.sizes
    out = states.new_zeros(*states.shape[:-2], call.plan.N2, call.plan.PP, dtype=call.plan.dtype)
    half, NH = N // 2, call.plan.NH
    out[..., :half, :P], out[..., NH : NH + half, :P] = states[..., :half, :], states[..., half:, :]
    return out
