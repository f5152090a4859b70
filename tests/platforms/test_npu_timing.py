"""Times on an NPU: what is made of the profiler's statistics and of events, without one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from npu_clock import Clock

from mindspeed_mamba3_plugin.platforms import npu_timing
from mindspeed_mamba3_plugin.platforms.npu_timing import KernelTime

HEAD = "Device_id,OP Type,Core Type,Count,Total Time(us),Min Time(us),Avg Time(us),Max Time(us),Ratio(%)\n"
STATISTICS = (
    "\ufeff" + HEAD + "0,_products_kernel,MIX_AIC,3,6000.0,1900,2000,2100,60\n"
    "0,_outer_kernel,AI_CORE,6,1200.0,190,200,210,12\n0,ReduceSum,AI_VECTOR_CORE,5,100.0,1,20,30,1\n"
    "0,ReduceSum,MIX_AIV,1,20.0,20,20,20,1\n"
)


def statistics(tmp_path: Path, text: str, calls: int) -> dict[str, KernelTime]:
    path = tmp_path / npu_timing.STATISTICS
    path.write_text(text, encoding="utf-8")
    return npu_timing.statistics(path, calls)


def test_statistics_are_per_call(tmp_path):
    found = statistics(tmp_path, STATISTICS, 3)
    assert found["_products_kernel"] == KernelTime(1, 2.0)
    assert found["_outer_kernel"] == KernelTime(2, 0.4)
    assert found["ReduceSum"].launches == 2 and found["ReduceSum"].ms == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("text", "calls", "message"),
    [
        (STATISTICS, 4, "3 launches of _products_kernel in 4 calls: the profiler lost some"),
        (STATISTICS.replace("Total Time(us)", "Time"), 3, r"without OP Type, Count and Total Time\(us\)"),
        (HEAD, 3, "no kernel in it"),
    ],
)
def test_statistics_that_cannot_be_right_are_refused(tmp_path, text, calls, message):
    with pytest.raises(RuntimeError, match=message):
        statistics(tmp_path, text, calls)


def test_parts_of_a_call_are_timed_apart(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(torch, "npu", clock, raising=False)
    parts = [lambda none: clock.work(2.0, "residuals"), lambda given: clock.work(5.0) or given]
    assert npu_timing.elapsed(parts, 3) == [[2.0, 5.0]] * 3
    assert clock.waits == 3


@pytest.mark.parametrize("left", [True, False])
def test_profile(monkeypatch, tmp_path, left):
    """The profiler is asked for types of kernels, sees as many calls as it divides by, and none of the warm-up."""
    clock, seen = Clock(), []

    class Profile:
        def __init__(self, **options):
            self.options = options

        def __enter__(self):
            seen.clear()

        def __exit__(self, *_):
            assert (
                self.options["activities"] == ["npu"] and self.options["experimental_config"]["profiler_level"] == 1
            )
            if left:
                self.options["on_trace_ready"](f"0,_outer_kernel,AI_CORE,{len(seen)},{500.0 * len(seen)},,,,\n")

    def handler(folder: str):
        def write(row: str) -> None:
            path = Path(folder) / "host_ascend_pt/ASCEND_PROFILER_OUTPUT"
            path.mkdir(parents=True)
            (path / npu_timing.STATISTICS).write_text(HEAD + row)

        return write

    profiler = SimpleNamespace(
        profile=Profile, tensorboard_trace_handler=handler, _ExperimentalConfig=dict,
        ProfilerActivity=SimpleNamespace(NPU="npu"), ProfilerLevel=SimpleNamespace(Level1=1),
        AiCMetrics=SimpleNamespace(PipeUtilization="pipes"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(profiler=profiler))
    monkeypatch.setattr(torch, "npu", clock, raising=False)
    calls = [lambda: seen.append(1)] * 3
    if left:
        assert npu_timing.profiled(calls, tmp_path) == {"_outer_kernel": KernelTime(1, 0.5)}
        assert len(seen) == 3 and clock.waits == 4
    else:
        with pytest.raises(RuntimeError, match=r"left 0 files op_statistic\.csv"):
            npu_timing.profiled(calls, tmp_path)
