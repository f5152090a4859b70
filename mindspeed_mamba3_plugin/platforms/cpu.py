"""megatron-core on a CPU with gloo.

megatron-core names CUDA in places that no option reaches. `activate` redirects exactly those places, for this process
only, and refuses to run where there is an accelerator. Works for megatron-core 0.16.1.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from . import detect

NAME = "cpu"
COLLECTIVE_BACKEND = "gloo"

_FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange")
_active = False


def device() -> torch.device:
    return torch.device("cpu")


def synchronize() -> None:
    """Nothing to wait for: CPU operations have ended when they return."""


def peak_memory() -> None:
    """Not counted: PyTorch keeps no record of a CPU's tensors."""


def activate(deterministic: bool = True) -> None:
    """Let megatron-core run on this CPU. Calling it again changes nothing.

    Raises:
        RuntimeError: this machine has an accelerator, where megatron-core needs none of this.
    """
    global _active
    if (found := detect()) != NAME:
        raise RuntimeError(
            f"platforms.cpu.activate: the device of this machine is {found!r}; use platforms.current(), or hide the "
            "accelerator (CUDA_VISIBLE_DEVICES= or ASCEND_RT_VISIBLE_DEVICES=)"
        )
    torch.use_deterministic_algorithms(deterministic)
    if _active:
        return
    _redirect_current_device()
    _import_extensions()
    _redirect_factories()
    _redirect_moves()
    _stand_in_for_streams()
    _redirect_rng()
    _answer_cuda_tensor_types()
    _skip_graph_capture_check()
    _active = True


def active() -> bool:
    """True once `activate` has run in this process."""
    return _active


def _import_extensions() -> None:
    """megatron-core 0.12 cannot import its own extensions, which its hybrid stack needs, without TransformerEngine:
    empty classes take its place during that import only."""
    try:
        import_module("megatron.core.extensions.transformer_engine")
    except ModuleNotFoundError as error:
        if error.name != "transformer_engine":
            raise
        root = _Empty("transformer_engine")
        sys.modules[root.__name__] = root
        try:
            import_module("megatron.core.extensions.transformer_engine")
        finally:
            del sys.modules[root.__name__]


class _Empty(ModuleType):
    """A module of modules (lower-case names) and empty classes."""

    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (torch.nn.Module,), {}) if name[0].isupper() else _Empty(name)


def _redirect_current_device() -> None:
    """Layers, mappings and DDP buffers are allocated on torch.cuda.current_device()."""
    torch.cuda.current_device = lambda: device()
    for name in ("set_device", "synchronize", "empty_cache"):
        setattr(torch.cuda, name, _returning(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, _returning(0))


def _redirect_factories() -> None:
    """The optimizer, gradient clipping and the schedules write device="cuda" literally."""
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = device()
        return factory(*args, **kwargs)

    return make


def _redirect_moves() -> None:
    """Batches, loss counters and modules are moved with .cuda(); pinned memory needs a CUDA driver."""
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self


def _stand_in_for_streams() -> None:
    """Gradient reduction and pipeline exchange order their work on CUDA streams; on a CPU it is ordered already."""
    torch.cuda.Stream = torch.cuda.Event = _Stream
    torch.cuda.current_stream = lambda *_, **__: _Stream()
    torch.cuda.default_stream = lambda *_, **__: _Stream()
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.is_current_stream_capturing = lambda: False


class _Stream:
    """A stream or an event on which everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record_event(self, *_: Any) -> _Stream:
        return self

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, _: _Stream) -> float:
        return 0.0


def _redirect_rng() -> None:
    """The tensor-parallel seeds are kept as states of the CUDA generator."""
    import megatron.core.tensor_parallel.random as tp_random

    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    tp_random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    tp_random._set_cuda_rng_state = lambda new_state, *_, **__: torch.set_rng_state(new_state)


def _answer_cuda_tensor_types() -> None:
    """The optimizers and gradient clipping sort parameters by names such as 'torch.cuda.FloatTensor'."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_of(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = type_of


def _skip_graph_capture_check() -> None:
    """A CUDA build of torch asks the driver about graph capture in every optimizer step."""
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(torch.optim.Optimizer, name):
            setattr(torch.optim.Optimizer, name, _returning(None))


def _returning(value: Any) -> Callable[..., Any]:
    """A new function each time: torch.compile keeps a table of torch's functions, and rejects one listed twice."""
    return lambda *_, **__: value
