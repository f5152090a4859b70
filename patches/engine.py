"""Changes to other people's code as data, and the engine that applies, reverts and reports them."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module, metadata
from threading import RLock
from types import FunctionType, MethodType, ModuleType
from typing import Any

from packaging.requirements import Requirement

OURS = "mindspeed_mamba3_plugin"
_ABSENT: Any = object()


class PatchError(RuntimeError):
    """A patch cannot be applied or taken back; the message names the symbol and both parties."""


@dataclass(frozen=True)
class Patch:
    """One change to one symbol.

    Args:
        target: "module:dotted.name" of the symbol, the module being the one that defines it. The owner of the last
            name may be a module, a class or any object.
        reason: one line for the person who asks why.
        flag, value: the setting, and its value, with which the patch is wanted.
        requires: distribution and versions, "megatron-core>=0.16.1,<0.17"; empty for any.
        replacement: the new object; or
        wrapper: makes the new object from the original (from the function inside a staticmethod or classmethod).
        parameters: names of the parameters that the original must have; None where it is no function or class.
        built: "module:Class" whose live instances mean that a model was built too early for the patch.
        optional: the module may be absent; the patch is then left out.
        engine_only: another patch manager, which has no way to name the target, leaves it out.
    """

    target: str
    reason: str
    flag: str
    value: Any = True
    requires: str = ""
    replacement: Any = _ABSENT
    wrapper: Callable[[Any], Any] | None = None
    parameters: tuple[str, ...] | None = None
    built: str = ""
    optional: bool = False
    engine_only: bool = False

    def __post_init__(self) -> None:
        if self.target.count(":") != 1:
            raise ValueError(f"target {self.target!r}: must be 'module:dotted.name'")
        if (self.replacement is _ABSENT) == (self.wrapper is None):
            raise ValueError(f"patch of {self.target}: exactly one of replacement and wrapper must be given")

    def wanted(self, settings: Any) -> bool:
        """True when the patch's flag has its value in `settings`."""
        return getattr(settings, self.flag) == self.value


@dataclass(frozen=True)
class Status:
    """One line of a report. state: "applied", "would apply", "off", "absent" or "refused"; why is empty for the
    first two."""

    target: str
    state: str
    why: str
    flag: str
    reason: str


@dataclass
class _Site:
    """One place that holds, or held, the symbol."""

    holder: Any
    name: str
    before: Any  # the raw __dict__ entry
    after: Any

    @property
    def intact(self) -> bool:
        return _entry(self.holder, self.name) is self.after

    def put(self) -> None:
        setattr(self.holder, self.name, self.after)

    def restore(self) -> None:
        if self.before is _ABSENT:
            delattr(self.holder, self.name)
        else:
            setattr(self.holder, self.name, self.before)


class _ModuleAbsent(PatchError):
    pass


class Engine:
    """Applies patches in order and all or none of them, once, from any thread; keeps what it needs to revert them."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._applied: dict[str, tuple[Patch, list[_Site]]] = {}  # sites: the symbol itself, then its copies

    @property
    def applied(self) -> tuple[str, ...]:
        """Targets of the patches in force, in the order of application."""
        with self._lock:
            return tuple(self._applied)

    def apply(self, patches: Iterable[Patch]) -> tuple[str, ...]:
        """Apply what is not applied yet; returns the targets that this call changed.

        Raises:
            PatchError: one of the patches cannot be applied. None of this call's changes remain.
        """
        with self._lock:
            todo: dict[str, tuple[Patch, _Site]] = {}
            for patch in patches:
                if patch.target in todo:
                    other = todo[patch.target][0].reason
                    raise PatchError(f"{patch.target}: patched twice, for {other!r} and for {patch.reason!r}")
                try:
                    site = self._check(patch)
                except _ModuleAbsent:
                    if not patch.optional:
                        raise
                    continue
                if site is not None:
                    todo[patch.target] = (patch, site)
            done: list[str] = []
            try:
                for patch, site in todo.values():
                    done.append(patch.target)
                    self._install(patch, site)
            except Exception as error:
                for target in reversed(done):
                    self._take_back(target)
                raise PatchError(f"{done[-1]}: cannot be patched: {error!r} (nothing was changed)") from error
            return tuple(done)

    def revert(self) -> tuple[str, ...]:
        """Put back every original, last patch first; returns the targets.

        Raises:
            PatchError: somebody replaced a symbol after us. Nothing is put back then.
        """
        with self._lock:
            for target, (_, (site, *_copies)) in self._applied.items():
                if not site.intact:
                    raise PatchError(_on_top(target, site))
            targets = tuple(reversed(self._applied))
            for target in targets:
                self._take_back(target)
            return targets

    def report(self, patches: Iterable[Patch], settings: Any) -> list[Status]:
        """What is applied, what would be with these settings, and why not. Imports the patched modules."""
        with self._lock:
            return [Status(p.target, *self._state(p, settings), p.flag, p.reason) for p in patches]

    def _state(self, patch: Patch, settings: Any) -> tuple[str, str]:
        if not patch.wanted(settings) and patch.target not in self._applied:
            return "off", f"{patch.flag} is {getattr(settings, patch.flag)!r}, not {patch.value!r}"
        try:
            return ("would apply" if self._check(patch) else "applied"), ""
        except _ModuleAbsent as error:
            return ("absent" if patch.optional else "refused"), str(error)
        except PatchError as error:
            return "refused", str(error)

    def _check(self, patch: Patch) -> _Site | None:
        """Where to apply the patch; None when it is applied already."""
        if patch.target in self._applied:
            ours, (site, *_) = self._applied[patch.target]
            if not site.intact:
                raise PatchError(_on_top(patch.target, site))
            if ours != patch:
                raise PatchError(f"{patch.target}: {OURS} patches it already, for {ours.reason!r}; revert() first")
            return None
        version = check_version(patch)
        holder, name, raw = _locate(patch.target, version)
        function = _inner(raw)
        home = _home(holder, name)
        if patch.parameters is not None:
            if not isinstance(function, (FunctionType, type)) or _definer(function) != home:
                raise PatchError(
                    f"{patch.target}: {_describe(function)} has replaced the original, which {OURS} would patch: "
                    "switch one of the two off"
                )
            if (found := tuple(inspect.signature(function).parameters)) != patch.parameters:
                wanted = ", ".join(patch.parameters)
                raise PatchError(f"{patch.target}{version} takes ({', '.join(found)}), {OURS} expects ({wanted})")
        if patch.built and (n := _live_instances(patch.built)):
            raise PatchError(
                f"{patch.target}: a model with {n} {patch.built.partition(':')[2]} was built before: call enable() before "
                "the model is built, or delete that model first"
            )
        return _Site(holder, name, _entry(holder, name), _replacement(patch, raw))

    def _install(self, patch: Patch, site: _Site) -> None:
        old = _inner(inspect.getattr_static(site.holder, site.name))
        site.put()
        sites = [site]
        self._applied[patch.target] = (patch, sites)
        if isinstance(old, (FunctionType, type)):
            for copy in _copies(old, _inner(site.after)):
                copy.put()
                sites.append(copy)

    def _take_back(self, target: str) -> None:
        _, (site, *copies) = self._applied.pop(target, (None, [None]))
        if site is not None:
            site.restore()
        for copy in copies:
            if copy.intact:  # otherwise its owner has bound the name to something else since
                copy.restore()


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


def check_version(patch: Patch) -> str:
    """Check the version range; returns " of <distribution> <version>" for messages.

    Raises:
        PatchError: not installed, or outside the range.
    """
    if not patch.requires:
        return ""
    wanted = Requirement(patch.requires)
    found = installed_version(wanted.name)
    if found is None:
        raise PatchError(f"{patch.target}: needs {patch.requires}, and {wanted.name} is not installed")
    if not wanted.specifier.contains(found, prereleases=True):
        raise PatchError(f"{patch.target}: {OURS} knows {patch.requires}, installed is {wanted.name} {found}")
    return f" of {wanted.name} {found}"


def _locate(target: str, version: str) -> tuple[Any, str, Any]:
    """(owner, last name, raw attribute) of a target; raw: a staticmethod is not unwrapped."""
    module, _, path = target.partition(":")
    try:
        holder: Any = import_module(module)
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise _ModuleAbsent(f"{target}: there is no module {error.name}{version}") from error
        raise PatchError(f"{target}: importing {module}{version} failed: {error}") from error
    except Exception as error:
        raise PatchError(f"{target}: importing {module}{version} failed: {error!r}") from error
    *owners, name = path.split(".")
    try:
        for owner in owners:
            holder = getattr(holder, owner)
        return holder, name, inspect.getattr_static(holder, name)
    except AttributeError as error:
        raise PatchError(f"{target}: {module}{version} has no {path}, which {OURS} would patch") from error


def _replacement(patch: Patch, raw: Any) -> Any:
    """What takes the place of `raw`: of the same kind, where that is a staticmethod or classmethod."""
    if patch.wrapper is None:
        new = patch.replacement
    else:
        try:
            new = patch.wrapper(_inner(raw))
        except Exception as error:
            raise PatchError(f"{patch.target}: cannot be patched: {error}") from error
    return type(raw)(new) if _inner(raw) is not raw and not isinstance(new, type(raw)) else new


def _entry(holder: Any, name: str) -> Any:
    return vars(holder).get(name, _ABSENT)


def _inner(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, (staticmethod, classmethod)) else raw


def _home(holder: Any, name: str) -> str:
    """The module in which an unpatched attribute is defined."""
    if isinstance(holder, type):
        return next(c for c in holder.__mro__ if name in vars(c)).__module__
    return holder.__name__ if isinstance(holder, ModuleType) else type(holder).__module__


def _definer(obj: Any) -> str:
    """The module whose code made `obj`; functools.wraps forges __module__, but not __globals__."""
    if isinstance(obj, FunctionType):
        return obj.__globals__.get("__name__", "?")
    return obj.__module__ if isinstance(obj, type) else type(obj).__module__


def _describe(obj: Any) -> str:
    code = getattr(obj, "__code__", None)
    name = code.co_name if code else getattr(obj, "__name__", type(obj).__name__)
    return f"{_definer(obj)}.{name}"


def _on_top(target: str, site: _Site) -> str:
    now = _entry(site.holder, site.name)
    who = "somebody has deleted" if now is _ABSENT else f"{_describe(_inner(now))} has replaced"
    return f"{target}: {who} the patch of {OURS} ({_describe(_inner(site.after))}): take that back first"


def _live_instances(cls_target: str) -> int:
    """Live instances of a class that may not even be imported. One pass over the heap when patches are applied:
    counting from the start would need a patch in place before anybody asked for one."""
    module, _, name = cls_target.partition(":")
    cls = getattr(sys.modules.get(module), name, None)
    if cls is None or not _instances(cls):
        return 0
    gc.collect()  # a deleted model is often a cycle that has not been collected yet
    return len(_instances(cls))


def _instances(cls: type) -> list[Any]:
    return [o for o in gc.get_objects() if issubclass(type(o), cls)]


def _copies(old: Any, new: Any) -> Iterator[_Site]:
    """Other places that hold `old`: names bound by `from m import f`, and classes captured in a ModuleSpec."""
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if value is old:
                    yield _Site(module, name, value, new)
                elif type(value) is MethodType and value.__func__ is old:
                    yield _Site(module, name, value, MethodType(new, value.__self__))
    specs = sys.modules.get("megatron.core.transformer.spec_utils")
    if specs is not None and isinstance(old, type):
        for spec in _instances(specs.ModuleSpec):
            if spec.module is old:
                yield _Site(spec, "module", old, new)
