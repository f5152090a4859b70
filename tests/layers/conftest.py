"""A single gloo process for megatron-core, and a builder of mixers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from mindspeed_mamba3_plugin.platforms import cpu, detect


@pytest.fixture(scope="session")
def megatron() -> None:
    """megatron-core's process groups, of one process."""
    if detect() == "cpu":
        cpu.activate()
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


@pytest.fixture
def make_mixer(megatron) -> Callable:
    """make_mixer(**attributes of the TransformerConfig) -> Mamba3Mixer with small sizes, on the CPU."""
    from building import build_mixer, process_groups

    def make(seed: int = 0, layer_number: int = 1, **settings):
        torch.manual_seed(seed)
        return build_mixer(pg_collection=process_groups(), layer_number=layer_number, **settings)

    return make
