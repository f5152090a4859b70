"""The names, argument order, buffers and results of state-spaces/mamba's MIMO kernels (mamba_ssm/ops/tilelang/mamba3
and mamba_ssm/ops/triton/mamba3/mamba3_mimo_utils.py, commit e9594ce), computed by the plain Triton family.

Code written for those kernels runs on these functions unchanged. As there, `angles` are the accumulated rotation
angles, `dA_cs`, `dA_cs_rev` and `segsum` come from `compute_dacs_segsum_triton` (or its packed form) with the same
chunk size, and the number of threads and pipeline stages may be given; here they have no effect.

`mamba3_mimo` is the public operator, which takes angles and decays per token; prefer it.

All functions raise ValueError or TypeError for arguments outside the contract, naming the argument.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .api import mamba3_mimo
from .call import surroundings
from .sums import running_sum
from .triton.ascend import last_keys
from .triton.ascend.gate import gate
from .upstream_stages import (
    Call,
    Rows,
    behind_the_scan,
    compute_rows,
    decay_gradient,
    padded,
    prepare,
    through_the_scan,
    unpadded,
    weight_gradients,
)

__all__ = [
    "compute_dacs_segsum_triton",
    "compute_dacs_segsum_triton_varlen",
    "mamba3_mimo",
    "mamba_mimo_bwd_bwd",
    "mamba_mimo_bwd_combined",
    "mamba_mimo_bwd_combined_varlen",
    "mamba_mimo_bwd_fwd",
    "mamba_mimo_forward",
    "mamba_mimo_forward_varlen",
]


def mamba_mimo_forward(
    q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, D, mimo_z, angles, dA_cs, dA_cs_rev, dt, trap, segsum,
    chunk_size, rotary_dim_divisor, dtype, return_state=False, fuse_pregate_headwise_rms_norm=False,
    outproj_norm_weight=None, outproj_norm_eps=1e-5, threads=128, num_stages=0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Returns o ([B, S, H, P], or [B, S, R, H, P] without mimo_o) and, with return_state, the last state
    [B, H, N, P] fp32 and the rotated k of the last token [B, R, H, N]."""
    return mamba_mimo_forward_varlen(
        q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, D, mimo_z, angles, dA_cs, dA_cs_rev, dt, trap, segsum,
        chunk_size, rotary_dim_divisor, dtype, None, return_state, fuse_pregate_headwise_rms_norm,
        outproj_norm_weight, outproj_norm_eps,
    )  # fmt: skip


def mamba_mimo_forward_varlen(
    q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, D, mimo_z, angles, dA_cs, dA_cs_rev, dt, trap, segsum,
    chunk_size, rotary_dim_divisor, dtype, cu_seqlens=None, return_state=False,
    fuse_pregate_headwise_rms_norm=False, outproj_norm_weight=None, outproj_norm_eps=1e-5, threads=128, num_stages=0,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """`mamba_mimo_forward` of packed sequences; the state has a row per sequence."""
    with surroundings(q.device):
        call = prepare(
            q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, D, mimo_z, angles, dA_cs, dA_cs_rev, dt, trap, segsum,
            chunk_size, rotary_dim_divisor, dtype, cu_seqlens=cu_seqlens, norm=fuse_pregate_headwise_rms_norm,
            norm_weight=outproj_norm_weight, norm_eps=outproj_norm_eps,
        )  # fmt: skip
        rows = compute_rows(call)
        o = gate(call.x, call.chunks, call.plan, rows.o)
        return (o, *_last(call, rows)) if return_state else (o, None, None)


def mamba_mimo_bwd_combined(
    dout, q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, mimo_z, angles, dA_cs, dA_cs_rev, dt, trap, D, segsum,
    chunk_size, rotary_dim_divisor, dtype, bf_threads=128, bf_num_stages=0, bb_threads=256, bb_num_stages=0,
    states_dtype=torch.bfloat16, fuse_pregate_headwise_rms_norm=False, outproj_norm_weight=None,
    outproj_norm_eps=1e-5,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Returns dq, dk, dv, dADT, ddt, dtrap, dq_bias, dk_bias, dmimo_v, dmimo_z, dmimo_o, dangles, dD, dz and
    dout_norm_weight [H, P]; None where the argument was absent. dangles is the gradient of the accumulated angles,
    and ddt has no share through them. `states_dtype` has no effect: states are kept in `dtype`."""
    return mamba_mimo_bwd_combined_varlen(
        dout, q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, mimo_z, angles, dA_cs, dA_cs_rev, dt, trap, D, segsum,
        chunk_size, rotary_dim_divisor, dtype, None,
        fuse_pregate_headwise_rms_norm=fuse_pregate_headwise_rms_norm, outproj_norm_weight=outproj_norm_weight,
        outproj_norm_eps=outproj_norm_eps,
    )  # fmt: skip


def mamba_mimo_bwd_combined_varlen(
    dout, q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, mimo_z, angles, dA_cs, dA_cs_rev, dt, trap, D, segsum,
    chunk_size, rotary_dim_divisor, dtype, cu_seqlens=None, bf_threads=128, bf_num_stages=0, bb_threads=256,
    bb_num_stages=0, states_dtype=None, fuse_pregate_headwise_rms_norm=False, outproj_norm_weight=None,
    outproj_norm_eps=1e-5,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """`mamba_mimo_bwd_combined` of packed sequences."""
    with surroundings(q.device):
        call = prepare(
            q, k, v, q_bias, k_bias, mimo_v, mimo_o, z, D, mimo_z, angles, dA_cs, dA_cs_rev, dt, trap, segsum,
            chunk_size, rotary_dim_divisor, dtype, cu_seqlens=cu_seqlens, norm=fuse_pregate_headwise_rms_norm,
            norm_weight=outproj_norm_weight, norm_eps=outproj_norm_eps,
        )  # fmt: skip
        rows = compute_rows(call)
        behind = behind_the_scan(call, rows, _like_output(call, dout))
        found = through_the_scan(call, rows, behind)
        ddt, dtrap = weight_gradients(call, found)
        return (
            found.dq, found.dk, found.dv, decay_gradient(call, found), ddt.to(dt.dtype), dtrap.to(trap.dtype),
            found.dq_bias, found.dk_bias, found.dmimo_v, behind.dmimo_z, behind.dmimo_out,
            found.dangles, found.dD, behind.dz, behind.dnorm_weight,
        )  # fmt: skip


def mamba_mimo_bwd_fwd(
    B, S, H, G, N, P, R, hasZ, hasD, reduceO, fuse_pregate_headwise_rms_norm=False, chunk_size=16,
    rotary_dim_divisor=4, dtype="float16", outproj_norm_eps=1e-5, threads=128, num_stages=0,
    states_dtype=torch.bfloat16,
) -> Callable[..., None]:  # fmt: skip
    """The first half of the backward as a function that fills the caller's buffers: dmimo_o, dmimo_z and
    dout_norm_weight [B, H, R, P] (the caller sums them; the last has its sum over ranks in rank 0), dout_pre_rms
    [B, H, S R, P] (dO, with the norm), the entering states [B, H, chunks, N, P], dz, and qk_dot [B, H, S, R, R]."""

    def kernel(
        dout, q, k, v, q_bias, k_bias, mimo_v, mimo_o, out_norm_weight, dmimo_o, dout_norm_weight, dout_pre_rms,
        states, z, mimo_z, dz, dmimo_z, angles, dA_cs, dA_cs_rev, dt, trap, D, qk_dot, segsum,
    ) -> None:  # fmt: skip
        _expect(q, v, (B, S, H, G, R, N, P))
        for b in range(B):
            one = slice(b, b + 1)
            with surroundings(q.device):
                call = prepare(
                    q[one], k[one], v[one], q_bias, k_bias, mimo_v, mimo_o if reduceO else None,
                    z[one] if hasZ else None, D if hasD else None, mimo_z, angles[one], dA_cs[one], dA_cs_rev[one],
                    dt[one], trap[one], segsum[one], chunk_size, rotary_dim_divisor, dtype,
                    norm=fuse_pregate_headwise_rms_norm, norm_weight=out_norm_weight, norm_eps=outproj_norm_eps,
                )  # fmt: skip
                rows = compute_rows(call)
                behind = behind_the_scan(call, rows, _like_output(call, dout[one]))
                call.layout.back_to_slots(unpadded(rows.states, call), states[one])
                ranks = (call.plan.by_rank(tensor)[:, :, :R] for tensor in (rows.q, rows.k))
                dots = torch.einsum("chrtn,chstn->chtrs", *(tensor.float() for tensor in ranks))
                qk_dot[one] = call.layout.back_to_tokens(dots).transpose(1, 2)
                if reduceO:
                    dmimo_o[b] = behind.dmimo_out
                if hasZ:
                    dmimo_z[b], dz[one] = behind.dmimo_z, behind.dz
                if fuse_pregate_headwise_rms_norm:
                    dout_norm_weight[b] = 0
                    dout_norm_weight[b, :, 0] = behind.dnorm_weight
                    do = call.plan.by_rank(behind.do)[:, :, :R, :, :P].transpose(2, 3)
                    dout_pre_rms[one] = call.layout.back_to_tokens(do).transpose(1, 2).flatten(2, 3)

    return kernel


def mamba_mimo_bwd_bwd(
    B, S, H, G, N, P, R, hasZ, hasD, reduceO, packed_dout=False, chunk_size=16, rotary_dim_divisor=4,
    dtype="float16", threads=256, num_stages=0, states_dtype=torch.bfloat16,
) -> Callable[..., None]:  # fmt: skip
    """The second half of the backward as a function that fills the caller's buffers: dk and dq [B, S R, H, N] (per
    head: the caller sums groups and biases), dv, dmimo_v [B, H, R, P], dangles, dD [B, H], dfactor, dgamma_diag, ddA,
    ddA_cs_rev and ddA_cs [B, H, S], and dSSdA [B, H, chunks, key, query].

    It starts from `states` of the first half. With packed_dout, `dout` is that half's dout_pre_rms. `qk_dot` is not
    needed."""

    def kernel(
        dout, q, k, v, q_bias, k_bias, mimo_v, mimo_o, dk, dv, dmimo_v, states, dq, z, mimo_z, angles, dA_cs,
        dA_cs_rev, dt, trap, dfactor, dgamma_diag, dangles, D, dD, qk_dot, ddA, dSSdA, ddA_cs_rev, ddA_cs, segsum,
    ) -> None:  # fmt: skip
        _expect(q, v, (B, S, H, G, R, N, P))
        if packed_dout:
            dout = dout.unflatten(2, (S, R)).permute(0, 2, 3, 1, 4)
        q, k = (tensor.repeat_interleave(H // G, dim=3) for tensor in (q, k))
        for b in range(B):
            one = slice(b, b + 1)
            with surroundings(q.device):
                call = prepare(
                    q[one], k[one], v[one], q_bias, k_bias, mimo_v, mimo_o if reduceO else None,
                    z[one] if hasZ else None, D if hasD else None, mimo_z, angles[one], dA_cs[one], dA_cs_rev[one],
                    dt[one], trap[one], segsum[one], chunk_size, rotary_dim_divisor, dtype,
                )  # fmt: skip
                rows = compute_rows(call, padded(call.layout.slots(states[one]), call))
                behind = behind_the_scan(call, rows, _like_output(call, dout[one]))
                found = through_the_scan(call, rows, behind)
            dk[one], dq[one] = found.dk.flatten(1, 2), found.dq.flatten(1, 2)
            dv[one], dangles[one], dmimo_v[b] = found.dv, found.dangles, found.dmimo_v
            for buffer, result in (
                (dfactor, found.dfactor), (dgamma_diag, found.dgamma_diag), (ddA, found.ddA),
                (ddA_cs_rev, found.ddA_cs_rev), (ddA_cs, found.ddA_cs),
            ):  # fmt: skip
                buffer[one] = result
            call.layout.back_to_slots(found.dSSdA[..., :chunk_size, :chunk_size], dSSdA[one])
            if hasD:
                dD[b] = found.dD

    return kernel


def compute_dacs_segsum_triton(da: Tensor, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of A dt inside chunks, none above 0: up to and with a token and of all after it [B, H, S], and segsum
    [B, H, chunks, C, C], whose element [i, j] is the sum over j < t <= i."""
    B, H, S = da.shape
    chunks = -(-S // chunk_size)
    a = F.pad(da, (0, chunks * chunk_size - S)).view(B, H, chunks, chunk_size)
    after = running_sum(F.pad(a[..., 1:], (0, 1)).flip(-1), -1).flip(-1)
    below = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=da.device).tril(-1)
    segsum = running_sum(torch.where(below, a[..., None], 0), -2)
    forward, backward = (y.clamp_max(0).flatten(2)[..., :S].contiguous() for y in (running_sum(a, -1), after))
    return forward, backward, segsum.clamp_max(0)


def compute_dacs_segsum_triton_varlen(
    da: Tensor, chunk_size: int, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`compute_dacs_segsum_triton` of packed sequences: the chunks of sequence i are numbered from
    cu_seqlens[i] // C + i on, of S // C + sequences in all."""
    if cu_seqlens is None:
        return compute_dacs_segsum_triton(da, chunk_size)
    B, H, S = da.shape
    slots = S // chunk_size + len(cu_seqlens) - 1
    forward, backward = torch.empty_like(da), torch.empty_like(da)
    segsum = da.new_zeros(B, H, slots, chunk_size, chunk_size)
    for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens.tolist())):
        forward[..., a:b], backward[..., a:b], sums = compute_dacs_segsum_triton(da[..., a:b], chunk_size)
        segsum[:, :, a // chunk_size + i :][:, :, : sums.shape[2]] = sums
    return forward, backward, segsum


def _last(call: Call, rows: Rows) -> tuple[Tensor, Tensor]:
    """The last state [n, H, N, P] and the rotated k of the last token [n, R, H, N] of each sequence."""
    *_, R, N, _ = call.x.sizes
    return unpadded(rows.last_state, call), last_keys(rows.k, call.chunks, call.plan, R, N)


def _like_output(call: Call, dout: Tensor) -> Tensor:
    B, S, H, _, R, _, P = call.x.sizes
    shape = (B, S, H, P) if call.x.MIMO_Out is not None else (B, S, R, H, P)
    if tuple(dout.shape) != shape:
        raise ValueError(f"dout has shape {tuple(dout.shape)}: must be {shape}, that of the output")
    return dout


def _expect(q: Tensor, v: Tensor, sizes: tuple[int, ...]) -> None:
    B, S, H, G, R, N, P = sizes
    for name, tensor, shape in (("q", q, (B, S, R, G, N)), ("v", v, (B, S, H, P))):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: the kernel was made for {shape}")
