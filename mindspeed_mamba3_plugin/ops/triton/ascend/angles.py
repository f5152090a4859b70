"""Stage `angles`: the running rotation angle of each head, and its backward.

Angles are kept in half turns: u_t = u_{t-1} + tanh(Angles_t) dt_t, theta = pi u. Whole turns are removed exactly
in fp32 at every step, and the sum over chunks is compensated, so the error does not grow with the sequence.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import narrow, sigmoid, tanh, wrap
from ..chunks import Chunks
from ..plan import Plan, next_power_of_2

_PI = tl.constexpr(3.141592653589793)


@triton.jit
def _angles_kernel(
    angles, dt, table, bounds, cos, sin, final, tasks, H, S,
    C: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, NH: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, C)
    n = tl.arange(0, AP)
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64)
        h = task % H
        sequence = task // H
        turn = tl.zeros((1, AP), dtype=tl.float32)
        rest = tl.zeros((1, AP), dtype=tl.float32)
        for chunk in range(tl.load(bounds + sequence), tl.load(bounds + sequence + 1)):
            start = tl.load(table + chunk * 4).to(tl.int64)
            batch = tl.load(table + chunk * 4 + 3).to(tl.int64)
            here = t < tl.load(table + chunk * 4 + 1)
            step = tl.load(dt + (batch * H + h) * S + start - batch * S + t, mask=here, other=0.0).to(tl.float32)
            angle = tl.load(
                angles + (start + t[:, None]) * (H * A) + h * A + n[None, :],
                mask=here[:, None] & (n[None, :] < A),
                other=0.0,
            ).to(tl.float32)
            turns = wrap(tanh(angle) * step[:, None])
            # Multiples of 2^-12 add up exactly, and what they leave is too small to lose bits that count.
            coarse = tl.floor(turns * 4096.0 + 0.5) * (1.0 / 4096.0)
            fine = tl.cumsum(turns - coarse, axis=0)
            coarse = tl.cumsum(coarse, axis=0)
            theta = wrap(turn + (wrap(coarse) + fine)) * _PI
            out = ((chunk * H + h) * C + t[:, None]) * NH + n[None, :]
            tl.store(cos + out, tl.cos(theta), mask=n[None, :] < A)
            tl.store(sin + out, tl.sin(theta), mask=n[None, :] < A)
            # Two-sum of the chunk's turns: what `turn` cannot hold stays in `rest`.
            at_end = (t == C - 1)[:, None]
            more = wrap(tl.sum(tl.where(at_end, coarse, 0.0), axis=0)[None, :])
            more += tl.sum(tl.where(at_end, fine, 0.0), axis=0)[None, :] + rest
            total = turn + more
            part = total - turn
            rest = (turn - (total - part)) + (more - part)
            turn = wrap(total)
        tl.store(final + task * A + n[None, :], (turn - 2.0 * tl.floor(0.5 * turn)) * _PI, mask=n[None, :] < A)


def angles(x: Inputs, chunks: Chunks, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
    """Returns fp32 cos and sin [chunks, H, C, NH] (1 and 0 where nothing is rotated) and the last angle of each
    sequence [sequences, H, A], in [0, 2 pi]."""
    H, S, A = x.V.shape[2], x.Q.shape[1], x.Angles.shape[3]
    cos = torch.ones(chunks.count, H, plan.C, plan.NH, dtype=torch.float32, device=x.V.device)
    sin = torch.zeros_like(cos)
    final = torch.empty(chunks.sequences, H, A, dtype=torch.float32, device=x.V.device)
    tasks = chunks.sequences * H
    _angles_kernel[plan.vector_grid(tasks)](
        x.Angles, x.DT, chunks.table, chunks.bounds, cos, sin, final, tasks, H, S,
        C=plan.C, A=A, AP=next_power_of_2(A), NH=plan.NH,
    )  # fmt: skip
    return cos, sin, final


@triton.jit
def _angles_bwd_kernel(
    dtheta, dturn, dgamma, ds, angles, dt, trap, table, dangles, ddt, dtrap, tasks, H, S,
    C: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, NH: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, C)
    n = tl.arange(0, AP)
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64)
        h = task % H
        chunk = task // H
        start = tl.load(table + chunk * 4).to(tl.int64)
        reach = tl.load(table + chunk * 4 + 1)
        done = tl.load(table + chunk * 4 + 2)
        batch = tl.load(table + chunk * 4 + 3).to(tl.int64)
        here = t < reach
        seen = here[:, None] & (n[None, :] < A)
        steps = (batch * H + h) * S + start - batch * S + t
        step = tl.load(dt + steps, mask=here, other=0.0).to(tl.float32)
        place = (start + t[:, None]) * (H * A) + h * A + n[None, :]
        y = tanh(tl.load(angles + place, mask=seen, other=0.0).to(tl.float32))
        row = task * C + t
        own = tl.load(dtheta + row[:, None] * NH + n[None, :], mask=seen, other=0.0)
        # What a turn of everything after this chunk changes; the chunk after it is the next row of the table.
        more = tl.where(reach > C, A, 0)
        later = tl.load(dturn + (task + H) * NH + n, mask=n < more, other=0.0)
        dhalf = (tl.cumsum(own, axis=0, reverse=True) + later[None, :]) * _PI
        tl.store(dangles + place, narrow(dhalf * step[:, None] * (1.0 - y * y), dangles.dtype.element_ty), mask=seen)

        # beta_t = dt_t sigmoid(-Trap_t) belongs to the scale of the token before: s_{t-1} = gamma_{t-1} + beta_t.
        dbeta = tl.load(ds + steps - 1, mask=here & (t >= 1 - done), other=0.0)
        dgam = tl.load(dgamma + steps, mask=here, other=0.0)
        z = tl.load(trap + steps, mask=here, other=0.0).to(tl.float32)
        weight = sigmoid(z)
        rest = sigmoid(-z)
        step_grad = dgam * weight + dbeta * rest + tl.sum(dhalf * y, axis=1)
        tl.store(ddt + steps, narrow(step_grad, ddt.dtype.element_ty), mask=here)
        tl.store(dtrap + steps, narrow((dgam - dbeta) * step * weight * rest, dtrap.dtype.element_ty), mask=here)


def angles_bwd(
    x: Inputs, chunks: Chunks, plan: Plan, dtheta: Tensor, dturn: Tensor, dgamma: Tensor, ds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradients of the angles, token by token (dtheta [chunks, H, C, NH]) and for all that crosses a
    chunk's start (dturn [chunks, H, NH]), and those of gamma and s [B, H, S], to dAngles, dDT and dTrap."""
    H, S, A = x.V.shape[2], x.Q.shape[1], x.Angles.shape[3]
    dangles, ddt, dtrap = torch.empty_like(x.Angles), torch.empty_like(x.DT), torch.empty_like(x.Trap)
    tasks = chunks.count * H
    _angles_bwd_kernel[plan.vector_grid(tasks)](
        dtheta, dturn, dgamma, ds, x.Angles, x.DT, x.Trap, chunks.table, dangles, ddt, dtrap, tasks, H, S,
        C=plan.C, A=A, AP=next_power_of_2(A), NH=plan.NH,
    )  # fmt: skip
    return dangles, ddt, dtrap
