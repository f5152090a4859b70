"""The acceptance script without a chip: the report on hand-made times, and the dry run."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from npu_clock import Clock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import npu_acceptance  # noqa: E402
import npu_measure  # noqa: E402
import npu_report  # noqa: E402

from mindspeed_mamba3_plugin.offline import calibrate, cases  # noqa: E402
from mindspeed_mamba3_plugin.offline.report import acceptance_table  # noqa: E402
from mindspeed_mamba3_plugin.ops.api import planted  # noqa: E402
from mindspeed_mamba3_plugin.platforms.npu_timing import KernelTime  # noqa: E402
from mindspeed_mamba3_plugin.training.compare import variants  # noqa: E402
from mindspeed_mamba3_plugin.training.config import RunConfig  # noqa: E402

SHAPE = "N128_P64_R4_C16"


def test_the_second_entry_is_the_difference():
    both = {"a": KernelTime(1, 2.0), "scores": KernelTime(2, 0.8), "b": KernelTime(1, 3.0)}
    first = {"a": KernelTime(1, 2.1), "scores": KernelTime(1, 0.3)}
    found = npu_measure.difference(both, first)
    assert found == {"scores": KernelTime(1, pytest.approx(0.5)), "b": KernelTime(1, 3.0)}


def result(shape: str, ms: dict[str, float], **more) -> dict:
    """What npu_measure.py leaves of a shape, with hand-made times of three stages."""
    error = {"dq": {"l2": 0.004, "mean": 0.003}, "dk": {"l2": 0.003, "mean": 0.004}}
    small = {name: {"l2": 1e-6, "mean": 1e-6} for name in error}
    kernels = {
        "bwd_fwd": {"_scores_kernel": {"launches": 1, "ms": 0.2}, "ReduceSum": {"launches": 2, "ms": 0.1}},
        "bwd_bwd": {
            "_scores_kernel": {"launches": 1, "ms": 0.4}, "_products_kernel": {"launches": 1, "ms": 2.0},
            "_rotate_bwd_kernel": {"launches": 1, "ms": 1.0},
        },
    }  # fmt: skip
    return {
        "shape": shape, "dtype": "bf16", "dry_run": False, "errors": {"bf16": error, "fp32": small},
        "above_standard": [], "same_bits": True, "kernels": kernels, "device_ms": ms,
        "elapsed_ms": {"forward": 1.0, **{entry: t + 1 for entry, t in ms.items()}},
    } | more  # fmt: skip


def test_calibration_is_what_the_estimates_read(tmp_path):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(npu_report.calibration(result(SHAPE, {}))))
    measured = calibrate.read(path)
    assert (measured.shape, measured.dtype) == (SHAPE, "bf16")
    assert measured.ms == {"scores": pytest.approx(0.3), "products": 2.0, "rotate_bwd": 1.0}


def written(folder: Path, results: list[dict], steps: list[dict] | None = None, dry_run: bool = False) -> int:
    for found in results:
        path = folder / "shapes" / found["shape"] / "result.json"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(found))
    passed = [{"name": "tests", "status": "passed", "seconds": 1.0, "log": "", "detail": "3 passed"}]
    return npu_report.write(folder, passed if steps is None else steps, dry_run)


def test_report_where_the_rule_is_met(tmp_path, capsys):
    small = "N16_P64_R4_C8"  # by name it would come last
    fast = [result(SHAPE, {"bwd_fwd": 2.5, "bwd_bwd": 4.0}), result(small, {"bwd_fwd": 2.0, "bwd_bwd": 2.0})]
    assert written(tmp_path, fast) == 0
    said = capsys.readouterr().out
    assert f"| bwd_fwd {SHAPE} | 2.500 | 2.323 | 0.93 | met" in said and "PASS  1 processes passed" in said
    times = json.loads((tmp_path / "times.json").read_text())
    assert list(times["ms"]) == [small, SHAPE] and times["ms"][SHAPE]["products"] == 2.0
    assert times["dry_run"] is False and times["versions"]["torch"] and "compiler" in times["versions"]
    text = (tmp_path / "report.md").read_text()
    assert f"| bwd_fwd {SHAPE} | 3.500 |" in text  # by events
    assert "| products | 2.000 | 2.000 |" in text and f"| {SHAPE} | 4.0e-03 dq | 1.0e-06 dq |" in text
    assert "DRY RUN" not in text
    assert calibrate.read(tmp_path / f"calibration/{SHAPE}.json").shape == SHAPE


def test_report_where_it_is_missed(tmp_path, capsys):
    assert written(tmp_path, [result(SHAPE, {"bwd_fwd": 3.9, "bwd_bwd": 4.0})]) == 1
    assert "FAIL  1 processes passed; bwd_fwd misses 0.6 of an A100 at 1 of 1 shapes\n" in capsys.readouterr().out


def test_a_failed_step_fails_the_report(tmp_path, capsys):
    steps = [{"name": "loss_curve", "status": "missing", "seconds": 0.0, "log": "", "detail": "einops: pip install"}]
    assert written(tmp_path, [result(SHAPE, {"bwd_fwd": 1.0, "bwd_bwd": 1.0})], steps) == 1
    assert "FAIL  not passed: loss_curve" in capsys.readouterr().out
    (tmp_path / "nothing").mkdir()
    assert written(tmp_path / "nothing", [], []) == 1


def test_a_dry_run_says_so_everywhere(tmp_path, capsys):
    slow = result(SHAPE, {"bwd_fwd": 300.0, "bwd_bwd": 400.0}, dry_run=True)
    assert written(tmp_path, [slow], dry_run=True) == 0
    said, text = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    assert "a dry run: the times above are not of a chip" in said and "| ms in the dry run |" in said
    assert npu_report.DRY in text and "| ms |" not in text
    assert json.loads((tmp_path / "times.json").read_text())["dry_run"] is True


def test_dry_run_of_one_shape(tmp_path):
    """The kernels of both entry points, by the names of the estimates, in the interpreter."""
    found = npu_measure.measure("N16_P64_R4_C8", tmp_path / "N16_P64_R4_C8", dry_run=True)
    assert found["dry_run"] and found["same_bits"] and not found["above_standard"]
    assert {"dq", "dk", "dv", "dadt", "ddt", "dtrap", "dangles"} < set(found["errors"]["bf16"])
    stages = npu_report.per_launch(found)
    assert set(calibrate.SUGGESTED) <= set(stages) and "gate" not in stages  # of the forward alone
    assert all(found["kernels"].values())
    assert all(ms > 0 for ms in (*stages.values(), *found["elapsed_ms"].values()))
    assert json.loads((tmp_path / "N16_P64_R4_C8/result.json").read_text()) == json.loads(json.dumps(found))


class Stages:
    """A family whose entry points take time on a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def forward(self, x):
        self.clock.work(1.0)

    def bwd_fwd(self, x, grad_out):
        return self.clock.work(2.0, "residuals")

    def bwd_bwd(self, x, residuals):
        assert residuals == "residuals"
        self.clock.work(5.0)

    def backward(self, x, grad_out):
        self.bwd_bwd(x, self.bwd_fwd(x, grad_out))


@pytest.mark.parametrize("profiler", [True, False])
def test_times_on_a_chip(monkeypatch, tmp_path, profiler):
    clock, profiled_calls = Clock(), []
    monkeypatch.setattr(torch, "npu", clock, raising=False)
    monkeypatch.setattr(npu_measure.registry, "load", lambda name: Stages(clock))

    def profiled(calls, folder):
        profiled_calls.append(len(calls))
        if not profiler:
            raise RuntimeError("left 0 files")
        before = clock.now
        calls[0]()
        first = {"_scores_kernel": KernelTime(1, 1.5)}
        return first if clock.now - before == 2.0 else {**first, "_products_kernel": KernelTime(1, 4.0)}

    monkeypatch.setattr(npu_measure, "profiled", profiled)
    found = npu_measure.on_chip([("x", "g"), ("y", "h")], tmp_path)
    assert found["elapsed_ms"] == {"forward": 1.0, "bwd_fwd": 2.0, "bwd_bwd": 5.0}
    if profiler:
        assert profiled_calls == [6, 6] and "profile_error" not in found
        assert found["device_ms"] == {"bwd_fwd": 1.5, "bwd_bwd": 4.0}
        assert found["kernels"]["bwd_bwd"] == {"_products_kernel": {"launches": 1, "ms": 4.0}}
    else:
        assert found["device_ms"] == {"bwd_fwd": 2.0, "bwd_bwd": 5.0} and found["profile_error"] == "left 0 files"


def test_report_without_times_by_kernel(tmp_path):
    none = {"kernels": {"bwd_fwd": {}, "bwd_bwd": {}}, "profile_error": "left 0 files"}
    assert written(tmp_path, [result(SHAPE, {"bwd_fwd": 2.5, "bwd_bwd": 4.0}, **none)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert f"where it failed: {SHAPE}, left 0 files" in text and f"| bwd_fwd {SHAPE} | 2.500 |" in text
    assert not list((tmp_path / "calibration").iterdir())


def test_the_direct_translation_is_timed_beside_it_or_says_why_not(monkeypatch, tmp_path):
    x = npu_measure.make_inputs("N16_P64_R4_C8", 1, 16, 2, 1, torch.bfloat16, "cpu")
    found = npu_measure.direct_translation(x, npu_measure.gradient_of(x, 1), dry_run=True)
    assert set(found) == {"bwd_fwd", "bwd_bwd"} and min(found.values()) > 0

    def overflow(*_):
        raise RuntimeError("ub overflow, requires 5111808 bits\nand more")

    monkeypatch.setattr(npu_measure.plain_port, "bwd_fwd", overflow)
    refused = npu_measure.direct_translation(x, npu_measure.gradient_of(x, 1), dry_run=True)
    assert refused == {"error": "RuntimeError: ub overflow, requires 5111808 bits\nand more"}
    small, ms = "N16_P64_R4_C8", {"bwd_fwd": 1.0, "bwd_bwd": 1.0}
    results = [
        result(small, ms, direct_translation_ms=refused),
        result(SHAPE, ms, direct_translation_ms={**ms, "bwd_bwd": 8.0}),
    ]
    written(tmp_path, results)
    text = (tmp_path / "report.md").read_text()
    assert f"| bwd_bwd {SHAPE} | 2.000 | 8.000 | 4.0x |" in text
    assert f"| bwd_fwd {small} | 2.000 | RuntimeError: ub overflow, requires 5111808 bits |  |" in text


def test_errors_above_the_standard_are_named(monkeypatch):
    good = {"l2": 1e-6, "mean": 1e-6}
    found = {"fp32": {"dq": good, "dk": {"l2": math.nan, "mean": 1e-6}}, "bf16": {"dv": {"l2": 0.006, "mean": 1.0}}}
    assert npu_measure.above_standard(found, npu_measure.STANDARD) == [
        "bf16 dv: l2 error 6.0e-03, allowed 5e-03",
        "fp32 dk: l2 error nan, allowed 1e-04",
    ]
    from mindspeed_mamba3_plugin.ops import call, registry

    monkeypatch.setattr(
        registry, "load", lambda name, load=registry.load: Through(name) if "ascend" in name else load(name)
    )

    class Through:
        def __init__(self, name: str) -> None:
            self.name = name

        def forward(self, x):
            return call.forward(x, "reference")

        def backward(self, x, grad_out):
            with planted({"dk": 1.002}):
                return call.backward(x, grad_out, "reference")

    found = {"fp32": npu_measure.errors("N16_P64_R4_C8", "fp32", "cpu", 20, 2)}
    wrong = npu_measure.above_standard(found, ["fp32"])
    assert wrong and all(line.startswith("fp32 dk: ") for line in wrong)


def test_the_next_process_runs_whatever_happens(tmp_path):
    (tmp_path / "logs").mkdir()
    run, env = npu_acceptance.run, npu_acceptance.environment(True)
    broken = run("a", [sys.executable, "-c", "print('why'); raise SystemExit(3)"], tmp_path, 60, env)
    assert (broken.status, broken.detail) == ("failed", "exit status 3: why")
    started = time.monotonic()
    hung = run("b", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, 1, env)
    assert hung.status == "failed" and "did not end within 1 s" in hung.detail and time.monotonic() - started < 30
    fine = run(
        "c",
        [sys.executable, "-c", "import os; print(os.environ['ASCEND_RT_VISIBLE_DEVICES'] == '')"],
        tmp_path,
        60,
        env,
    )
    assert (fine.status, fine.detail) == ("passed", "True")
    assert (tmp_path / "logs/a.log").read_text().splitlines()[-1] == "why"


def test_what_a_step_lacks_is_named_with_its_remedy(monkeypatch, tmp_path, capsys):
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(npu_acceptance, "_importable", lambda name: name != "tensorboard")
    (step,) = npu_acceptance.run_all(tmp_path, ["loss_curve"], [SHAPE], dry_run=True)
    assert step.status == "missing" and step.detail == "tensorboard: pip install tensorboard"
    assert "loss_curve: missing" in capsys.readouterr().out


def test_every_shape_is_measured_in_a_process_of_its_own(tmp_path):
    shapes = [s.name for s in cases.official_shapes()]
    made = npu_acceptance.commands("measure", tmp_path, shapes, dry_run=False)
    assert len(made) == 11 and made[f"measure_{SHAPE}"][-4:] == [
        "--shape",
        SHAPE,
        "--output",
        str(tmp_path / "shapes" / SHAPE),
    ]
    assert all("--dry-run" not in command for command in made.values())
    assert all("--dry-run" in c for c in npu_acceptance.commands("measure", tmp_path, shapes, dry_run=True).values())
    assert set(npu_acceptance.DRY_SHAPES) < set(shapes)


def test_smoke_comparison():
    path = ROOT / "configs/smoke_npu.yaml"
    run = RunConfig.from_yaml(path)
    sizes = run.model.mamba_state_dim, run.model.mamba_head_dim, run.mamba3.mamba3_mimo_rank, run.mamba3.chunk_size
    assert "N{}_P{}_R{}_C{}".format(*sizes) == SHAPE
    dry = RunConfig.from_yaml(path, [f"{key}={value}" for key, value in npu_acceptance.DRY_RUN.items()])
    baseline, _, candidate = variants(dry)
    assert baseline.run.mamba3.mamba3_backward_kernel == "reference"
    assert candidate.run.mamba3.mamba3_backward_kernel == "triton"


installed = pytest.mark.skipif(
    find_spec("mindspeed_mamba3_plugin.patches") is None or find_spec("torch_npu") is not None,
    reason="needs the plugin installed, and no torch_npu",
)


def script(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "scripts/npu_acceptance.sh"), *arguments]
    env = {**os.environ, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)


@installed
def test_without_a_chip_nothing_starts_and_the_remedy_is_named(tmp_path):
    done = script("--out", str(tmp_path / "out"))
    assert done.returncode == 2 and not (tmp_path / "out").exists()
    assert "FAIL  torch_npu is not installed: install the release made for this PyTorch" in done.stderr
    assert "--dry-run" in done.stderr
    done = script(PYTHON="no-such-python")
    assert done.returncode == 2 and "no no-such-python here" in done.stderr


@installed
def test_dry_run_of_the_script(tmp_path):
    out = tmp_path / "out"
    done = script("--dry-run", "--steps", "doctor", "measure", "--shapes", "N16_P64_R4_C8", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("DRY RUN on the CPU") and "PASS  2 processes passed; a dry run" in done.stdout
    steps = json.loads((out / "report.json").read_text())["steps"]
    assert [(s["name"], s["status"]) for s in steps] == [("doctor", "passed"), ("measure_N16_P64_R4_C8", "passed")]
    assert npu_report.DRY in (out / "report.md").read_text()
    again = script("--dry-run", "--out", str(out))
    assert again.returncode == 2 and "is not empty; name another folder" in again.stderr


def test_the_table_names_every_official_shape():
    text = acceptance_table({s.name: {"bwd_fwd": 1.0, "bwd_bwd": 1.0} for s in cases.official_shapes()})
    assert text.count("| bwd_bwd N") == 11 and "bwd_bwd: of 11 shapes meet the rule" in text


def test_the_tests_it_runs_are_there():
    for path in npu_acceptance.TESTS:
        assert (ROOT / path).is_file(), path
    (command,) = npu_acceptance.commands("tests", Path("out"), [], dry_run=False).values()
    assert command[-len(npu_acceptance.TESTS) :] == npu_acceptance.TESTS and "--junitxml=out/tests.xml" in command
