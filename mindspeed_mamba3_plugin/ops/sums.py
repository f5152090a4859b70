"""Sums in torch that give the same bits every time, on every device."""

from __future__ import annotations

import torch
from torch import Tensor


def running_sum(x: Tensor, dim: int) -> Tensor:
    """Sums of x along `dim` up to and with each element, in the order of Hillis and Steele's scan: log2(n) additions
    deep. torch.cumsum is refused for floats on CUDA under torch.use_deterministic_algorithms."""
    n, reach = x.shape[dim], 1
    while reach < n:
        added = x.narrow(dim, reach, n - reach) + x.narrow(dim, 0, n - reach)
        x = torch.cat((x.narrow(dim, 0, reach), added), dim)
        reach *= 2
    return x
