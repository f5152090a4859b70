from __future__ import annotations

import json
from copy import deepcopy

import pytest
import yaml
from small_runs import SMALL, synthetic

from mindspeed_mamba3_plugin.config import ConfigError
from mindspeed_mamba3_plugin.training import compare, records
from mindspeed_mamba3_plugin.training.config import RunConfig


@pytest.fixture
def content():
    content = deepcopy(SMALL)
    content["model"]["hybrid_override_pattern"] = "M-"
    content["model"]["mamba_num_heads"] = 1
    content["mamba3"]["mamba3_backward_kernel"] = "triton"
    content["data"]["sequence_length"] = 16
    content["training"]["micro_batch_size"] = 1
    return content


@pytest.fixture
def config(content, tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_three_runs_differ_in_one_thing_each(content):
    run = RunConfig.from_mapping(content)
    baseline, floor, candidate = compare.variants(run, "dk=1.01")
    assert candidate.run == run and candidate.plant == "dk=1.01" and not baseline.plant and not floor.plant
    assert baseline.run == run.with_mamba3(mamba3_backward_kernel="reference")
    assert floor.run == baseline.run.with_mamba3(mamba3_chunk_size=8)
    assert len({v.identity for v in (baseline, floor, candidate)}) == 3
    assert compare.variants(run)[2].identity != candidate.identity


def test_only_the_candidate_runs_in_the_interpreter(content, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(compare.platforms, "detect", lambda: "cpu")
    environments = [
        v.environment().get("TRITON_INTERPRET") for v in compare.variants(RunConfig.from_mapping(content))
    ]
    assert environments == [None, None, "1"]
    monkeypatch.setattr(compare.platforms, "detect", lambda: "cuda")
    assert "TRITON_INTERPRET" not in compare.variants(RunConfig.from_mapping(content))[2].environment()


def test_comparing_a_thing_with_itself_is_an_error(content):
    run = RunConfig.from_mapping(content)
    for kernel in ("reference", "auto"):
        with pytest.raises(ConfigError, match=f"mamba3_backward_kernel {kernel}: must name the kernel"):
            compare.variants(run.with_mamba3(mamba3_backward_kernel=kernel))
    with pytest.raises(ConfigError, match="floor_chunk_size 8: must differ"):
        compare.variants(run.with_mamba3(mamba3_chunk_size=8))


def test_usage_errors_end_with_status_2(config, capsys):
    assert compare.main(["--config", "none.yaml"]) == 2
    assert compare.main(["--config", str(config), "--plant", "dx=1"]) == 2
    assert compare.main(["--config", str(config), "--set", "training.stepz=1"]) == 2
    assert "unknown key 'training.stepz'" in capsys.readouterr().err


def test_finished_runs_survive_an_interrupt_and_are_reused(config, tmp_path, monkeypatch):
    """The processes are stood in for: the second run is interrupted, then everything goes through."""
    started, interrupt = [], True

    def process(variant, module, *arguments):
        started.append(variant.name)
        if variant.name == "noise_floor" and interrupt:
            raise KeyboardInterrupt
        run = synthetic(backward="triton-ascend.bwd_bwd" if variant.name == "candidate" else "reference.backward")
        folder = tmp_path / "out" / variant.name
        (folder / "steps.jsonl").write_text("".join(json.dumps(vars(s)) + "\n" for s in run.steps))
        facts = {**run.summary, "identity": variant.identity}
        (folder / "summary.json").write_text(json.dumps(facts))

    monkeypatch.setattr(compare, "_process", process)
    monkeypatch.setattr(compare, "write_report", lambda *_: "the report")
    command = ["--config", str(config), "--out", str(tmp_path / "out")]
    assert compare.main(command) == 130
    interrupt = False
    assert compare.main(command) == 0
    assert started == ["baseline", "noise_floor", "noise_floor", "candidate"]
    assert compare.main(command) == 0 and len(started) == 4
    assert compare.main([*command, "--set", "training.seed=3"]) == 0 and len(started) == 7
    assert compare.main([*command, "--set", "training.seed=3", "--fresh"]) == 0 and len(started) == 10


def test_a_run_whose_process_dies_fails_the_comparison(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare.sys, "executable", "false")
    assert compare.main(["--config", str(config), "--out", str(tmp_path / "out")]) == 1
    assert "the baseline process ended with status 1" in capsys.readouterr().err


def test_a_changed_source_file_makes_finished_runs_stale(monkeypatch, small):
    before = records.identity(small, {})
    monkeypatch.setattr(records, "_source_digest", lambda: "other")
    assert records.identity(small, {}) != before


def test_a_planted_error_is_failed_and_named_and_the_kernels_as_they_are_pass(config, tmp_path, capfd):
    """End to end, in processes of their own, with the Triton backward in the interpreter."""
    out = tmp_path / "out"
    command = ["--config", str(config), "--out", str(out)]
    assert compare.main([*command, "--plant", "dk=1.01"]) == 1
    facts = json.loads((out / "report.json").read_text())
    assert facts["verdict"] == "fail" and facts["diagnosis"]["worst"]["gradient"] == "dk"
    assert facts["parted"]["step"] == 1
    assert sum(error > 1e-3 for error in facts["diagnosis"]["errors"].values()) == 1

    capfd.readouterr()
    assert compare.main(command) == 0
    facts, printed = json.loads((out / "report.json").read_text()), capfd.readouterr().out
    assert "baseline: finished before, reused" in printed
    assert printed.splitlines()[-1] == facts["summary"] and facts["summary"].startswith("PASS")
    assert set(facts["kernel_calls"]["baseline"]) == {"reference.forward", "reference.backward"}
    assert set(facts["kernel_calls"]["candidate"]) == {
        "reference.forward", "triton-ascend.bwd_fwd", "triton-ascend.bwd_bwd"
    }  # fmt: skip
