"""States at the bounds of chunks, and their gradients: each chunk's own contribution, then a scan over the chunks;
or a walk, where that is faster."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import narrow
from ..chunks import Chunks
from ..plan import GpuPlan
from . import walk
from .angles import CHI, EXIT, SHARE, Turns
from .loads import (
    core_gradient,
    load_core_parts,
    load_halves,
    load_turn,
    load_values,
)  # fmt: skip
from .tiles import (
    columns,
    left_halves,
    load,
    multiply,
    pin_all,
    place,
    power2,
    right,
    rotated,
    transposed,
)  # fmt: skip


@triton.jit(do_not_specialize=["T"])
def _own_kernel(
    X, Bias, V, Phi, dO, Psi, Z, Zeta, Stored, Cos, Sin, Scalars, Own, table, T, GRADIENT: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr, A: tl.constexpr,
    C: tl.constexpr, RP: tl.constexpr, NT: tl.constexpr, NW: tl.constexpr, PT: tl.constexpr, PW: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to the state, sum of exp(.) s v k^T, or to its gradient, sum of exp(.) dO q^T."""
    chunk, h, _, _, head, row, token, r, inside = place(table, T, H, C, RP)
    dtype: tl.constexpr = tl.bfloat16 if SPLIT else Own.dtype.element_ty
    turns, halves, parts = (), (), ()
    for i in tl.static_range(NT):
        n = columns(i, NW)
        turns = turns + (load_turn(Cos, Sin, head + token, n, inside, A),)
        halves = halves + (load_halves(X, Bias, token, r, n, inside & (r < R), h, H, G, R, N),)
    for u in tl.static_range(PT):
        p = columns(u, PW)
        if GRADIENT:
            parts = parts + (load_core_parts(dO, Psi, Z, Zeta, Stored, token, r, p, inside, h, H, R, P),)
        else:
            parts = parts + (load_values(V, Phi, token, r, p, inside, h, H, R, P),)
    at = Scalars + head
    if GRADIENT:
        weight = power2(load(at + CHI * row, token, inside))
    else:
        weight = load(at + SHARE * row, token, inside) * load(at + EXIT * row, token, inside)
    ys = ()
    for u in tl.static_range(PT):
        part = pin_all(parts[u])
        if GRADIENT:
            y = core_gradient(part)
        else:
            y = part[0].to(tl.float32) * part[1].to(tl.float32)
        ys = ys + (right(y * weight, dtype, SPLIT),)
    NH: tl.constexpr = NT * NW
    PP: tl.constexpr = PT * PW
    n = tl.arange(0, 2 * NW)
    for i in tl.static_range(NT):
        both = rotated(pin_all(halves[i]), pin_all(turns[i]))
        both = transposed(left_halves(both, dtype, SPLIT))
        for u in tl.static_range(PT):
            to = Own + (chunk.to(tl.int64) * H + h) * (2 * NH * PP)
            to += (u * PW + tl.arange(0, PW))[None, :] + (n // NW * NH + i * NW + n % NW)[:, None] * PP
            tl.store(to, narrow(multiply(both, ys[u]), Own.dtype.element_ty))


@triton.jit
def _scan_kernel(
    Own, Decay, Last, Entering, Through, bounds, REVERSE: tl.constexpr, H: tl.constexpr, NH: tl.constexpr,
    PP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Replace every chunk's own contribution by the state that enters it (with REVERSE: by the gradient of the state
    that leaves it). Through [2, NH], summed over P: products of the entering state and the part of its gradient that
    comes from after the chunk; and the gradient of turning everything from the start of the chunk on."""
    pid = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = NH // ROWS
    part, h, sequence = pid % parts, pid // parts % H, pid // (parts * H)
    first, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    n = part * ROWS + tl.arange(0, ROWS)
    e = n[:, None] * PP + tl.arange(0, PP)[None, :]
    lo = tl.zeros((ROWS, PP), tl.float32)
    hi = tl.zeros((ROWS, PP), tl.float32)
    for step in tl.range(0, end - first, num_stages=4):
        c = end - 1 - step if REVERSE else first + step
        task = c.to(tl.int64) * H + h
        at = Own + task * (2 * NH * PP) + e
        own_lo = tl.load(at).to(tl.float32)
        own_hi = tl.load(at + NH * PP).to(tl.float32)
        decay = tl.load(Decay + task)
        tl.store(at, narrow(lo, Own.dtype.element_ty))
        tl.store(at + NH * PP, narrow(hi, Own.dtype.element_ty))
        lo *= decay
        hi *= decay
        if REVERSE:
            at = Entering + task * (2 * NH * PP) + e
            s_lo = tl.load(at).to(tl.float32)
            s_hi = tl.load(at + NH * PP).to(tl.float32)
            to = Through + task * (2 * NH) + n
            tl.store(to, tl.sum(s_lo * lo + s_hi * hi, axis=1))
        lo += own_lo
        hi += own_hi
        if REVERSE:
            tl.store(to + NH, tl.sum(s_hi * lo - s_lo * hi, axis=1))
    if Last is not None:
        to = Last + (sequence * H + h) * (2 * NH * PP) + e
        tl.store(to, lo)
        tl.store(to + NH * PP, hi)


def entering(
    x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, last: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """States that enter the chunks, [chunks, H, 2, NH, PP]; with `last` also fp32 [sequences, H, 2, NH, PP], at the
    end of each sequence."""
    if walk.fits(x, plan, chunks):
        return walk.entering(x, plan, chunks, turns, last)
    own, end = _own(x, plan, chunks, turns, None, None), None
    if last:
        end = torch.empty(chunks.sequences, *own.shape[1:], dtype=torch.float32, device=own.device)
    _scan(own, turns, end, None, None, chunks, False)
    return own, end


def leaving(
    x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, out_gradient: Tensor, stored: Tensor | None,
    entering: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the states that leave the chunks, [chunks, H, 2, NH, PP]; and as summands fp32
    [chunks, H, summands, 2, NH] the gradient of scaling what passes over a chunk (its sum over NH), and that of
    turning what reaches the chunk or passes over it.

    stored: gradient of O [B, S, H, R, P] where a norm makes it depend on O.
    """
    if stored is None and walk.fits(x, plan, chunks):
        return walk.leaving(x, plan, chunks, turns, out_gradient, entering)
    own = _own(x, plan, chunks, turns, out_gradient, stored)
    through = torch.empty(*own.shape[:2], 1, 2, plan.NH, dtype=torch.float32, device=own.device)
    _scan(own, turns, None, entering, through, chunks, True)
    return own, through


def _own(x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, out_gradient: Tensor | None, stored: Tensor | None):
    """What each chunk adds to the state, or with `out_gradient` to the state's gradient."""
    B, S, H, G, R, N, P = x.sizes
    result = torch.empty(chunks.count, H, 2, plan.NH, plan.PP, dtype=plan.state_dtype(x.dtype), device=x.Q.device)
    gradient = out_gradient is not None
    if chunks.count:
        _own_kernel[(chunks.count * H,)](
            x.Q if gradient else x.K, x.Q_bias if gradient else x.K_bias, x.V, x.MIMO_V, out_gradient, x.MIMO_Out,
            x.Z, x.MIMO_Z, stored, turns.cos, turns.sin, turns.scalars, result, chunks.table, B * S, gradient,
            H, G, R, N, P, N // x.rotary_dim_divisor, **plan.tiles, **plan.own,
        )  # fmt: skip
    return result


def _scan(own, turns, end, entering, through, chunks, reverse) -> None:
    _, H, _, NH, PP = own.shape
    rows = max(1, min(NH, 1024 // PP))
    _scan_kernel[(chunks.sequences * H * (NH // rows),)](
        own, turns.decay, end, entering, through, chunks.bounds, reverse, H, NH, PP, rows, num_warps=4
    )
