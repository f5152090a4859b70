"""A direct translation of the two backward kernels, compiled and estimated for comparison with the plugin's own."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import ModuleType

import torch

from . import cases, compile_check, toolchain
from .cost import Work
from .estimate import ENTRIES, work_of
from .launches import ASCEND_910B3, Chip, Launch, intercepted


def load(path: Path) -> ModuleType:
    """The file with `prepare`, `bwd_fwd` and `bwd_bwd`.

    Raises:
        ValueError: there is no such file, or it lacks one of them.
    """
    if not path.is_file():
        raise ValueError(f"--plain-port is {path}: no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if missing := [name for name in ("prepare", *ENTRIES) if not hasattr(module, name)]:
        raise ValueError(f"--plain-port is {path}: it has no {', '.join(missing)}")
    return module


def judged(path: Path, case: cases.Case, version: str, chip: Chip = ASCEND_910B3) -> dict[str, Work | str]:
    """The work of each of its two kernels, or the reason why it does not compile."""
    port, x = load(path), cases.inputs(case)
    grad_out = torch.empty_like(x.V)
    sums = port.prepare(x)
    made: list[Launch] = []
    with intercepted(chip, made.append):
        first = port.bwd_fwd(x, sums, grad_out)
        port.bwd_bwd(x, sums, grad_out, first["states"])
    found: dict[str, Work | str] = {}
    for entry, launch in zip(ENTRIES, made, strict=True):
        compiled = toolchain.compile_lowered(toolchain.lower(launch, chip), chip, toolchain.compilers()[version])
        found[entry] = compiled.error or work_of(launch, compiled, 1, chip)
    return found


def all_judged(path: Path, matrix: list[cases.Case], version: str, jobs: int) -> dict[str, dict[str, Work | str]]:
    """By shape."""
    names = [case.shape.name for case in matrix]
    with ProcessPoolExecutor(jobs, initializer=compile_check.own_temporary_folder) as pool:
        return dict(zip(names, pool.map(judged, [path] * len(matrix), matrix, [version] * len(matrix)), strict=True))
