"""state-spaces/mamba's own TileLang kernels behind this package's contract, to compare with. NVIDIA only; needs the
packages mamba_ssm (with mamba_ssm.ops.tilelang.mamba3) and tilelang.

Their limits apply: sizes that their kernels were not written for fail in the TileLang compiler.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from . import registry
from .types import TENSOR_ARGS, Gradients, Inputs, State

_NAME = "tilelang"
THREADS = {16: 128}  # of bwd_bwd by N where it is not the usual 256, as in upstream's tests
_KERNELS = "mamba_ssm.ops.tilelang.mamba3.mamba3_mimo"  # the module that brings all of its kernels together


def forward(x: Inputs) -> tuple[Tensor, State | None]:
    """Output and, when asked for, the final state, by upstream's forward kernels."""
    registry.count(_NAME, "forward")
    upstream, t, cu = import_module(_KERNELS), _prepared(x), _bounds(x)
    theta, last = upstream.angle_dt_fwd(
        t["Angles"], t["DT"], chunk_size=x.chunk_size, return_output_state=True, cu_seqlens=cu
    )
    arguments = [t[n] for n in ("Q", "K", "V", "Q_bias", "K_bias", "MIMO_V", "MIMO_Out", "Z", "D", "MIMO_Z")]
    cs, cs_rev, segsum = _decays(upstream, x, t, cu)
    run = upstream.mamba_mimo_forward if cu is None else upstream.mamba_mimo_forward_varlen
    out, ssm, k = run(
        *arguments, theta, cs, cs_rev, t["DT"], t["Trap"], segsum, return_state=x.return_state, **_options(x, cu)
    )
    if not x.return_state:
        return out, None
    ends = x.cu_seqlens[1:].long() - 1 if cu is not None else None
    v = t["V"][:, -1] if ends is None else t["V"][0, ends]
    angle = torch.remainder(last, 2 * torch.pi)
    return out, State(angle, ssm.transpose(-1, -2).contiguous(), k, v.clone())


def backward(x: Inputs, grad_out: Tensor) -> Gradients:
    """All gradients by upstream's bwd_fwd and bwd_bwd kernels and the reductions around them."""
    registry.count(_NAME, "backward")
    upstream, t, cu = import_module(_KERNELS), _prepared(x), _bounds(x)
    theta, _ = upstream.angle_dt_fwd(
        t["Angles"], t["DT"], chunk_size=x.chunk_size, return_output_state=True, cu_seqlens=cu
    )
    arguments = [t[n] for n in ("Q", "K", "V", "Q_bias", "K_bias", "MIMO_V", "MIMO_Out", "Z", "MIMO_Z")]
    cs, cs_rev, segsum = _decays(upstream, x, t, cu)
    run = upstream.mamba_mimo_bwd_combined if cu is None else upstream.mamba_mimo_bwd_combined_varlen
    *found, dtheta, dd, dz, dnorm = run(
        grad_out.contiguous().to(x.dtype),
        *arguments, theta, cs, cs_rev, t["DT"], t["Trap"], t["D"], segsum,
        bb_threads=THREADS.get(x.Q.shape[-1], 256), **_options(x, cu),
    )  # fmt: skip
    dq, dk, dv, dadt, ddt, dtrap, dq_bias, dk_bias, dmimo_v, dmimo_z, dmimo_out = found
    dangles, ddt_angle, _ = upstream.angle_dt_bwd(
        grad_out=dtheta, angle=t["Angles"], dt=t["DT"], has_init_state=False, chunk_size=x.chunk_size, cu_seqlens=cu
    )
    return Gradients(
        dq, dk, dv, dadt, ddt + ddt_angle, dtrap, dq_bias, dk_bias, dmimo_v, dmimo_z, dmimo_out, dangles, dd, dz,
        None if x.outproj_norm_weight is None else dnorm.reshape(x.outproj_norm_weight.shape),
    )  # fmt: skip


def _prepared(x: Inputs) -> dict[str, Tensor | None]:
    """The tensors, contiguous, in the dtypes that upstream's kernels are written for."""
    narrow = {"Q", "K", "V", "Z", "Trap"}
    return {
        n: None if t is None else t.to(x.dtype if n in narrow else torch.float32).contiguous()
        for n, t in zip(TENSOR_ARGS, x.tensors, strict=True)
    }


def _bounds(x: Inputs) -> Tensor | None:
    return None if x.cu_seqlens is None else x.cu_seqlens.to(torch.int32)


def _decays(upstream: ModuleType, x: Inputs, t: dict, cu: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    if cu is None:
        return upstream.compute_dacs_segsum_triton(t["ADT"], x.chunk_size)
    return upstream.compute_dacs_segsum_triton_varlen(t["ADT"], x.chunk_size, cu_seqlens=cu)


def _options(x: Inputs, cu: Tensor | None) -> dict:
    return {
        "chunk_size": x.chunk_size,
        "rotary_dim_divisor": x.rotary_dim_divisor,
        "dtype": x.dtype,
        "fuse_pregate_headwise_rms_norm": x.fuse_norm,
        "outproj_norm_weight": None if x.outproj_norm_weight is None else x.outproj_norm_weight.float(),
        "outproj_norm_eps": x.norm_eps,
        **({} if cu is None else {"cu_seqlens": cu}),
    }
