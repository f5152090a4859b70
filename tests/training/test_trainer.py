from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
import torch
import yaml
from small_runs import SMALL

from mindspeed_mamba3_plugin.ops import reference
from mindspeed_mamba3_plugin.training import records
from mindspeed_mamba3_plugin.training.config import RunConfig
from mindspeed_mamba3_plugin.training.trainer import NOT_FINITE, main, train


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """A run, done twice."""
    folders = [tmp_path_factory.mktemp("run") for _ in range(2)]
    for folder in folders:
        train(RunConfig.from_mapping(SMALL), folder, text=text)
    return [records.read(folder) for folder in folders], folders


def test_two_steps_are_finite_and_recorded(finished, small):
    run, folder = finished[0][0], finished[1][0]
    assert len(run.steps) == 2 and all(s.nonfinite is None and math.isfinite(s.loss) for s in run.steps)
    assert run.steps[0].loss == pytest.approx(math.log(256), rel=0.1)
    assert run.summary["kernel_calls"] == {"reference.forward": 4, "reference.backward": 4}
    assert run.summary["identity"] == records.identity(small, {})
    assert list((folder / "tensorboard").iterdir())
    assert len((folder / "steps.jsonl").read_text().splitlines()) == 2


def test_micro_batches_add_up_to_the_batch(small, text, tmp_path):
    """The same sequences in one micro-batch or in two: same loss, same gradient norm."""
    whole, halves = (
        train(replace(small, training=replace(small.training, steps=1, micro_batch_size=size, num_microbatches=n)),
              tmp_path / str(n), text=text)
        for size, n in ((2, 1), (1, 2))
    )  # fmt: skip
    assert whole["data"] == halves["data"]
    a, b = (records.read(tmp_path / n).steps[0] for n in "12")
    assert b.loss == pytest.approx(a.loss, rel=1e-5) and b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)


def test_the_same_seed_gives_the_same_bits(finished):
    a, b = finished[0]
    assert a.summary["weights"] == b.summary["weights"] and a.summary["data"] == b.summary["data"]
    for x, y in zip(a.steps, b.steps, strict=True):
        assert (x.loss, x.grad_norm, x.grad_norms) == (y.loss, y.grad_norm, y.grad_norms)


def test_groups_cover_the_gradient_norm_and_the_parts_of_the_packed_projection(finished):
    step = finished[0][0].steps[0]
    total = math.sqrt(sum(norm**2 for norm in step.grad_norms.values()))
    assert total == pytest.approx(step.grad_norm, rel=1e-4)
    for part in ("z", "x", "B", "C", "dd_dt", "dd_A", "trap"):
        assert step.grad_norms[f"decoder.layers.0.mixer.in_proj.weight[{part}]"] > 0


def test_the_npus_packages_are_named_where_they_are(monkeypatch):
    def version(name):
        if name in ("triton", "torch_npu"):
            raise PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(records, "version", version)
    found = records.versions()
    assert found["triton-ascend"] == "1.2" and found["triton"] == "not installed" and "torch_npu" not in found


def test_another_seed_gives_other_weights_and_data(finished, small, text, tmp_path):
    other = train(replace(small, training=replace(small.training, seed=5)), tmp_path, text=text)
    assert other["weights"] != finished[0][0].summary["weights"]
    assert other["data"] != finished[0][0].summary["data"]


def test_training_stops_at_the_first_value_that_is_not_finite(small, text, tmp_path, monkeypatch, capsys):
    original = reference.backward

    def broken(x, grad_out):
        grads = original(x, grad_out)
        return grads._replace(dd=torch.full_like(grads.dd, math.nan))

    monkeypatch.setattr(reference, "backward", broken)
    config = tmp_path / "small.yaml"
    config.write_text(yaml.safe_dump(small.to_mapping()))
    assert main(["--config", str(config), "--out", str(tmp_path), "--text", str(text)]) == NOT_FINITE
    assert "stopped at step 1, gradient of decoder.layers.0.mixer.D is not finite" in capsys.readouterr().out
    run = records.read(tmp_path)
    assert len(run.steps) == 1
    assert run.steps[0].nonfinite == "gradient of decoder.layers.0.mixer.D"
    assert "NaN" not in (tmp_path / "steps.jsonl").read_text()
    json.loads((tmp_path / "steps.jsonl").read_text(), parse_constant=pytest.fail)


def test_bf16_trains(small, text, tmp_path):
    train(replace(small, model=replace(small.model, params_dtype="bf16")), tmp_path, text=text)
    assert [s.nonfinite for s in records.read(tmp_path).steps] == [None, None]


def test_an_interrupted_run_counts_as_not_there(small, text, tmp_path, monkeypatch):
    train(small, tmp_path, text=text)
    assert records.read(tmp_path) is not None

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(reference, "backward", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(small, tmp_path, text=text)
    assert records.read(tmp_path) is None
