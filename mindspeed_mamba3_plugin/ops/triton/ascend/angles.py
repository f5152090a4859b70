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
from .slices import can_cut, extract_slice

_PI = tl.constexpr(3.141592653589793)


@triton.jit
def _last(x, C: tl.constexpr, HB: tl.constexpr, AP: tl.constexpr, CUT: tl.constexpr):
    """The last token's [HB, AP] of a [C, HB, AP] tile."""
    if CUT:
        return tl.reshape(extract_slice(x, (C - 1, 0, 0), (1, HB, AP), (1, 1, 1)), (HB, AP))
    else:
        return tl.sum(tl.where(tl.arange(0, C)[:, None, None] == C - 1, x, 0.0), axis=0)


@triton.jit
def _turns_kernel(
    angles, dt, table, local, coarse, fine, tasks, blocks, H, S,
    C: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, HB: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, C)
    token = t[:, None, None]
    n = tl.arange(0, AP)[None, None, :]
    col = tl.arange(0, AP)[None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        chunk = tl.cast(i // blocks, tl.int64)
        h = (i % blocks) * HB + tl.arange(0, HB)
        head = h[None, :, None]
        start = tl.load(table + chunk * 4).to(tl.int64)
        reach = tl.load(table + chunk * 4 + 1)
        batch = tl.load(table + chunk * 4 + 3).to(tl.int64)
        step = tl.load(
            dt + (batch * H + h[:, None]) * S + start - batch * S + t[None, :],
            mask=(h[:, None] < H) & (t[None, :] < reach),
            other=0.0,
        ).to(tl.float32)
        known = (head < H) & (n < A)
        place = (start + token) * (H * A) + head * A + n
        angle = tl.load(angles + place, mask=known & (token < reach), other=0.0).to(tl.float32)
        turns = wrap(tanh(angle) * tl.trans(step)[:, :, None])
        # Multiples of 2^-12 add up exactly, and what they leave is too small to lose bits that count.
        rounded = tl.floor(turns * 4096.0 + 0.5) * (1.0 / 4096.0)
        rest = tl.cumsum(turns - rounded, axis=0)
        whole = tl.cumsum(rounded, axis=0)
        tl.store(local + ((chunk * H + head) * C + token) * AP + n, wrap(whole) + rest, mask=head < H)
        out = (chunk * H + h[:, None]) * A + col
        known = (h[:, None] < H) & (col < A)
        tl.store(coarse + out, _last(whole, C, HB, AP, CUT), mask=known)
        tl.store(fine + out, _last(rest, C, HB, AP, CUT), mask=known)


@triton.jit
def _turn_scan_kernel(coarse, fine, bounds, turns, final, tasks, width, W: tl.constexpr):
    blocks = tl.cdiv(width, W)
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        w = (i % blocks) * W + tl.arange(0, W)
        here = w < width
        sequence = tl.cast(i // blocks, tl.int64)
        turn = tl.zeros((W,), dtype=tl.float32)
        rest = tl.zeros((W,), dtype=tl.float32)
        for chunk in range(tl.load(bounds + sequence), tl.load(bounds + sequence + 1)):
            at = tl.cast(chunk, tl.int64) * width + w
            tl.store(turns + at, turn, mask=here)
            # Two-sum of the chunk's turns: what `turn` cannot hold stays in `rest`.
            more = wrap(tl.load(coarse + at, mask=here, other=0.0))
            more += tl.load(fine + at, mask=here, other=0.0) + rest
            total = turn + more
            part = total - turn
            rest = (turn - (total - part)) + (more - part)
            turn = wrap(total)
        tl.store(final + sequence * width + w, (turn - 2.0 * tl.floor(0.5 * turn)) * _PI, mask=here)


@triton.jit
def _sine(x):
    """sin(pi x) for x in [-1/2, 1/2], within 2e-7: the least largest error of a polynomial of its degree."""
    y = x * x
    p = 2.55006972633 + y * (-0.59824212638 + y * 0.07756038691)
    return x * (3.14159263690 + y * (-5.16770968480 + y * p))


@triton.jit
def _angles_kernel(
    turns, local, table, tasks, H,
    C: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, HB: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    token = tl.arange(0, C)[None, :, None]
    n = tl.arange(0, AP)[None, None, :]
    every = tl.arange(0, FILLED)[None, None, :]
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        task = tl.cast(i, tl.int64) * HB + tl.arange(0, HB)[:, None, None]
        known = (task < H) & (n < A)
        turn = tl.load(turns + task * A + n, mask=known, other=0.0)
        u = wrap(turn + tl.load(local + (task * C + token) * AP + n, mask=task < H, other=0.0))
        size = tl.abs(u)
        place = (task * C + token) * (2 * FILLED)
        tl.store(table + place + n, _sine(0.5 - size), mask=known)
        s = _sine(0.5 - tl.abs(size - 0.5))
        tl.store(table + place + FILLED + n, tl.where(u < 0, -s, s), mask=known)
        if A < FILLED:  # not rotated
            rest = (task < H) & (every >= A)
            tl.store(table + place + every, tl.full((HB, C, FILLED), 1.0, dtype=tl.float32), mask=rest)
            tl.store(table + place + FILLED + every, tl.zeros((HB, C, FILLED), dtype=tl.float32), mask=rest)


def angles(x: Inputs, chunks: Chunks, plan: Plan) -> tuple[Tensor, Tensor]:
    """Returns, in fp32, a table of plan.rotated(A) cosines and as many sines a token, [chunks, H, C, both], and the
    last angle of each sequence [sequences, H, A], in [0, 2 pi]."""
    H, S, A = x.V.shape[2], x.Q.shape[1], x.Angles.shape[3]
    filled = plan.rotated(A)
    table = torch.empty(chunks.count, H, plan.C, 2 * filled, dtype=torch.float32, device=x.V.device)
    final = torch.empty(chunks.sequences, H, A, dtype=torch.float32, device=x.V.device)
    coarse = torch.empty(chunks.count, H, A, dtype=torch.float32, device=x.V.device)
    fine, turns = torch.empty_like(coarse), chunks.new(coarse, torch.float32)
    AP = max(8, next_power_of_2(A))
    local = torch.empty(chunks.count, H, plan.C, AP, dtype=torch.float32, device=x.V.device)
    HB = plan.heads(H, plan.C * AP)
    blocks = -(-H // HB)
    tasks = chunks.count * blocks
    _turns_kernel[plan.vector_grid(tasks)](
        x.Angles, x.DT, chunks.table, local, coarse, fine, tasks, blocks, H, S,
        C=plan.C, A=A, AP=AP, HB=HB, CUT=can_cut(plan),
    )  # fmt: skip
    W = min(256, next_power_of_2(H * A))
    lines = chunks.sequences * -(-H * A // W)
    _turn_scan_kernel[plan.vector_grid(lines)](coarse, fine, chunks.bounds, turns, final, lines, H * A, W=W)
    heads = chunks.count * H
    HB = plan.heads(heads, plan.C * AP)
    tasks = -(-heads // HB)
    _angles_kernel[plan.vector_grid(tasks)](
        turns, local, table, tasks, heads, C=plan.C, A=A, AP=AP, HB=HB, FILLED=filled
    )
    return table, final


@triton.jit
def _angles_bwd_kernel(
    dtheta, dturn, dgamma, ds, angles, dt, trap, table, dangles, ddt, dtrap, tasks, blocks, H, S,
    C: tl.constexpr, A: tl.constexpr, AP: tl.constexpr, NH: tl.constexpr, HB: tl.constexpr, FILLED: tl.constexpr,
):  # fmt: skip
    t = tl.arange(0, C)
    token = t[:, None, None]
    n = tl.arange(0, AP)
    for i in range(tl.program_id(0), tasks, tl.num_programs(0)):
        chunk = tl.cast(i // blocks, tl.int64)
        h = (i % blocks) * HB + tl.arange(0, HB)
        start = tl.load(table + chunk * 4).to(tl.int64)
        reach = tl.load(table + chunk * 4 + 1)
        done = tl.load(table + chunk * 4 + 2)
        batch = tl.load(table + chunk * 4 + 3).to(tl.int64)
        steps = (batch * H + h[:, None]) * S + start - batch * S + t[None, :]
        here = (h[:, None] < H) & (t[None, :] < reach)
        step = tl.load(dt + steps, mask=here, other=0.0).to(tl.float32)
        head = h[None, :, None]
        known = (head < H) & (n[None, None, :] < A)
        place = (start + token) * (H * A) + head * A + n[None, None, :]
        y = tanh(tl.load(angles + place, mask=known & (token < reach), other=0.0).to(tl.float32))
        row = ((chunk * H + h[:, None, None]) * C + t[None, :, None]) * FILLED + n[None, None, :]
        seen = (h[:, None, None] < H) & (n[None, None, :] < FILLED) & (t[None, :, None] < reach)
        own = tl.permute(tl.load(dtheta + row, mask=seen, other=0.0), (1, 0, 2))
        # What a turn of everything after this chunk changes; the chunk after it is the next row of the table.
        more = tl.where(reach > C, A, 0)
        after = ((chunk + 1) * H + h[:, None]) * NH + n[None, :]
        later = tl.load(dturn + after, mask=(h[:, None] < H) & (n[None, :] < more), other=0.0)
        dhalf = (tl.cumsum(own, axis=0, reverse=True) + later[None, :, :]) * _PI
        through = dhalf * tl.trans(step)[:, :, None] * (1.0 - y * y)
        tl.store(dangles + place, narrow(through, dangles.dtype.element_ty), mask=known & (token < reach))

        # beta_t = dt_t sigmoid(-Trap_t) belongs to the scale of the token before: s_{t-1} = gamma_{t-1} + beta_t.
        dbeta = tl.load(ds + steps - 1, mask=here & (t[None, :] >= 1 - done), other=0.0)
        dgam = tl.load(dgamma + steps, mask=here, other=0.0)
        z = tl.load(trap + steps, mask=here, other=0.0).to(tl.float32)
        weight = sigmoid(z)
        rest = sigmoid(-z)
        step_grad = dgam * weight + dbeta * rest + tl.trans(tl.sum(dhalf * y, axis=2))
        tl.store(ddt + steps, narrow(step_grad, ddt.dtype.element_ty), mask=here)
        tl.store(dtrap + steps, narrow((dgam - dbeta) * step * weight * rest, dtrap.dtype.element_ty), mask=here)


def angles_bwd(
    x: Inputs, chunks: Chunks, plan: Plan, dtheta: Tensor, dturn: Tensor, dgamma: Tensor, ds: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradients of the angles, token by token (dtheta [chunks, H, C, plan.rotated(A)]) and for all that
    crosses a chunk's start (dturn [chunks, H, NH]), and those of gamma and s [B, H, S], to dAngles, dDT and dTrap."""
    H, S, A = x.V.shape[2], x.Q.shape[1], x.Angles.shape[3]
    dangles, ddt, dtrap = torch.empty_like(x.Angles), torch.empty_like(x.DT), torch.empty_like(x.Trap)
    AP = next_power_of_2(A) if dtheta.shape[3] == A else plan.NH  # a table of all columns is loaded whole
    HB = plan.heads(H, plan.C * max(8, AP))
    blocks = -(-H // HB)
    tasks = chunks.count * blocks
    _angles_bwd_kernel[plan.vector_grid(tasks)](
        dtheta, dturn, dgamma, ds, x.Angles, x.DT, x.Trap, chunks.table, dangles, ddt, dtrap, tasks, blocks, H, S,
        C=plan.C, A=A, AP=AP, NH=plan.NH, HB=HB, FILLED=dtheta.shape[3],
    )  # fmt: skip
    return dangles, ddt, dtrap
