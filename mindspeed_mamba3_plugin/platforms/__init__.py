"""The machine's accelerator, behind one small set of names: `cpu`, `cuda` and `npu` are modules that each offer

NAME, COLLECTIVE_BACKEND                the device type, and the torch.distributed backend that serves it
activate(deterministic=True)            prepare this process for training; call it before megatron.core is used
device() -> torch.device                where tensors of this process live
synchronize()                           wait for the device, so that wall-clock time means something
peak_memory() -> int | None             bytes of this process's tensors at their highest; None where not counted
"""

from __future__ import annotations

import time
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch


def detect() -> str:
    """The device type of this machine: "npu", "cuda" or "cpu". Hide an accelerator with its own *_VISIBLE_DEVICES."""
    if find_spec("torch_npu") is not None:
        import torch_npu  # noqa: F401  registers torch.npu

        if torch.npu.is_available():
            return "npu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def current() -> ModuleType:
    """The platform module of this machine."""
    return import_module(f".{detect()}", __name__)


class Timer:
    """Wall-clock seconds of a `with` block, the device's own work included: `with Timer(platform) as t: ...`."""

    def __init__(self, platform: ModuleType) -> None:
        self._synchronize = platform.synchronize
        self.seconds = 0.0

    def __enter__(self) -> Timer:
        self._synchronize()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._synchronize()
        self.seconds = time.perf_counter() - self._start
