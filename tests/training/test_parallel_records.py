"""The trainer and the diagnosis in two tensor-parallel ranks: what they record is of the whole model."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from mindspeed_mamba3_plugin.training import records, trainer
from mindspeed_mamba3_plugin.training.trainer import train


@pytest.fixture
def split(small, tmp_path) -> Path:
    """Configuration of two ranks."""
    path = tmp_path / "split.yaml"
    run = replace(small, training=replace(small.training, tensor_parallel=2))
    path.write_text(yaml.safe_dump(run.to_mapping()))
    return path


def two_ranks(*arguments: str | Path) -> str:
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, "-W", "ignore", *ranks, *map(str, arguments)]
    environment = {**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_records_are_those_of_one_rank(small, split, text, tmp_path):
    """Losses, the count of parameters, gradient norms, and those of every parameter: of whole ones, not of shares."""
    train(small, tmp_path / "alone", text=text)
    two_ranks("-m", trainer.__name__, "--config", split, "--text", text, "--out", tmp_path / "split")
    alone, run = (records.read(tmp_path / name) for name in ("alone", "split"))
    assert run.summary["parameters"] == alone.summary["parameters"]
    for a, b in zip(alone.steps, run.steps, strict=True):
        assert (b.loss, b.grad_norm) == pytest.approx((a.loss, a.grad_norm), rel=1e-5)
        expected = dict(a.grad_norms)
        for layer in (0, 3):  # the one group of B and C does not shard: there it is a parameter of its own
            shares = (expected.pop(f"decoder.layers.{layer}.mixer.in_proj.weight[{part}]") for part in "BC")
            expected[f"decoder.layers.{layer}.mixer.bc_proj"] = math.hypot(*shares)
        assert b.grad_norms == pytest.approx(expected, rel=1e-5)


def test_an_error_of_one_rank_is_diagnosed_by_both(split, text):
    """The second rank's dv is 1 % off: the error is that of both shares together."""
    lines = two_ranks(Path(__file__).with_name("diagnose_process.py"), split, text).splitlines()
    first, second = (json.loads(line) for line in lines if line.startswith("{"))
    assert first == second
    assert first["worst"]["gradient"] == "dv"
    assert 0.003 < first["worst"]["error"] < 0.0095
