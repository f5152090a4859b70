"""Do two curves agree? The difference between candidate and baseline is held against a noise floor: the difference
that a harmless change (another chunk size, same maths) makes to the same run.

Three things are compared, all as relative differences to the baseline:
* the loss, at every step, and its mean over the run against a cap;
* the gradient norm, at every step;
* the gradient norm of every parameter group at the first steps, where the weights still agree. Under Adam the loss
  hardly feels a gradient that is 1 % off; the norm of the group that it feeds is 1 % off at once.

One number of the floor run is one draw of its noise. So a group is held against the largest noise of its kind (the
same parameter in all layers), and the root mean square over a kind against the kind's own: an error that all layers
share stands out there long before it does in one layer.
"""

from __future__ import annotations

import re
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
# In bf16 two runs that differ by rounding part for good after some tens of steps: there the floor's own mean counts.
BF16_MEAN_RATIO = 1.5

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
    kinds: dict[str, Series] = field(default_factory=dict)  # root mean square over layers, one entry per step
    parted: dict | None = None  # step, group or kind of groups, difference and limit where the runs first part

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
    names, groups, kinds = _over_groups([r.steps[: min(steps, FIRST_STEPS)] for r in runs], LEAST_NORM[dtype], ratio)
    apart = _first_apart(names, groups), _first_apart(sorted(set(map(_kind, names))), kinds)
    parted = min(filter(None, apart), key=lambda found: found["step"], default=None)

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
                f"among the gradients, that of {_worst_group(*(r.steps[first] for r in runs), dtype)} differs most"
            )
    mean, cap = mean_difference(baseline, candidate), run.compare.max_mean_loss_difference
    if cap is None:
        cap = LOSS_CAP[dtype]
        if dtype == "bf16":
            cap = max(cap, BF16_MEAN_RATIO * mean_difference(baseline, floor))
    if mean > cap:
        causes.append(f"the mean relative loss difference is {mean:.1e} (allowed {cap:.1e})")
    return Verdict(causes, loss, norm, groups, kinds, parted)


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


def _over_groups(
    steps: list[list[Step]], least: float, ratio: float
) -> tuple[list[str], dict[str, Series], dict[str, Series]]:
    """Names of the groups, and by step: the groups, and the kinds of groups in the order of their names."""
    if not steps[0]:
        return [], {}, {}
    names = list(steps[0][0].grad_norms)
    kinds = np.unique([_kind(name) for name in names], return_inverse=True)[1]
    apart = {str(b.step): _group_differences(b, c, f) for b, c, f in zip(*steps, strict=True)}
    loudest, squares = np.zeros(kinds.max() + 1), np.zeros(kinds.max() + 1)
    for _, noise in apart.values():
        np.maximum.at(loudest, kinds, noise)
        squares += _mean_square(noise, kinds)
    limit = ratio * np.maximum(loudest, least)[kinds]
    kind_noise = np.sqrt(squares / len(apart))
    kind_limit = ratio * np.maximum(kind_noise, least)
    groups = {step: Series(d.tolist(), noise.tolist(), limit.tolist()) for step, (d, noise) in apart.items()}
    pooled = {
        step: Series(np.sqrt(_mean_square(d, kinds)).tolist(), kind_noise.tolist(), kind_limit.tolist())
        for step, (d, _) in apart.items()
    }
    return names, groups, pooled


def _group_differences(baseline: Step, candidate: Step, floor: Step) -> tuple[np.ndarray, np.ndarray]:
    """Relative differences of every group's norm: the candidate's and the floor's."""
    smallest = NEGLIGIBLE_SHARE * baseline.grad_norm or 1e-30
    a, b, c = (np.array(list(s.grad_norms.values()), dtype=float) for s in (baseline, candidate, floor))
    return _relative(a, b, smallest), _relative(a, c, smallest)


def _kind(group: str) -> str:
    """The group's name without the number of its layer."""
    return re.sub(r"\.layers\.\d+\.", ".layers.*.", group)


def _mean_square(x: np.ndarray, kinds: np.ndarray) -> np.ndarray:
    return np.bincount(kinds, x**2) / np.bincount(kinds)


def _worst_group(baseline: Step, candidate: Step, floor: Step, dtype: str) -> str:
    difference, noise = _group_differences(baseline, candidate, floor)
    return list(baseline.grad_norms)[int(np.argmax(difference / np.maximum(noise, LEAST_NORM[dtype])))]


def _first_apart(names: list[str], by_step: dict[str, Series]) -> dict | None:
    """Where a series of groups or kinds first leaves its limit: at the first such step, the worst."""
    for step, series in by_step.items():
        if series.worst_ratio > 1:
            worst = int(np.argmax(np.divide(series.candidate, series.limit)))
            return {
                "step": int(step),
                "group": names[worst],
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
