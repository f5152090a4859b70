"""Ascend NPUs through torch_npu.

Written from torch_npu's documented interface and never run on a chip. megatron-core names CUDA throughout: on an NPU
it needs MindSpeed (`import mindspeed.megatron_adaptor`), which redirects those names; that is not done here.
"""

from __future__ import annotations

import os

import torch

NAME = "npu"
COLLECTIVE_BACKEND = "hccl"


def device() -> torch.device:
    return torch.device("npu", torch.npu.current_device())


def synchronize() -> None:
    torch.npu.synchronize()


def peak_memory() -> int:
    """Bytes of this process's tensors on the device at their highest so far."""
    return torch.npu.max_memory_allocated()


def activate(deterministic: bool = True) -> None:
    """Take the NPU of this rank; with `deterministic`, collectives that sum in a fixed order as well."""
    import torch_npu  # noqa: F401  registers torch.npu

    torch.npu.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if deterministic:
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
    torch.use_deterministic_algorithms(deterministic)
