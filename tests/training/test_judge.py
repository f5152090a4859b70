from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from small_runs import GROUPS, summary, synthetic, trained

from mindspeed_mamba3_plugin.ops.types import GRADIENT_NAMES
from mindspeed_mamba3_plugin.training.judge import judge, mean_difference
from mindspeed_mamba3_plugin.training.records import Run, Step

TRITON = "triton-ascend.bwd_bwd"


@pytest.fixture
def bf16(small):
    return replace(small, model=replace(small.model, params_dtype="bf16"))


def verdict(small, candidate, floor=None, baseline=None):
    return judge(small, baseline or synthetic(), candidate, floor or synthetic(noise=2e-7))


def test_noise_of_the_floors_size_passes(small):
    v = verdict(small, synthetic(noise=4e-7, backward=TRITON))
    assert v.passed and v.causes == [] and v.parted is None
    assert 0 < v.loss.worst_ratio < 1


def test_equal_runs_pass_even_when_the_floor_is_zero(small):
    assert verdict(small, synthetic(backward=TRITON), floor=synthetic()).passed


@pytest.mark.parametrize("group", GROUPS)
def test_one_percent_in_any_single_group_fails_and_names_it(small, group):
    v = verdict(small, synthetic(noise=2e-7, scale={group: 1.01}, backward=TRITON))
    assert not v.passed
    assert v.parted["step"] == 1 and v.parted["group"] == group
    assert v.parted["difference"] == pytest.approx(0.01, rel=1e-3)
    assert group in v.causes[0]


def test_leaving_the_floor_fails_with_the_step(small):
    floor, candidate = synthetic(noise=1e-6), synthetic(noise=2e-6, backward=TRITON)
    assert verdict(small, candidate, floor).passed
    candidate.steps[9:] = [replace(s, loss=s.loss * (1 + 2e-5)) for s in candidate.steps[9:]]
    v = verdict(small, candidate, floor)
    assert [c for c in v.causes if "the loss leaves the noise floor at step 10" in c]


def test_a_floor_that_grows_allows_a_candidate_that_grows(small):
    def growing(factor, backward="reference.backward"):
        run = synthetic(backward=backward)
        run.steps[:] = [replace(s, loss=s.loss * (1 + factor * 1e-7 * 1.2**s.step)) for s in run.steps]
        return run

    assert verdict(small, growing(2.5, TRITON), growing(1)).passed
    assert not verdict(small, growing(25, TRITON), growing(1)).passed


def test_the_gradient_norm_is_judged_too(small):
    candidate = synthetic(backward=TRITON)
    candidate.steps[9:] = [replace(s, grad_norm=s.grad_norm * 1.01) for s in candidate.steps[9:]]
    v = verdict(small, candidate)
    assert len(v.causes) == 1 and "the gradient norm leaves the noise floor at step 10" in v.causes[0]


def test_the_mean_has_a_cap_that_the_floor_does_not_lift(small):
    loud = synthetic(noise=5e-5)
    v = verdict(small, synthetic(noise=5e-5, backward=TRITON), floor=loud)
    assert v.causes == ["the mean relative loss difference is 5.0e-05 (allowed 1.0e-05)"]
    wider = replace(small, compare=replace(small.compare, max_mean_loss_difference=1e-4))
    assert judge(wider, synthetic(), synthetic(noise=5e-5, backward=TRITON), loud).passed


def test_in_bf16_the_floors_own_mean_counts(bf16):
    """There two runs that differ by rounding part for good; see docs/architecture.md."""
    loud = synthetic(noise=6e-3)
    assert judge(bf16, synthetic(), synthetic(noise=8e-3, backward=TRITON), loud).passed
    v = judge(bf16, synthetic(), synthetic(noise=1e-2, backward=TRITON), loud)
    assert v.causes == ["the mean relative loss difference is 1.0e-02 (allowed 9.0e-03)"]


def layered(seed, noise=2e-3, scale=1.0, backward="reference.backward"):
    """Three steps of 16 layers whose gradient norms of two kinds are drawn around 0.5."""
    generator = np.random.default_rng(seed)
    kinds = {"C_norm.weight": scale, "D": 1.0}
    steps = []
    for n in range(1, 4):
        norms = {
            f"decoder.layers.{i}.mixer.{kind}": 0.5 * factor * (1 + noise * generator.standard_normal())
            for kind, factor in kinds.items()
            for i in range(16)
        }
        steps.append(Step.of(n, 3.0, 2.0, norms, 1e-3, 0.1))
    return Run(summary(backward), steps)


def test_chance_in_one_of_many_layers_passes_and_one_percent_in_all_of_them_does_not(bf16):
    """The floor is one draw of its noise: some group always exceeds three times its own."""
    still = layered(0, noise=0.0)
    for seed in range(1, 100, 2):
        floor = layered(seed)
        v = judge(bf16, still, layered(seed + 1, backward=TRITON), floor)
        assert v.passed, f"seed {seed}: {v.causes}"
        v = judge(bf16, still, layered(seed + 1, scale=1.01, backward=TRITON), floor)
        assert v.parted["step"] == 1 and v.parted["group"].endswith("C_norm.weight"), f"seed {seed}: {v.causes}"


@pytest.mark.parametrize("which", ["baseline", "candidate", "noise-floor"])
def test_the_first_value_that_is_not_finite_is_named(small, which):
    runs = {"baseline": synthetic(), "candidate": synthetic(backward=TRITON), "noise-floor": synthetic()}
    steps = runs[which].steps
    del steps[7:]
    groups = {**steps[0].grad_norms, GROUPS[3]: math.nan}
    steps[6] = Step.of(7, 3.0, math.inf, groups, 1e-3, 0.1)
    v = judge(small, *runs.values())
    assert v.causes[0] == f"{which} run: gradient of {GROUPS[3]} is not finite at step 7"


def test_a_loss_that_is_not_finite_at_the_first_step(small):
    candidate = synthetic(backward=TRITON)
    candidate.steps[:] = [Step.of(1, math.nan, math.nan, dict.fromkeys(GROUPS, math.nan), 1e-3, 0.1)]
    v = verdict(small, candidate)
    assert v.causes[0] == "candidate run: loss is not finite at step 1"
    assert mean_difference(synthetic(), candidate) == 0.0


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"weights": "other"}, "the candidate run has other initial weights than the baseline"),
        ({"data": "other"}, "the candidate run has other data order than the baseline"),
        ({"kernel_calls": {"reference.forward": 4, "reference.backward": 4}}, "did not use its own backward alone"),
        ({"kernel_calls": {"reference.forward": 4}}, "did not use its own backward alone"),
    ],
)
def test_a_comparison_that_compares_nothing_fails(small, facts, cause):
    good = synthetic(backward=TRITON)
    v = verdict(small, Run({**good.summary, **facts}, good.steps))
    assert cause in v.causes[0]


def test_a_baseline_that_called_another_kernel_fails(small):
    v = verdict(small, synthetic(backward=TRITON), baseline=synthetic(backward=TRITON))
    assert "the baseline run called triton-ascend.bwd_bwd" in v.causes[0]


def test_every_gradient_of_the_operator_reaches_a_group(small, text):
    """In the real model, one percent in any one operator gradient fails the judge at step 1."""
    one = replace(small, training=replace(small.training, steps=1))
    baseline, floor = trained(one, text), trained(one.with_mamba3(mamba3_chunk_size=8), text)
    calls = summary(TRITON)["kernel_calls"]
    assert judge(one, baseline, Run({**baseline.summary, "kernel_calls": calls}, baseline.steps), floor).passed
    for name in GRADIENT_NAMES:
        run = trained(one, text, {name: 1.01})
        v = judge(one, baseline, Run({**run.summary, "kernel_calls": calls}, run.steps), floor)
        assert not v.passed and v.parted["step"] == 1, f"{name}: {v}"
        assert v.parted["difference"] > 1e-3, f"{name} shows only as {v.parted}"
