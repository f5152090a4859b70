"""Looking up, recognising and replacing symbols of other people's modules."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from types import FunctionType, MethodType, ModuleType
from typing import Any

OURS = "mindspeed_mamba3_plugin"
ABSENT: Any = object()


class PatchError(RuntimeError):
    """A patch cannot be applied or taken back; the message names the symbol and both parties."""


class ModuleAbsent(PatchError):
    """The module of a target, or one that it needs, is not installed."""


@dataclass
class Site:
    """One place that holds, or held, the symbol."""

    holder: Any
    name: str
    before: Any  # the raw __dict__ entry
    after: Any

    @property
    def intact(self) -> bool:
        return entry(self.holder, self.name) is self.after

    def put(self) -> None:
        setattr(self.holder, self.name, self.after)

    def restore(self) -> None:
        if self.before is ABSENT:
            delattr(self.holder, self.name)
        else:
            setattr(self.holder, self.name, self.before)


def installed_version(distribution: str) -> str | None:
    """Version of the code that an import would load, or None. A source tree on the path counts before what is
    installed."""
    try:
        return import_module(distribution.replace("-", ".")).__version__
    except (ImportError, AttributeError):
        pass
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def locate(target: str, version: str) -> tuple[Any, str, Any]:
    """(owner, last name, raw attribute) of a target; raw: a staticmethod is not unwrapped."""
    module, _, path = target.partition(":")
    try:
        holder: Any = import_module(module)
    except ImportError as error:
        raise ModuleAbsent(f"{target}: importing {module}{version} failed: {error}") from error
    except Exception as error:
        raise PatchError(f"{target}: importing {module}{version} failed: {error!r}") from error
    *owners, name = path.split(".")
    try:
        for owner in owners:
            holder = getattr(holder, owner)
        raw = inspect.getattr_static(holder, name)
    except AttributeError as error:
        raise PatchError(f"{target}: {module}{version} has no {path}, which {OURS} would patch") from error
    # What another patch manager has put back into a class: the bound method that it had read from there.
    bound = isinstance(raw, MethodType) and raw.__self__ is holder
    return holder, name, classmethod(raw.__func__) if bound else raw


def entry(holder: Any, name: str) -> Any:
    return vars(holder).get(name, ABSENT)


def inner(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw


def home(holder: Any, name: str) -> str:
    """The module in which an unpatched attribute is defined."""
    if isinstance(holder, type):
        return next(c for c in holder.__mro__ if name in vars(c)).__module__
    return holder.__name__ if isinstance(holder, ModuleType) else type(holder).__module__


def origin(holder: Any, name: str, obj: Any) -> Any:
    """The module that a function or class comes from, where `holder` is a module of the same package that only
    imports it; else `holder`."""
    if isinstance(holder, ModuleType):
        source = sys.modules.get(definer(obj))
        if (
            source
            and source.__name__.split(".")[0] == holder.__name__.split(".")[0]
            and vars(source).get(name) is obj
        ):
            return source
    return holder


def definer(obj: Any) -> str:
    """The module whose code made `obj`; functools.wraps forges __module__, but not __globals__."""
    if isinstance(obj, FunctionType):
        return obj.__globals__.get("__name__", "?")
    return obj.__module__ if isinstance(obj, type) else type(obj).__module__


def describe(obj: Any) -> str:
    code = getattr(obj, "__code__", None)
    name = code.co_name if code else getattr(obj, "__name__", type(obj).__name__)
    return f"{definer(obj)}.{name}"


def live_instances(cls_target: str) -> int:
    """Live instances of a class that may not even be imported. One pass over the heap when patches are applied:
    counting from the start would need a patch in place before anybody asked for one."""
    module, _, name = cls_target.partition(":")
    cls = getattr(sys.modules.get(module), name, None)
    if cls is None or not _instances(cls):
        return 0
    gc.collect()  # a deleted model is often a cycle that has not been collected yet
    return len(_instances(cls))


def copies(old: Any, new: Any) -> Iterator[Site]:
    """Other places that hold `old`: names bound by `from m import f`, and classes captured in a ModuleSpec."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is old:
                    yield Site(module, name, value, new)
                elif type(value) is MethodType and value.__func__ is old:
                    yield Site(module, name, value, MethodType(new, value.__self__))
    specs = sys.modules.get("megatron.core.transformer.spec_utils")
    if specs is not None and isinstance(old, type):
        for spec in _instances(specs.ModuleSpec):
            if spec.module is old:
                yield Site(spec, "module", old, new)


def _instances(cls: type) -> list[Any]:
    return [o for o in gc.get_objects() if issubclass(type(o), cls)]
