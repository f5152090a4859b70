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
ROOT = Path(__file__).resolve().parents[2]

STAND_IN = Path(__file__).with_name("npu_stand_in")


def run(code: str, stand_in: bool = True, **environment: str) -> str:
    """Runs code in a process of its own, beside the stand-in for torch_npu; returns what it prints."""
    path = os.pathsep.join((*([str(STAND_IN)] if stand_in else []), *filter(None, sys.path)))
    env = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **environment}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=env, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


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


def test_activation():
    run(ACTIVATED, LOCAL_RANK="2")


def test_the_device_is_the_current_one():
    code = """
import torch
torch.utils.rename_privateuse1_backend("npu")
from mindspeed_mamba3_plugin import platforms
print(platforms.current().device())
"""
    assert run(code).strip() == "npu:3"


def test_mindspeeds_redirection_is_left_alone():
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


def test_without_cann_the_remedy_is_named():
    said = run(REFUSED, NO_CANN="1")
    assert "libhccl.so" in said and "install CANN, run 'source <CANN>/set_env.sh'" in said


def test_without_a_chip_the_remedy_is_named():
    said = run(REFUSED, NO_CHIP="1")
    assert "sees no NPU: check 'npu-smi info'" in said


def test_without_torch_npu_the_remedy_is_named():
    said = run(REFUSED, stand_in=False)
    assert "torch_npu is not installed: install the release made for this PyTorch, pip install torch_npu==2." in said


TRAINED = """
import sys
from pathlib import Path
import torch
import torch_npu
base = torch.Tensor.type
torch.Tensor.type = lambda self, *a: base(self, *a).replace("torch.", "torch.npu.", 1) if not a else base(self, *a)
from mindspeed_mamba3_plugin.platforms import npu
npu.COLLECTIVE_BACKEND, npu.device = "gloo", lambda: torch.device("cpu")
from mindspeed_mamba3_plugin.training import trainer
from mindspeed_mamba3_plugin.training.config import RunConfig
run = RunConfig.from_yaml(sys.argv[1], sys.argv[3:])
summary = trainer.train(run, Path(sys.argv[2]))
print(*(summary[key] for key in ("device", "steps", "nonfinite", "peak_memory_bytes", "kernel_calls")))
"""
SMALL = (
    "model.hybrid_override_pattern=M*-", "model.hidden_size=32", "model.ffn_hidden_size=32",
    "model.num_attention_heads=2", "model.mamba_state_dim=16", "model.mamba_head_dim=16", "model.mamba_num_heads=2",
    "mamba3.mamba3_mimo_rank=2", "mamba3.mamba3_forward_kernel=reference", "mamba3.mamba3_backward_kernel=reference",
    "data.sequence_length=32", "data.max_bytes=100000", "optimizer.lr_warmup_steps=0", "training.steps=2",
    "training.micro_batch_size=1",
)  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_megatron_trains_under_the_names_of_an_npu(tmp_path, dtype):
    """What torch_npu's redirection leaves out of what megatron-core asks of CUDA, the platform adds."""
    arguments = [str(ROOT / "configs/smoke_npu.yaml"), str(tmp_path), *SMALL, f"model.params_dtype={dtype}"]
    said = run(f"import sys; sys.argv = ['', *{arguments!r}]\n" + TRAINED)
    calls = {"reference.forward": 2, "reference.backward": 2}
    assert said.splitlines()[-1] == f"npu 2 None 4096 {calls}"


def test_only_public_names_of_torch_npu_are_used():
    used = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                owner = node.value
                if owner.attr == "npu" and isinstance(owner.value, ast.Name) and owner.value.id == "torch":
                    used.add(node.attr)
    allowed = {*ast.literal_eval(_constant("PUBLIC")), *ast.literal_eval(_constant("BESIDE"))}
    assert used and used <= allowed, used - allowed


def _constant(name: str) -> ast.expr:
    tree = ast.parse((STAND_IN / "torch_npu/__init__.py").read_text())
    return next(node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == name)
