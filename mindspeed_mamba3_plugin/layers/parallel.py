"""Gradients of what all tensor-parallel ranks share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup


def sum_gradient(y: Tensor, group: ProcessGroup) -> Tensor:
    """y itself; its gradient is summed over the ranks of `group`.

    megatron-core's copy_to_tensor_model_parallel_region is meant for this, but its releases before 0.19 lose the sum
    when the gradient is not contiguous.
    """
    return y if group.size() == 1 else _SumGradient.apply(y, group)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        # A copy: the incoming gradient may have other readers.
        total = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
