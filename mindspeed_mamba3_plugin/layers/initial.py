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


def by_rank(init_method: Callable[[Tensor], Any], sizes: MixerSizes, tp: int) -> Callable[[Tensor], Any]:
    """Megatron's CPU initialisation draws the whole weight and gives each rank consecutive rows: order the rows so
    that these are the rank's share of every part."""

    @torch.no_grad()
    def init(weight: Tensor) -> Tensor:
        init_method(weight)
        if tp > 1 and weight.shape[0] == sizes.in_proj_rows:
            weight.copy_(weight[torch.cat([sizes.rank_rows(tp, r) for r in range(tp)])])
        return weight

    return init


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
