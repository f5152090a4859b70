from __future__ import annotations

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
        assert all(callable(getattr(module, f)) for f in ("activate", "device", "synchronize"))


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
