"""Do two curves agree? The difference between candidate and baseline is held against a noise floor: the difference
that a harmless change (another chunk size, same maths) makes to the same run.

Three things are compared, all as relative differences to the baseline:
* the loss, at every step, and its mean over the run against an absolute cap;
* the gradient norm, at every step;
* the gradient norm of every parameter group at the first steps, where the weights still agree. Under Adam the loss
  hardly feels a gradient that is 1 % off; the norm of the group that it feeds is 1 % off at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .config import RunConfig
from .records import Run, Step

FIRST_STEPS = 3  # at which parameter groups are compared
WINDOW = (
    5  # steps over which the candidate's difference is averaged: floor and candidate differ by chance at one step
)

# Below these, differences are rounding whatever the floor run happened to show: a few units in the last place of a
# loss, and what summing gradients in another order makes of a norm.
LEAST_LOSS = {"fp32": 1e-6, "bf16": 1e-4}
LEAST_NORM = {"fp32": 1e-5, "bf16": 1e-3}
LOSS_CAP = {"fp32": 1e-5, "bf16": 2e-3}

# A group whose gradient is this share of the whole is nothing but rounding.
NEGLIGIBLE_SHARE = 1e-6


@dataclass(frozen=True)
class Series:
    """One quantity over the steps (or over the groups): relative differences, and what is allowed."""

    candidate: list[float]
    floor: list[float]
    limit: list[float]

    @property
    def worst_ratio(self) -> float:
        """Largest difference as a multiple of what is allowed."""
        return float(np.max(np.divide(self.candidate, self.limit), initial=0.0))


@dataclass(frozen=True)
class Verdict:
    """`causes` says in words why the candidate failed, the most telling first; empty when it passed."""

    causes: list[str]
    loss: Series
    grad_norm: Series
    groups: dict[str, Series] = field(default_factory=dict)  # one entry per step
    parted: dict | None = None  # step, group, difference and limit where the runs first part

    @property
    def passed(self) -> bool:
        return not self.causes


def judge(run: RunConfig, baseline: Run, candidate: Run, floor: Run) -> Verdict:
    """Compare the records of three runs of `run`, which differ in the backward kernel and in the chunk size."""
    dtype, ratio, runs = run.model.params_dtype, run.compare.max_floor_ratio, (baseline, candidate, floor)
    steps = min(len(r.steps) for r in runs)
    steps = next((i for i in range(steps) if any(r.steps[i].nonfinite for r in runs)), steps)

    loss = _over_steps([[s.loss for s in r.steps[:steps]] for r in runs], LEAST_LOSS[dtype], ratio)
    norm = _over_steps([[s.grad_norm for s in r.steps[:steps]] for r in runs], LEAST_NORM[dtype], ratio)
    groups = _over_groups([r.steps[: min(steps, FIRST_STEPS)] for r in runs], LEAST_NORM[dtype], ratio)
    parted = _first_apart(baseline.steps[:FIRST_STEPS], groups)

    causes = _invalid(*runs)
    named = zip(("baseline", "candidate", "noise-floor"), runs, strict=True)
    causes += [f"{name} run: {bad}" for name, r in named if (bad := _nonfinite(r))]
    if parted is not None:
        causes.append(
            f"at step {parted['step']} the gradient of {parted['group']} differs by {parted['difference']:.1e} "
            f"(allowed {parted['limit']:.1e})"
        )
    for name, series in (("loss", loss), ("gradient norm", norm)):
        if (first := _first_above(series)) is not None:
            causes.append(
                f"the {name} leaves the noise floor at step {first + 1}: it differs by "
                f"{series.candidate[first]:.1e} on average of {WINDOW} steps (allowed {series.limit[first]:.1e}); "
                f"among the gradients, that of {_worst_group([r.steps[first] for r in runs], dtype)} differs most"
            )
    cap = run.compare.max_mean_loss_difference or LOSS_CAP[dtype]
    mean = mean_difference(baseline, candidate)
    if mean > cap:
        causes.append(f"the mean relative loss difference is {mean:.1e} (allowed {cap:.0e})")
    return Verdict(causes, loss, norm, groups, parted)


def differences(baseline: Run, other: Run) -> np.ndarray:
    """Relative loss difference at every step that both have with a finite loss."""
    pairs = zip(baseline.losses, other.losses, strict=False)
    a, b = np.array([p for p in pairs if None not in p], dtype=float).reshape(-1, 2).T
    return _relative(a, b)


def mean_difference(baseline: Run, other: Run) -> float:
    """Mean relative loss difference."""
    d = differences(baseline, other)
    return float(d.mean()) if len(d) else 0.0


def _relative(a: np.ndarray, b: np.ndarray, smallest: float = 1e-30) -> np.ndarray:
    return np.abs(b - a) / np.maximum(np.abs(a), smallest)


def _over_steps(values: list[list[float]], least: float, ratio: float) -> Series:
    baseline, candidate, floor = (np.array(v, dtype=float) for v in values)
    noise = _relative(baseline, floor)
    kernel = np.ones(min(WINDOW, len(noise)) or 1)
    count = np.minimum(np.arange(len(noise)) + 1, len(kernel))
    smooth = np.convolve(_relative(baseline, candidate), kernel)[: len(noise)] / count if len(noise) else noise
    limit = ratio * np.maximum(np.maximum.accumulate(noise), least)
    return Series(smooth.tolist(), noise.tolist(), limit.tolist())


def _over_groups(steps: list[list[Step]], least: float, ratio: float) -> dict[str, Series]:
    return {str(three[0].step): _groups_at(three, least, ratio) for three in zip(*steps, strict=True)}


def _groups_at(three: Sequence[Step], least: float, ratio: float) -> Series:
    """The groups of one step of (baseline, candidate, floor)."""
    smallest = NEGLIGIBLE_SHARE * three[0].grad_norm or 1e-30
    a, b, c = (np.array(list(s.grad_norms.values()), dtype=float) for s in three)
    noise = _relative(a, c, smallest)
    limit = ratio * np.maximum(noise, least)
    return Series(_relative(a, b, smallest).tolist(), noise.tolist(), limit.tolist())


def _worst_group(three: Sequence[Step], dtype: str) -> str:
    series = _groups_at(three, LEAST_NORM[dtype], 1.0)
    return list(three[0].grad_norms)[int(np.argmax(np.divide(series.candidate, series.limit)))]


def _first_apart(baseline: list[Step], groups: dict[str, Series]) -> dict | None:
    for step in baseline:
        series = groups.get(str(step.step))
        if series is None:
            return None
        ratios = np.divide(series.candidate, series.limit)
        if len(ratios) and ratios.max() > 1:
            worst = int(ratios.argmax())
            return {
                "step": step.step,
                "group": list(step.grad_norms)[worst],
                "difference": series.candidate[worst],
                "limit": series.limit[worst],
            }
    return None


def _first_above(series: Series) -> int | None:
    above = np.greater(series.candidate, series.limit)
    return int(above.argmax()) if above.any() else None


def _nonfinite(run: Run) -> str | None:
    return next((f"{s.nonfinite} is not finite at step {s.step}" for s in run.steps if s.nonfinite), None)


def _invalid(baseline: Run, candidate: Run, floor: Run) -> list[str]:
    """What makes the comparison itself worthless."""
    causes = []
    for other, name in ((candidate, "candidate"), (floor, "noise-floor")):
        for key, what in (("weights", "initial weights"), ("data", "data order")):
            complete = key == "weights" or len(other.steps) == len(baseline.steps)
            if complete and other.summary[key] != baseline.summary[key]:
                causes.append(f"the {name} run has other {what} than the baseline")
    for name, run in (("baseline", baseline), ("noise-floor", floor)):
        if foreign := sorted(k for k in run.summary["kernel_calls"] if not k.startswith("reference.")):
            causes.append(f"the {name} run called {foreign[0]}, and must run on the reference alone")
    calls = candidate.summary["kernel_calls"]
    if calls.get("reference.backward") or not any(k.endswith((".backward", ".bwd_bwd")) for k in calls):
        causes.append(f"the candidate run did not use its own backward alone: {calls}")
    return causes
