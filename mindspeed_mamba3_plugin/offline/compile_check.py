"""Compile every kernel that the operator launches on an Ascend 910B, without one, and say what is wrong with it."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import product

from . import cases, hivm, toolchain
from .launches import ASCEND_910B3, Chip, Launch

MAX_PROGRAMS = 65535  # the runtime refuses a larger grid


@dataclass
class Row:
    """One kernel of one case under one compiler; no faults means that it passed."""

    case: cases.Case
    compiler: str
    entry: str
    kernel: str
    grid: tuple[int, ...] = ()
    used: dict[str, int] = field(default_factory=dict)  # bytes by on-chip memory, the larger of both halves
    faults: list[str] = field(default_factory=list)


def faults(compiled: toolchain.Compiled, halves: list[hivm.Half]) -> list[str]:
    """What is wrong with a compiled kernel, one sentence each."""
    if compiled.error:
        return [compiled.error, *compiled.notes]
    found = [f"the compiler fell back: {note}" for note in compiled.notes]
    for half in halves:
        for trips in half.scalar_loops:
            found.append(f"{half.name}: a scalar loop over {trips} elements of UB")
        if half.unplaced:
            found.append(f"{half.name}: {half.unplaced} on-chip buffers without an address")
        if half.atomics:
            found.append(f"{half.name}: {half.atomics} atomics")
        if half.split not in ("", "1:2"):
            found.append(f"{half.name}: the vector half is not split over both vector cores ({half.split})")
        for memory, size in half.used.items():
            if size > hivm.ON_CHIP[memory]:
                found.append(f"{half.name}: {memory} takes {size} of {hivm.ON_CHIP[memory]} bytes")
    if not halves:
        found.append("no function in the compiled module")
    return found


def grid_faults(launch: Launch, chip: Chip, mixed: bool) -> list[str]:
    """What is wrong with the number of programs of a launch."""
    programs, cores = math.prod(launch.grid), chip.cube_cores if mixed else chip.vector_cores
    found = []
    if programs > MAX_PROGRAMS:
        found.append(f"{programs} programs, at most {MAX_PROGRAMS} are allowed")
    elif programs > cores:
        found.append(f"{programs} programs for {cores} cores")
    return found


def check(case: cases.Case, compilers: list[str], chip: Chip, done: dict[tuple[str, str], Row]) -> list[Row]:
    """Compile all kernels of a case; `done` remembers what was compiled before."""
    from ..ops.triton import ascend

    available = toolchain.compilers()
    try:
        made = cases.passes(case, chip, ascend)
    except Exception as e:
        return [Row(case, c, "", "(launch)", faults=[f"{type(e).__name__}: {e}"]) for c in compilers]
    rows, seen = [], set()
    for entry, done_there in made.items():
        for launch in done_there.launches:
            if launch.key in seen:
                continue
            seen.add(launch.key)
            lowered = None
            for version in compilers:
                known = done.get((launch.key, version))
                if known is None:
                    lowered = lowered or toolchain.lower(launch, chip)
                    compiled = toolchain.compile_lowered(lowered, chip, available[version])
                    halves = hivm.read(compiled.hivm)
                    used = {m: max((h.used[m] for h in halves), default=0) for m in hivm.ON_CHIP}
                    wrong = faults(compiled, halves) + grid_faults(launch, chip, lowered.mixed)
                    known = Row(case, version, entry, launch.name, launch.grid, used, wrong)
                    done[launch.key, version] = known
                rows.append(Row(case, version, entry, launch.name, launch.grid, known.used, known.faults))
    return rows


def require(compilers: list[str]) -> None:
    """Raises ValueError when a compiler version is not unpacked here, naming those that are."""
    here = toolchain.compilers()
    if missing := [c for c in compilers if c not in here]:
        raise ValueError(
            f"ascendnpu-ir {', '.join(missing)} is not in this environment, {', '.join(here) or 'no version'} is "
            "(scripts/_ascend_env.sh: ensure_ascend_environment VERSION)"
        )


_done: dict[tuple[str, str], Row] = {}  # of this worker process


def own_temporary_folder() -> None:
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="ascend-check-")


def _check_shape(group: list[cases.Case], compilers: list[str], chip: Chip) -> list[Row]:
    return [row for case in group for row in check(case, compilers, chip, _done)]


def check_all(
    matrix: list[cases.Case], compilers: list[str], chip: Chip = ASCEND_910B3, jobs: int = 1
) -> Iterator[tuple[str, list[Row]]]:
    """The rows of all cases, shape by shape as they finish.

    Raises:
        ValueError: a compiler version that is not unpacked here.
    """
    require(compilers)
    groups: dict[tuple[str, str], list[cases.Case]] = {}
    for case in matrix:
        groups.setdefault((case.shape.name, case.dtype), []).append(case)
    with ProcessPoolExecutor(jobs, initializer=own_temporary_folder) as pool:
        running = {pool.submit(_check_shape, g, compilers, chip): name for name, g in groups.items()}
        for future in as_completed(running):
            yield " ".join(running[future]), future.result()


def matrix(shapes: list[str], dtypes: list[str], variants: list[str]) -> list[cases.Case]:
    """All combinations.

    Raises:
        ValueError: an unknown shape.
    """
    known = {s.name: s for s in cases.official_shapes()}
    for name in shapes:
        if name not in known:
            raise ValueError(f"unknown shape {name!r}: allowed are {', '.join(known)}")
    return [cases.Case(known[s], d, v) for s, d, v in product(shapes, dtypes, variants)]
