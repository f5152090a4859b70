"""The data that passes between the public operator and its implementations.

Letters used everywhere: B batch, S sequence length, H heads, G groups of B/C, R MIMO rank, N state size,
P head size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Upstream's order of differentiable arguments; gradients are named after them.
TENSOR_ARGS = (
    "Q", "K", "V", "ADT", "DT", "Trap", "Q_bias", "K_bias", "MIMO_V", "MIMO_Z", "MIMO_Out", "Angles", "D", "Z",
    "outproj_norm_weight",
)  # fmt: skip
OPTIONAL_ARGS = frozenset({"MIMO_Z", "MIMO_Out", "D", "Z", "outproj_norm_weight"})

GRADIENT_NAMES = (
    "dq", "dk", "dv", "dadt", "ddt", "dtrap", "dq_bias", "dk_bias", "dmimo_v", "dmimo_z", "dmimo_out", "dangles",
    "dd", "dz", "dnorm_weight",
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """Checked arguments of one call. Absent options are None. `outproj_norm_weight` is [H, P] when given."""

    Q: Tensor  # [B, S, R, G, N]
    K: Tensor  # [B, S, R, G, N]
    V: Tensor  # [B, S, H, P]
    ADT: Tensor  # [B, H, S]
    DT: Tensor  # [B, H, S]
    Trap: Tensor  # [B, H, S], before the sigmoid
    Q_bias: Tensor  # [H, R, N]
    K_bias: Tensor  # [H, R, N]
    MIMO_V: Tensor  # [H, R, P]
    MIMO_Z: Tensor | None  # [H, R, P]
    MIMO_Out: Tensor | None  # [H, R, P]; None: no reduction over R
    Angles: Tensor  # [B, S, H, N / rotary_dim_divisor]
    D: Tensor | None  # [H]
    Z: Tensor | None  # [B, S, H, P]
    outproj_norm_weight: Tensor | None  # [H, P]
    cu_seqlens: Tensor | None  # [sequences + 1]
    chunk_size: int
    rotary_dim_divisor: int
    dtype: torch.dtype  # of the matrix operands and of the output
    return_state: bool
    fuse_norm: bool
    norm_eps: float

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """The differentiable arguments in the order of `TENSOR_ARGS`."""
        return tuple(getattr(self, name) for name in TENSOR_ARGS)

    def contiguous(self) -> Inputs:
        """The same inputs, every tensor of `TENSOR_ARGS` contiguous, as the kernels take them."""
        given = zip(TENSOR_ARGS, self.tensors, strict=True)
        return replace(self, **{name: t.contiguous() for name, t in given if t is not None})

    @property
    def options(self) -> dict[str, Any]:
        """Everything that is not a differentiable argument."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in TENSOR_ARGS}

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """(B, S, H, G, R, N, P)"""
        B, S, R, G, N = self.Q.shape
        return B, S, self.V.shape[2], G, R, N, self.V.shape[3]


class State(NamedTuple):
    """What a sequence leaves behind for decoding; one row per sequence (the batch, or the packed sequences)."""

    angle: Tensor  # [sequences, H, N / divisor] fp32, in [0, 2 pi)
    ssm: Tensor  # [sequences, H, P, N] fp32
    k: Tensor  # [sequences, R, H, N] rotated k of the last token
    v: Tensor  # [sequences, H, P] V of the last token


class Gradients(NamedTuple):
    """Gradients in the order of `TENSOR_ARGS`; None where the argument was absent."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dadt: Tensor
    ddt: Tensor
    dtrap: Tensor
    dq_bias: Tensor
    dk_bias: Tensor
    dmimo_v: Tensor
    dmimo_z: Tensor | None
    dmimo_out: Tensor | None
    dangles: Tensor
    dd: Tensor | None
    dz: Tensor | None
    dnorm_weight: Tensor | None
