"""Initial values that do not depend on the number of tensor-parallel ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..config import Mamba3Config
from .sizes import MixerSizes


class InProjInit:
    """An init method for the packed projection. Megatron's CPU initialisation draws the weight of all ranks and gives
    each consecutive rows of it: these become the rank's share of every part of one whole draw.

    shared: after that, the whole draw's rows of B and C; None before, and where Megatron draws a weight per rank.
    """

    def __init__(self, init_method: Callable[[Tensor], Any], sizes: MixerSizes, tp: int) -> None:
        self.init_method, self.sizes, self.tp = init_method, sizes, tp
        self.shared: Tensor | None = None

    @torch.no_grad()
    def __call__(self, weight: Tensor) -> Tensor:
        if self.tp == 1 or weight.shape[0] != self.tp * self.sizes.local(self.tp).in_proj_rows:
            self.init_method(weight)
            return weight
        whole = weight.new_empty(self.sizes.in_proj_rows, weight.shape[1])
        self.init_method(whole)
        self.shared = whole[self.sizes.bc_rows()].clone()
        return weight.copy_(whole[torch.cat([self.sizes.rank_rows(self.tp, r) for r in range(self.tp)])])


@contextmanager
def layer_rng(layer_number: int) -> Iterator[None]:
    """The CPU generator, seeded by the run's seed and the layer, for the time of the block."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed((torch.initial_seed() + layer_number) % 2**63)
        yield


def initial_dt_bias(heads: int, settings: Mamba3Config) -> Tensor:
    """softplus(dt_bias) is log-uniform between dt_min and dt_max, and at least dt_init_floor."""
    low, high = math.log(settings.mamba3_dt_min), math.log(settings.mamba3_dt_max)
    dt = torch.exp(low + torch.rand(heads, dtype=torch.float32) * (high - low)).clamp(
        min=settings.mamba3_dt_init_floor
    )
    return dt + torch.log(-torch.expm1(-dt))
