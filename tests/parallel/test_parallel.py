"""A model in every layout against one process with the same weights: gradients, loss curves, checkpoints. Over gloo
on a CPU; on a machine with two GPUs over NCCL, with the Triton kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from processes import run_ranks

pytest.importorskip("megatron.core", minversion="0.16")
if torch.cuda.device_count() == 1:
    pytest.skip("each rank needs a GPU of its own", allow_module_level=True)
PROCESS = Path(__file__).with_name("process.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The references, made by one process, which also resumes its own runs."""
    path = tmp_path_factory.mktemp("parallel")
    run_ranks(PROCESS, 1, "1", str(path), "references")
    return path


def test_two_ranks_learn_what_one_does(folder):
    """TP, SP, PP, DP, CP, the distributed optimizer and overlaps, in fp32: relative 1e-5."""
    run_ranks(PROCESS, 2, "2", str(folder), "layouts")


def test_checkpoints_in_bf16_move_between_layouts(folder):
    """From one process to two and back, bit for bit, with the optimizer's state and the parameters kept in fp32;
    resumed runs go on as if never stopped."""
    run_ranks(PROCESS, 2, "2", str(folder), "checkpoints")
    run_ranks(PROCESS, 1, "1", str(folder), "back")
