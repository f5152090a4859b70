"""The environment is set before anything imports triton: without a GPU or NPU its kernels run in the interpreter."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from mindspeed_mamba3_plugin import platforms

if platforms.detect() == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs an NVIDIA GPU; skipped without CUDA")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    """megatron-core's process groups, of one process, for one file of tests."""
    platforms.current().activate()
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
