"""Launch Triton kernels without an NPU: launchers run as they are, a stand-in driver receives what they launch.

Needs triton-ascend as the installed `triton`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver


@dataclass(frozen=True)
class Chip:
    """A processor to plan and compile for."""

    arch: str
    cube_cores: int
    vector_cores: int


ASCEND_910B3 = Chip("Ascend910B3", 20, 40)


@dataclass(frozen=True)
class Launch:
    """What one kernel launch compiles (signature, constants, specialisation, options) and runs on."""

    source: ASTSource
    options: dict[str, Any]
    grid: tuple[int, int, int]
    arguments: dict[str, Any]  # of the signature, by name

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def numbers(self) -> list[int | None]:
        """The arguments that the compiled kernel takes, None for those that are no integers."""
        taken = (v for n, v in self.arguments.items() if n not in self.source.constants)
        return [v if isinstance(v, int) else None for v in taken]

    @property
    def key(self) -> str:
        """Equal for launches of one binary."""
        return f"{self.source.hash()} {sorted(self.options.items(), key=str)}"


@dataclass(frozen=True)
class TorchCall:
    """An operation of torch between the launches, and the bytes it reads and writes."""

    name: str
    bytes: int


class TorchCalls(TorchDispatchMode):
    """Inside, every operation of torch that moves data of a tensor without values is given to `receive`."""

    def __init__(self, receive: Callable[[TorchCall], None]):
        super().__init__()
        self.receive = receive

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.device.type == "meta"]
        name = op.overloadpacket.__name__
        if made and not op.is_view and not name.startswith(("empty", "new_empty")):
            given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            if name.endswith("_like"):  # of its argument it takes the shape only
                given = []
            self.receive(TorchCall(name, sum(t.numel() * t.element_size() for t in (*given, *made))))
        return result


class _Kernel:
    """Takes the place of a compiled kernel: hands each of its launches to the active driver."""

    function = packed_metadata = None

    def __init__(self, source: ASTSource, target: GPUTarget, options: dict[str, Any]):
        self.source, self.options = source, options

    def launch_metadata(self, *args) -> None:
        pass

    def _init_handles(self) -> None:
        pass

    def run(self, x, y, z, stream, function, packed, metadata, enter, leave, *values) -> None:
        names = [p.name for p in self.source.fn.params if not p.is_constexpr]
        launch = Launch(self.source, self.options, (x, y, z), dict(zip(names, values, strict=True)))
        driver.active.receive(launch)


@contextmanager
def intercepted(chip: Chip, receive: Callable[[Launch], None]) -> Iterator[None]:
    """Inside, every kernel launch, on tensors of any device, is planned for `chip` and given to `receive`."""
    properties = {"num_aicore": chip.cube_cores, "num_vectorcore": chip.vector_cores}
    before = driver.active
    driver.set_active(
        SimpleNamespace(
            receive=receive,
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: GPUTarget("npu", chip.arch, 0),
            utils=SimpleNamespace(get_device_properties=lambda device: properties),
        )
    )
    try:
        with mock.patch("triton.compiler.compile", _Kernel):
            yield
    finally:
        driver.set_active(before)
