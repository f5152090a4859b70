"""NVIDIA GPUs: megatron-core runs there as it is."""

from __future__ import annotations

import os

import torch

NAME = "cuda"
COLLECTIVE_BACKEND = "nccl"


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def synchronize() -> None:
    torch.cuda.synchronize()


def peak_memory() -> int:
    """Bytes of this process's tensors on the device at their highest so far."""
    return torch.cuda.max_memory_allocated()


def activate(deterministic: bool = True) -> None:
    """Take the GPU of this rank; with `deterministic`, only algorithms that give the same bits every time."""
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if deterministic:
        # cuBLAS reads it when its first handle is made, NCCL when its first communicator is.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        # Nothing reads memory that was not written; filling every new tensor took 11 % of the GPU time of a step.
        torch.utils.deterministic.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(deterministic)
