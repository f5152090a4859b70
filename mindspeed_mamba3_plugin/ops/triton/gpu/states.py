"""States at the bounds of chunks, and their gradients: every chunk's own contribution, then a scan over the chunks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...types import Inputs
from ..blocks import dot, narrow
from ..chunks import Chunks
from ..plan import GpuPlan
from .angles import CHI, EXIT, SHARE, Turns
from .tiles import (
    core_gradient, left, load_by_row, load_by_token, load_core_parts, load_halves, load_turn, pin,
    pin_halves, pin_parts, power2, right, rotated,
)  # fmt: skip  # isort: skip


@triton.jit(do_not_specialize=["T"])
def _own_kernel(
    X, Bias, V, Phi, dO, Psi, Z, Zeta, Stored, Cos, Sin, Scalars, Own, table, T, REVERSE: tl.constexpr,
    H: tl.constexpr, G: tl.constexpr, R: tl.constexpr, N: tl.constexpr, P: tl.constexpr, A: tl.constexpr,
    C: tl.constexpr, J: tl.constexpr, RP: tl.constexpr, NH: tl.constexpr, PP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What a chunk adds to the state, sum of exp(.) s v k^T, or with REVERSE to its gradient, sum of exp(.) dO q^T."""
    chunk, h = tl.program_id(0) // H, tl.program_id(0) % H
    start = tl.load(table + 4 * chunk).to(tl.int64)
    reach = tl.load(table + 4 * chunk + 1)
    c, r = tl.arange(0, C)[:, None, None], tl.arange(0, RP)[None, :, None]
    n, p = tl.arange(0, NH)[None, None, :], tl.arange(0, PP)[None, None, :]
    head = h.to(tl.int64) * T
    dtype: tl.constexpr = Own.dtype.element_ty
    row = tl.cast(T, tl.int64) * H
    lo = tl.zeros((PP, NH), tl.float32)
    hi = tl.zeros((PP, NH), tl.float32)
    blocks = J if J == 1 else tl.minimum(J, tl.cdiv(reach, C))
    for step in tl.range(0, blocks, num_stages=STAGES):
        j = blocks - 1 - step if REVERSE else step
        inside = j * C + c < reach
        token = start + j * C + c
        at = Scalars + head + token
        cos, sin = load_turn(Cos, Sin, head + token, n, inside, A)
        halves = load_halves(X, Bias, token, r, n, inside & (r < R), h, H, G, R, N)
        if REVERSE:
            parts = load_core_parts(dO, Psi, Z, Zeta, Stored, token, r, p, inside, h, H, R, P)
            weight = power2(tl.load(at + CHI * row, mask=inside, other=0.0))
            y = core_gradient(pin_parts(parts))
        else:
            v = load_by_token(V, token, p, inside, h, H, P)
            phi = load_by_row(Phi, r, p, inside & (r < R), h, R, P)
            weight = tl.load(at + SHARE * row, mask=inside, other=0.0)
            weight *= tl.load(at + EXIT * row, mask=inside, other=0.0)
            y = pin(v).to(tl.float32) * pin(phi).to(tl.float32)
        x_lo, x_hi = rotated(pin_halves(halves), pin(cos), pin(sin))
        x_lo = right(x_lo, dtype)
        x_hi = right(x_hi, dtype)
        y = tl.trans(left(y * weight, dtype))
        if J > 1:
            end = start + tl.minimum((j + 1) * C, reach) - 1
            kept = tl.exp2(tl.load(Scalars + head + end + CHI * row))
            lo *= kept
            hi *= kept
        lo = dot(y, x_lo, lo)
        hi = dot(y, x_hi, hi)
    to = Own + (chunk.to(tl.int64) * H + h) * (2 * PP * NH) + tl.arange(0, PP)[:, None] + tl.arange(0, NH)[None, :] * PP
    tl.store(to, narrow(lo, dtype))
    tl.store(to + PP * NH, narrow(hi, dtype))


@triton.jit
def _scan_kernel(
    Own, Decay, Last, Entering, Through, bounds, REVERSE: tl.constexpr, H: tl.constexpr, NH: tl.constexpr,
    PP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Replace every chunk's own contribution by the state that enters it (with REVERSE: by the gradient of the state
    that leaves it). Through [2, NH]: what crosses the start of each chunk, products of the state there and its own
    gradient summed over P, and the gradient of turning everything after it."""
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
        lo = lo * decay + own_lo
        hi = hi * decay + own_hi
        if REVERSE:
            at = Entering + task * (2 * NH * PP) + e
            s_lo = tl.load(at).to(tl.float32)
            s_hi = tl.load(at + NH * PP).to(tl.float32)
            to = Through + task * (2 * NH) + n
            tl.store(to, tl.sum(s_lo * lo + s_hi * hi, axis=1))
            tl.store(to + NH, tl.sum(s_hi * lo - s_lo * hi, axis=1))
    if Last is not None:
        to = Last + (sequence * H + h) * (2 * NH * PP) + e
        tl.store(to, lo)
        tl.store(to + NH * PP, hi)


def own(x: Inputs, plan: GpuPlan, chunks: Chunks, turns: Turns, out_gradient: Tensor | None, stored: Tensor | None):
    """[chunks, H, 2, NH, PP]: what each chunk adds to the state, or with `out_gradient` to the state's gradient.

    stored: gradient of O [B, S, H, R, P] where a norm makes it depend on O.
    """
    B, S, H, G, R, N, P = x.sizes
    result = torch.empty(chunks.count, H, 2, plan.NH, plan.PP, dtype=x.dtype, device=x.Q.device)
    reverse = out_gradient is not None
    _own_kernel[(chunks.count * H,)](
        x.Q if reverse else x.K, x.Q_bias if reverse else x.K_bias, x.V, x.MIMO_V, out_gradient, x.MIMO_Out, x.Z,
        x.MIMO_Z, stored, turns.cos, turns.sin, turns.scalars, result, chunks.table, B * S, reverse,
        H, G, R, N, P, N // x.rotary_dim_divisor, plan.C, plan.J, plan.RP, plan.NH, plan.PP, plan.stages,
        num_warps=plan.warps,
    )  # fmt: skip
    return result


def scan_forward(own: Tensor, turns: Turns, chunks: Chunks, last: bool) -> Tensor | None:
    """Turn `own` into entering states, in place. With `last` returns fp32 [sequences, H, 2, NH, PP] after the end."""
    end = None
    if last:
        end = torch.empty(chunks.sequences, *own.shape[1:], dtype=torch.float32, device=own.device)
    _launch_scan(own, turns, end, None, None, chunks, False)
    return end


def scan_backward(own: Tensor, turns: Turns, chunks: Chunks, entering: Tensor) -> Tensor:
    """Turn `own` into gradients of the leaving states, in place. Returns fp32 [chunks, H, 2, NH]: what crosses the
    start of each chunk, as the gradient of scaling all of it (summed over NH) and of turning it."""
    through = torch.empty(*own.shape[:4], dtype=torch.float32, device=own.device)
    _launch_scan(own, turns, None, entering, through, chunks, True)
    return through


def _launch_scan(own, turns, end, entering, through, chunks, reverse) -> None:
    _, H, _, NH, PP = own.shape
    rows = max(1, min(NH, 1024 // PP))
    _scan_kernel[(chunks.sequences * H * (NH // rows),)](
        own, turns.decay, end, entering, through, chunks.bounds, reverse, H, NH, PP, rows, num_warps=4
    )
