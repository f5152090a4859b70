from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from old_core import stand_in

from mindspeed_mamba3_plugin import patches

stand_in()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], ModuleType]:
    """stub("a.b", source) puts a module made of `source` into sys.modules, for this test."""

    def make(name: str, source: str = "") -> ModuleType:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
        exec(textwrap.dedent(source), vars(module))
        return module

    return make


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    yield
    patches.revert()
