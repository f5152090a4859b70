from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from mindspeed_mamba3_plugin import platforms
from mindspeed_mamba3_plugin.platforms import Timer, cpu, cuda, npu

INACTIVE = """
import torch
before = torch.tensor, torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda
torch.cuda.is_available = lambda: True
from mindspeed_mamba3_plugin import platforms
from mindspeed_mamba3_plugin.platforms import cpu
assert platforms.current().NAME == "cuda"
try:
    cpu.activate()
except RuntimeError as error:
    assert "the device of this machine is 'cuda'" in str(error)
else:
    raise AssertionError("activated beside a GPU")
assert before == (torch.tensor, torch.cuda.current_device, torch.Tensor.type, torch.Tensor.cuda)
"""


def test_nothing_of_the_cpu_platform_is_active_beside_a_gpu():
    subprocess.run([sys.executable, "-c", INACTIVE], check=True, timeout=60)


def test_platforms_share_their_names():
    for module, name in ((cpu, "cpu"), (cuda, "cuda"), (npu, "npu")):
        assert name == module.NAME and module.COLLECTIVE_BACKEND in ("gloo", "nccl", "hccl")
        assert all(callable(getattr(module, f)) for f in ("activate", "device", "synchronize", "peak_memory"))


def test_a_rank_takes_its_own_gpu_and_deterministic_algorithms(monkeypatch):
    taken = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("NCCL_ALGO", "Tree")  # what the user has set stays
    before = torch.are_deterministic_algorithms_enabled()
    try:
        cuda.activate()
        assert taken == [3] and torch.are_deterministic_algorithms_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and os.environ["NCCL_ALGO"] == "Tree"
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(before)
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.skipif(platforms.detect() != "cpu", reason="needs a machine without an accelerator")
def test_activating_twice_changes_nothing():
    cpu.activate(deterministic=False)
    first = torch.tensor, torch.Tensor.type
    cpu.activate(deterministic=False)
    assert first == (torch.tensor, torch.Tensor.type) and cpu.active()
    assert torch.tensor([1.0], device="cuda").device.type == "cpu"
    assert torch.zeros(2).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(2, device="meta").device.type == "meta"


def test_the_timer_includes_the_devices_own_work(monkeypatch):
    waits = []
    monkeypatch.setattr(cpu, "synchronize", lambda: waits.append(1))
    with Timer(cpu) as timer:
        pass
    assert len(waits) == 2 and 0 <= timer.seconds < 1
