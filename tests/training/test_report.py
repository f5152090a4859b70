from __future__ import annotations

import json
import math

from small_runs import GROUPS, synthetic

from mindspeed_mamba3_plugin.training.judge import judge
from mindspeed_mamba3_plugin.training.records import Run, Step
from mindspeed_mamba3_plugin.training.report import cause, median_step, write_report

TRITON = "triton-ascend.bwd_bwd"
FOUND = {"worst": {"gradient": "dk", "layer": 3, "error": 0.01}, "errors": {"dk": 0.01}, "standard": 1e-4}


def report(small, out, candidate, diagnosis=None, plant=""):
    baseline, floor = synthetic(), synthetic(noise=2e-7)
    verdict = judge(small, baseline, candidate, floor)
    runs = {"baseline": baseline, "noise_floor": floor, "candidate": candidate}
    line = write_report(out, small, runs, verdict, diagnosis, plant, 12.0)
    return line, json.loads(
        (out / "report.json").read_text(), parse_constant=lambda c: (_ for _ in ()).throw(ValueError(c))
    )


def test_a_pass_says_so_everywhere(small, tmp_path):
    line, facts = report(small, tmp_path, synthetic(noise=3e-7, backward=TRITON))
    assert line.startswith("PASS") and "\n" not in line and facts["summary"] == line
    assert facts["verdict"] == "pass" and facts["cause"] is None
    assert 0 < facts["mean_relative_loss_difference"] <= facts["largest_relative_loss_difference"] < 1e-6
    assert facts["noise_floor"]["largest_relative_loss_difference"] > 0
    assert facts["kernel_calls"]["candidate"] == {"reference.forward": 4, TRITON: 4}
    assert facts["byte_unigram_loss"] == 3.1 and len(facts["losses"]["candidate"]) == 20
    picture = tmp_path / "loss_curve.png"
    assert picture.read_bytes()[:4] == b"\x89PNG" and picture.stat().st_size > 20_000


def test_a_failure_names_the_gradient_the_group_and_the_step(small, tmp_path):
    candidate = synthetic(noise=2e-7, scale={GROUPS[1]: 1.01}, backward=TRITON)
    line, facts = report(small, tmp_path, candidate, FOUND, "dk=1.01")
    assert line.startswith("FAIL") and "\n" not in line
    for part in ("gradient dk of the operator is off by 1.0e-02 in layer 3", "at step 1", GROUPS[1], "dk=1.01"):
        assert part in line
    assert facts["verdict"] == "fail" and facts["planted"] == "dk=1.01" and facts["diagnosis"] == FOUND


def test_a_failure_that_no_gradient_explains_says_that(small):
    candidate = synthetic(scale={GROUPS[1]: 1.01}, backward=TRITON)
    verdict = judge(small, synthetic(), candidate, synthetic(noise=2e-7))
    harmless = {**FOUND, "worst": {"gradient": "dk", "layer": 3, "error": 1e-6}}
    assert "no gradient of the operator is off at step 1" in cause(verdict, harmless)
    assert GROUPS[1] in cause(verdict, None)


def test_runs_that_are_not_finite_are_still_drawn(small, tmp_path):
    candidate = synthetic(backward=TRITON)
    candidate.steps[:] = [Step.of(1, math.nan, math.nan, dict.fromkeys(GROUPS, math.nan), 1e-3, 0.1)]
    line, facts = report(small, tmp_path, candidate)
    assert "candidate run: loss is not finite at step 1" in line
    assert facts["losses"]["candidate"] == [None] and facts["final_loss"]["candidate"] is None
    assert (tmp_path / "loss_curve.png").is_file()


def test_time_and_memory_of_the_runs_are_reported(small, tmp_path):
    runs = {name: synthetic() for name in ("baseline", "candidate")}
    for step in runs["candidate"].steps:
        step.seconds = 5.0 if step.step <= 3 else 0.25 + 0.01 * (step.step == 20)
    runs["candidate"].summary["peak_memory_bytes"] = 7
    assert median_step(runs["candidate"]) == 0.25
    assert median_step(Run({}, runs["candidate"].steps[:3])) is None
    _, facts = report(small, tmp_path, runs["candidate"])
    assert facts["median_step_seconds"]["candidate"] == 0.25 and facts["peak_memory_bytes"]["candidate"] == 7
