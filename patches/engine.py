"""Changes to other people's code as data, and the engine that applies, reverts and reports them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import RLock
from types import FunctionType
from typing import Any

from packaging.requirements import Requirement

from .symbols import (
    ABSENT,
    OURS,
    ModuleAbsent,
    PatchError,
    Site,
    copies,
    definer,
    describe,
    entry,
    home,
    inner,
    installed_version,
    live_instances,
    locate,
    origin,
)


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
        older: other lists of parameters, which other versions in the range have.
        built: "module:Class" whose live instances mean that a model was built too early for the patch.
        optional: the module, or one that it needs, may be absent; the patch is then left out.
        engine_only: another patch manager, which has no way to name the target, leaves it out.
    """

    target: str
    reason: str
    flag: str
    value: Any = True
    requires: str = ""
    replacement: Any = ABSENT
    wrapper: Callable[[Any], Any] | None = None
    parameters: tuple[str, ...] | None = None
    older: tuple[tuple[str, ...], ...] = ()
    built: str = ""
    optional: bool = False
    engine_only: bool = False

    def __post_init__(self) -> None:
        if self.target.count(":") != 1:
            raise ValueError(f"target {self.target!r}: must be 'module:dotted.name'")
        if (self.replacement is ABSENT) == (self.wrapper is None):
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


class Engine:
    """Applies patches in order and all or none of them, once, from any thread; keeps what it needs to revert them."""

    def __init__(self) -> None:
        self._lock = RLock()
        self._applied: dict[str, tuple[Patch, list[Site]]] = {}  # sites: the symbol itself, then its copies

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
            todo: dict[str, tuple[Patch, Site]] = {}
            for patch in patches:
                if patch.target in todo:
                    other = todo[patch.target][0].reason
                    raise PatchError(f"{patch.target}: patched twice, for {other!r} and for {patch.reason!r}")
                try:
                    site = self._check(patch)
                except ModuleAbsent:
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
            for target, (_, (site, *_)) in self._applied.items():
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
        except ModuleAbsent as error:
            return ("absent" if patch.optional else "refused"), str(error)
        except PatchError as error:
            return "refused", str(error)

    def _check(self, patch: Patch) -> Site | None:
        """Where to apply the patch; None when it is applied already."""
        if patch.target in self._applied:
            ours, (site, *_) = self._applied[patch.target]
            if not site.intact:
                raise PatchError(_on_top(patch.target, site))
            if ours != patch:
                raise PatchError(f"{patch.target}: {OURS} patches it already, for {ours.reason!r}; revert() first")
            return None
        version = check_version(patch)
        holder, name, raw = locate(patch.target, version)
        function = inner(raw)
        holder = origin(holder, name, function)
        if patch.parameters is not None:
            if not isinstance(function, (FunctionType, type)) or definer(function) != home(holder, name):
                raise PatchError(
                    f"{patch.target}: {describe(function)} has replaced the original, which {OURS} would patch: "
                    "switch one of the two off"
                )
            allowed = (patch.parameters, *patch.older)
            if (found := tuple(inspect.signature(function).parameters)) not in allowed:
                wanted = " or ".join(f"({', '.join(names)})" for names in allowed)
                raise PatchError(f"{patch.target}{version} takes ({', '.join(found)}), {OURS} expects {wanted}")
        if patch.built and (n := live_instances(patch.built)):
            raise PatchError(
                f"{patch.target}: a model with {n} {patch.built.partition(':')[2]} was built before: call enable() "
                "before the model is built, or delete that model first"
            )
        return Site(holder, name, entry(holder, name), _replacement(patch, raw))

    def _install(self, patch: Patch, site: Site) -> None:
        old = inner(inspect.getattr_static(site.holder, site.name))
        site.put()
        sites = [site]
        self._applied[patch.target] = (patch, sites)
        if isinstance(old, (FunctionType, type)):
            for copy in copies(old, inner(site.after)):
                copy.put()
                sites.append(copy)

    def _take_back(self, target: str) -> None:
        _, (site, *others) = self._applied.pop(target, (None, [None]))
        if site is not None:
            site.restore()
        for copy in others:
            if copy.intact:  # otherwise its owner has bound the name to something else since
                copy.restore()


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


def _replacement(patch: Patch, raw: Any) -> Any:
    """What takes the place of `raw`: of the same kind, where that is a staticmethod or classmethod."""
    if patch.wrapper is None:
        new = patch.replacement
    else:
        try:
            new = patch.wrapper(inner(raw))
        except Exception as error:
            raise PatchError(f"{patch.target}: cannot be patched: {error}") from error
    return type(raw)(new) if inner(raw) is not raw and not isinstance(new, type(raw)) else new


def _on_top(target: str, site: Site) -> str:
    now = entry(site.holder, site.name)
    who = "somebody has deleted" if now is ABSENT else f"{describe(inner(now))} has replaced"
    return f"{target}: {who} the patch of {OURS} ({describe(inner(site.after))}): take that back first"
