"""The NPU platform against a stand-in for torch_npu: what it asks for, and what it says without one."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mindspeed_mamba3_plugin

PACKAGE = Path(mindspeed_mamba3_plugin.__file__).parent

# Part of torch_npu/npu/__init__.py, __all__, in its releases for PyTorch 2.6 to 2.9.
PUBLIC = {
    "Event", "NPUGraph", "Stream", "current_device", "current_stream", "default_stream", "device", "device_count",
    "empty_cache", "get_device_name", "get_device_properties", "get_rng_state", "graph", "init", "is_available",
    "is_bf16_supported", "is_initialized", "manual_seed", "manual_seed_all", "matmul", "max_memory_allocated",
    "max_memory_reserved", "mem_get_info", "memory_allocated", "memory_reserved", "reset_peak_memory_stats",
    "set_device", "set_rng_state", "stream", "synchronize",
}  # fmt: skip

STAND_IN = {
    "torch_npu/__init__.py": """
import os, sys, types
import torch

if os.environ.get("NO_CANN"):
    raise ImportError("libhccl.so: cannot open shared object file")
calls = []
npu = types.ModuleType("torch.npu")
npu.is_available = lambda: not os.environ.get("NO_CHIP")
npu.current_device = lambda: 3
npu.max_memory_allocated = lambda: 4096
for name in ("set_device", "init", "synchronize"):
    setattr(npu, name, lambda *a, name=name: calls.append((name, *a)))
torch.npu = sys.modules["torch.npu"] = npu
""",
    "torch_npu/contrib/__init__.py": "",
    "torch_npu/contrib/transfer_to_npu.py": "import torch_npu; torch_npu.calls.append(('redirected',))",
}


@pytest.fixture
def run(tmp_path):
    """Runs code in a process of its own that has the stand-in; returns what it prints."""
    for name, text in STAND_IN.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(code: str, **environment: str) -> str:
        path = os.pathsep.join((str(tmp_path), *filter(None, sys.path)))
        env = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment}
        command = [sys.executable, "-W", "ignore", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


ACTIVATED = """
import os, torch, torch_npu
from mindspeed_mamba3_plugin import platforms
npu = platforms.current()
assert npu.NAME == "npu" and npu.COLLECTIVE_BACKEND == "hccl"
torch.Tensor.type = lambda self, *a: "torch.npu.FloatTensor" if not a else self
npu.activate()
npu.activate()
taken = [("set_device", 2), ("init",)]
assert torch_npu.calls == [*taken, ("redirected",), *taken], torch_npu.calls
assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
assert torch.are_deterministic_algorithms_enabled() and os.environ["HCCL_DETERMINISTIC"] == "true"
runs = []
@torch.compile
def compiled(x):
    runs.append(1)
    return x + 1
compiled(torch.zeros(1)), compiled(torch.zeros(1))
assert len(runs) == 2
npu.synchronize()
assert torch_npu.calls[-1] == ("synchronize",) and npu.peak_memory() == 4096
"""


def test_activation(run):
    run(ACTIVATED, LOCAL_RANK="2")


def test_the_device_is_the_current_one(run):
    code = """
import torch
torch.utils.rename_privateuse1_backend("npu")
from mindspeed_mamba3_plugin import platforms
print(platforms.current().device())
"""
    assert run(code).strip() == "npu:3"


def test_mindspeeds_redirection_is_left_alone(run):
    code = """
import sys, types
import torch_npu
sys.modules["mindspeed.megatron_adaptor"] = types.ModuleType("mindspeed.megatron_adaptor")
from mindspeed_mamba3_plugin.platforms import npu
npu.activate(deterministic=False)
print(torch_npu.calls)
"""
    assert "redirected" not in run(code)


REFUSED = """
from mindspeed_mamba3_plugin.platforms import npu
try:
    npu.activate()
except RuntimeError as error:
    print(error)
"""


def test_without_cann_the_remedy_is_named(run):
    said = run(REFUSED, NO_CANN="1")
    assert "libhccl.so" in said and "install CANN, run 'source <CANN>/set_env.sh'" in said


def test_without_a_chip_the_remedy_is_named(run):
    said = run(REFUSED, NO_CHIP="1")
    assert "sees no NPU: check 'npu-smi info'" in said


def test_without_torch_npu_the_remedy_is_named(run):
    said = run("import sys; sys.path = [p for p in sys.path if 'pytest-of' not in p]\n" + REFUSED)
    assert "torch_npu is not installed: install the release made for this PyTorch, pip install torch_npu==2." in said


def test_only_public_names_of_torch_npu_are_used():
    used = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                owner = node.value
                if owner.attr == "npu" and isinstance(owner.value, ast.Name) and owner.value.id == "torch":
                    used.add(node.attr)
    assert used and used <= PUBLIC, used - PUBLIC
