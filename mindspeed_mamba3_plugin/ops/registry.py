"""Which implementations of the operator exist, which can run here, and how often each was called.

An implementation is a module with `forward(inputs) -> (out, State | None)` and
`backward(inputs, grad_out) -> Gradients` (see `ops/types.py`). The names are the values of
`--mamba3-forward-kernel` and `--mamba3-backward-kernel`.
"""

from __future__ import annotations

import os
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

KERNEL_NAMES = ("auto", "reference", "triton", "triton-ascend", "triton-gpu", "tilelang")

_MODULES = {
    "reference": "mindspeed_mamba3_plugin.ops.reference",
    "triton-ascend": "mindspeed_mamba3_plugin.ops.triton.ascend",
    "triton-gpu": "mindspeed_mamba3_plugin.ops.triton.gpu",
    "tilelang": "mindspeed_mamba3_plugin.ops.tilelang",
}

_calls: Counter[str] = Counter()


def interpreted() -> bool:
    """True when Triton kernels run in the CPU interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def missing(name: str) -> str | None:
    """Why the implementation `name` cannot be imported here, or None when it can.

    Raises:
        ValueError: `name` is not one of `KERNEL_NAMES`.
    """
    if name not in KERNEL_NAMES:
        raise ValueError(f"unknown kernel {name!r}: allowed are {', '.join(KERNEL_NAMES)}")
    if name.startswith("triton") and find_spec("triton") is None:
        return "the package triton is not installed (on Ascend: triton-ascend)"
    if name == "triton-gpu" and find_spec(_MODULES["triton-gpu"]) is None:
        return "this version has no GPU-tuned family"
    if name == "tilelang" and (find_spec("tilelang") is None or find_spec("mamba_ssm") is None):
        return "the packages tilelang and mamba_ssm are not both installed"
    return None


def resolve(name: str, device_type: str, packed: bool = False) -> str:
    """Turn a flag value into the implementation that runs it on `device_type` ("cpu", "cuda" or "npu").

    `auto` is the fastest implementation that runs there: the Triton family of the device, and the
    reference where there is none (a CPU, whatever TRITON_INTERPRET says: the interpreter is for tests).
    `triton` is the Triton family of the device, the plain one in the interpreter.

    Raises:
        ValueError: unknown name, package not installed, or an implementation that cannot run on the device.
    """
    if (why := missing(name)) is not None:
        raise ValueError(f"kernel {name!r} cannot run here: {why}")
    if name == "auto":
        if device_type == "cpu" or missing("triton"):
            return "reference"
        name = "triton"
    if name == "triton":
        on_gpu = device_type == "cuda" and not interpreted()
        name = "triton-gpu" if on_gpu and missing("triton-gpu") is None else "triton-ascend"
    if name.startswith("triton") and device_type == "cpu" and not interpreted():
        raise ValueError(
            f"kernel {name!r} needs a GPU or an NPU; on a CPU set TRITON_INTERPRET=1 before triton is imported, "
            "or choose 'reference'"
        )
    needs_gpu = name == "tilelang" or (name == "triton-gpu" and not interpreted())
    if needs_gpu and device_type != "cuda":
        raise ValueError(f"kernel {name!r} needs an NVIDIA GPU, the tensors are on {device_type!r}")
    return name


def load(name: str) -> ModuleType:
    """The module of a resolved implementation."""
    return import_module(_MODULES[name])


def count(implementation: str, entry: str) -> None:
    """Record one call of `entry` ("forward", "backward", "bwd_fwd" or "bwd_bwd") of an implementation."""
    _calls[f"{implementation}.{entry}"] += 1


def kernel_calls() -> dict[str, int]:
    """Calls so far in this process, e.g. {"reference.forward": 12, "triton-ascend.bwd_bwd": 12}."""
    return dict(_calls)


def reset_kernel_calls() -> None:
    _calls.clear()
