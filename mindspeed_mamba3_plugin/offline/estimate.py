"""The estimate of every kernel of the backward at the official shapes, against the times of an A100."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from . import cases, compile_check, hivm, toolchain
from .acceptance import ENTRIES, REQUIRED
from .cost import Constants, Estimate, Work, estimate
from .launches import ASCEND_910B3, Chip, Launch
from .work import of_launch

_RESOURCE = {"transfers": "memory", "cube calls": "memory"}  # of the units that only move data


@dataclass(frozen=True)
class Stage:
    """One launch of one entry point, or one operation of torch."""

    entry: str
    name: str
    work: Work


@dataclass(frozen=True)
class Verdict:
    """One entry point at one shape: its estimate by case of constants, and what the acceptance rule asks for."""

    shape: str
    entry: str
    ms: dict[str, float]
    a100_ms: float
    bound: str

    @property
    def required(self) -> float:
        return REQUIRED[self.bound]

    def ratio(self, fit: str) -> float:
        return self.a100_ms / self.ms[fit]

    def reaches(self, ratio: float, *fits: str) -> bool:
        return all(self.ratio(fit) >= ratio for fit in fits or self.ms)


def work_of(launch: Launch, compiled: toolchain.Compiled, chunks: int, chip: Chip) -> Work:
    """The work of a launch; chunks are those of one sequence, which kernels read from memory.

    Raises:
        ValueError: the kernel does not compile.
    """
    if compiled.error:
        raise ValueError(f"{launch.name} does not compile: {compiled.error}")
    arguments = hivm.argument_names(launch.numbers, launch.grid)
    programs = launch.grid[0] * launch.grid[1] * launch.grid[2]
    return of_launch(hivm.read(compiled.hivm, arguments, chunks), programs, chip.cube_cores, chip.vector_cores)


def stages(case: cases.Case, version: str, chip: Chip = ASCEND_910B3) -> list[Stage]:
    """Every launch and torch operation of bwd_fwd and bwd_bwd of one case."""
    from ..ops.triton import ascend

    made = cases.passes(case, chip, ascend)
    compiler = toolchain.compilers()[version]
    known: dict[str, toolchain.Compiled] = {}
    found = []
    for entry in ENTRIES:
        for launch in made[entry].launches:
            if launch.key not in known:
                known[launch.key] = toolchain.compile_lowered(toolchain.lower(launch, chip), chip, compiler)
            chunks = -(-cases.S // ascend.plain_plan(
                case.shape.N, case.shape.P, case.shape.R, cases.DTYPES[case.dtype], "npu"
            ).C)  # fmt: skip
            name = launch.name.strip("_").removesuffix("_kernel")
            found.append(Stage(entry, name, work_of(launch, known[launch.key], chunks, chip)))
        found += [
            Stage(entry, f"torch {call.name}", Work(memory_bytes=call.bytes)) for call in made[entry].torch_calls
        ]
    return found


def mean_works(stages: list[Stage]) -> dict[str, Work]:
    """By name, over its launches: what a profiler's mean time of a kernel is the time of."""
    names = dict.fromkeys(s.name for s in stages)
    return {n: sum(own[1:], own[0]) / len(own) for n in names if (own := [s.work for s in stages if s.name == n])}


def verdict(shape: str, entry: str, own: list[Stage], fits: dict[str, Constants]) -> Verdict:
    """The sum of an entry point's stages; its bound is the resource that takes most of the time in the first fit."""
    ms = {fit: sum(estimate(s.work, c).ns for s in own) / 1e6 for fit, c in fits.items()}
    spent: dict[str, float] = {}
    for stage in own:
        judged: Estimate = estimate(stage.work, next(iter(fits.values())))
        resource = _RESOURCE.get(judged.bound, judged.bound)
        if resource in REQUIRED:
            spent[resource] = spent.get(resource, 0) + judged.ns
    return Verdict(shape, entry, ms, cases.official_times()[shape][f"a100_{entry}_ms"], max(spent, key=spent.get))


def all_stages(shapes: list[str], dtype: str, version: str, jobs: int = 1) -> Iterator[tuple[str, list[Stage]]]:
    """The stages of each shape, in order."""
    matrix = compile_check.matrix(shapes, [dtype], ["plain"])
    with ProcessPoolExecutor(jobs, initializer=compile_check.own_temporary_folder) as pool:
        yield from zip(shapes, pool.map(stages, matrix, [version] * len(matrix)), strict=True)
