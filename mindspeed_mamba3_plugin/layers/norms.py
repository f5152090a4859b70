"""The mixer's norm of B and C, and a norm for a stack without TransformerEngine."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .parallel import sum_gradient

NORM_EPS = 1e-5


class StateNorm(nn.Module):
    """RMSNorm over the state dimension, with one weight for all heads of all tensor-parallel ranks.

    A module, because DDP waits for gathered parameters in the forward of the module that owns them.
    """

    def __init__(self, state: int, group: ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.ones(state, device=device, dtype=dtype))

    def forward(self, y: Tensor) -> Tensor:
        """y [..., state], of any float dtype; computed in fp32 or wider."""
        wide = y.to(torch.promote_types(torch.float32, y.dtype))
        weight = sum_gradient(self.weight, self.group).to(wide.dtype)
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS) * weight).to(y.dtype)


class StackNorm:
    """megatron-core's norm of plain torch, which its own class refuses to make for sequence parallelism: there each
    rank normalises its tokens, and Megatron sums the gradients of what is marked `sequence_parallel`."""

    def __new__(cls, config: Any, hidden_size: int, eps: float = NORM_EPS, **kwargs: Any) -> nn.Module:
        alone = copy(config)
        alone.sequence_parallel = False
        norm = WrappedTorchNorm(alone, hidden_size, eps, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
