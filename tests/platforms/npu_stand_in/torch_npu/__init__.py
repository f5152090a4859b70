"""Stands in for torch_npu: its public names over a CPU. What nothing here needs raises when it is called; `calls` is
what was asked of the device. NO_CANN and NO_CHIP in the environment take those away."""

import contextlib
import os
import sys
import types

import torch

if os.environ.get("NO_CANN"):
    raise ImportError("libhccl.so: cannot open shared object file")

# Part of torch_npu/npu/__init__.py, __all__, in its releases for PyTorch 2.6 to 2.12.
PUBLIC = (
    "BFloat16Tensor", "Event", "FloatTensor", "HalfTensor", "NPUGraph", "Stream", "current_device", "current_stream",
    "default_stream", "device", "device_count", "empty_cache", "get_device_capability", "get_device_name",
    "get_device_properties", "get_rng_state", "graph", "init", "is_available", "is_bf16_supported",
    "is_current_stream_capturing", "is_initialized", "manual_seed", "manual_seed_all", "matmul",
    "max_memory_allocated", "max_memory_reserved", "mem_get_info", "memory_allocated", "memory_reserved",
    "reset_peak_memory_stats", "set_device", "set_rng_state", "stream", "synchronize",
)  # fmt: skip
BESIDE = ("default_generators",)  # public by use: torch_npu/npu/random.py

calls = []
npu = types.ModuleType("torch.npu")
torch.npu = sys.modules["torch.npu"] = npu


def _missing(name):
    def missing(*_, **__):
        raise NotImplementedError(f"torch.npu.{name} is not in the stand-in")

    return missing


def _noted(name, answer=None):
    def noted(*arguments):
        calls.append((name, *arguments))
        return answer

    return noted


class _Device:
    def __init__(self, _):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


class _Stream:
    def __init__(self, *_, **__):
        pass

    def wait_stream(self, _):
        pass


for _name in PUBLIC:
    setattr(npu, _name, _missing(_name))
for _name in ("BFloat16Tensor", "FloatTensor", "HalfTensor"):
    setattr(npu, _name, getattr(torch, _name))
for _name in ("set_device", "init", "synchronize"):
    setattr(npu, _name, _noted(_name))
npu.is_initialized = lambda: ("init",) in calls
npu.is_available = lambda: not os.environ.get("NO_CHIP")
npu.device_count = lambda: 4
npu.current_device = lambda: 3
npu.max_memory_allocated = lambda: 4096
npu.device = _Device
npu.Stream = npu.Event = _Stream
npu.current_stream = npu.default_stream = lambda *_: _Stream()
npu.stream = lambda _: contextlib.nullcontext()
npu.is_current_stream_capturing = lambda: False
npu.manual_seed = npu.manual_seed_all = lambda seed: torch.default_generator.manual_seed(seed)
npu.get_rng_state = lambda device="npu": torch.get_rng_state()
npu.default_generators = (torch.default_generator,) * 4  # one for each device
