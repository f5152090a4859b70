"""Times on an NPU: of every kernel, by torch_npu's profiler (msprof in the process), and of whole calls, by events.

triton-ascend's own benchmark uses the same profiler but reports one kernel of what it runs, and an operator here is
many. Never run on a chip: docs/ascend.md.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

STATISTICS = "op_statistic.csv"  # the profiler's sums by kernel


@dataclass(frozen=True)
class KernelTime:
    """One kernel's share of a call."""

    launches: float
    ms: float  # all launches together


def profiled(calls: Sequence[Callable[[], object]], folder: Path) -> dict[str, KernelTime]:
    """Device time of every kernel of one call, the mean over `calls`; the profiler's files stay in `folder`.

    Raises:
        RuntimeError: the profiler left no statistics, or lost launches.
    """
    import torch_npu

    p = torch_npu.profiler
    for call in calls:
        call()
    torch.npu.synchronize()
    with p.profile(
        activities=[p.ProfilerActivity.NPU],
        on_trace_ready=p.tensorboard_trace_handler(str(folder)),
        experimental_config=p._ExperimentalConfig(
            aic_metrics=p.AiCMetrics.PipeUtilization,
            profiler_level=p.ProfilerLevel.Level1,  # below it the kernels have no types, by which they are summed
            data_simplification=False,
        ),
    ):
        for call in calls:
            call()
            torch.npu.synchronize()
    files = sorted(folder.rglob(STATISTICS))
    if len(files) != 1:
        raise RuntimeError(
            f"the profiler left {len(files)} files {STATISTICS} in {folder}, one was expected: look into its logs "
            "there, and whether 'msprof' of this CANN runs"
        )
    return statistics(files[0], len(calls))


def statistics(path: Path, calls: int) -> dict[str, KernelTime]:
    """The kernels of one of `calls` equal calls, from an op_statistic.csv.

    Raises:
        RuntimeError: other columns, no kernel, or a Triton kernel whose launches `calls` does not divide.
    """
    found: dict[str, KernelTime] = {}
    with path.open(newline="", encoding="utf-8-sig") as lines:
        for row in csv.DictReader(lines):
            try:
                name, count, us = row["OP Type"].strip(), int(row["Count"]), float(row["Total Time(us)"])
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise RuntimeError(f"{path}: a row without OP Type, Count and Total Time(us): {row}") from error
            if name.endswith("_kernel") and count % calls:
                raise RuntimeError(f"{path}: {count} launches of {name} in {calls} calls: the profiler lost some")
            before = found.get(name, KernelTime(0, 0.0))  # a kernel has a row for each type of core
            found[name] = KernelTime(before.launches + count / calls, before.ms + us / calls / 1e3)
    if not found:
        raise RuntimeError(f"{path}: no kernel in it")
    return found


def elapsed(parts: Sequence[Callable[[object], object]], repeats: int) -> list[list[float]]:
    """Milliseconds of each part of a call, for each repetition, gaps between kernels included. A part is given what
    the part before it returned, the first None."""
    rows = []
    for _ in range(repeats):
        events = [torch.npu.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        value: object = None
        events[0].record()
        for part, event in zip(parts, events[1:], strict=True):
            value = part(value)
            event.record()
        torch.npu.synchronize()
        rows.append([a.elapsed_time(b) for a, b in itertools.pairwise(events)])
    return rows
