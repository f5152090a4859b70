"""The comparison's report: report.json, loss_curve.png, and one line that says it all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .config import RunConfig
from .judge import FIRST_STEPS, WINDOW, Verdict, differences, mean_difference
from .records import Run

LAST_STEPS = 10  # over which the final loss is averaged: single batches are small
INK, BASELINE, CANDIDATE, FLOOR, LIMIT = "#333333", "#4477aa", "#ee7733", "#999999", "#cc3311"


def write_report(
    out: Path,
    run: RunConfig,
    runs: dict[str, Run],
    verdict: Verdict,
    diagnosis: dict[str, Any] | None,
    plant: str,
    seconds: float,
) -> str:
    """Write `out`/report.json and `out`/loss_curve.png; returns the summary line.

    Args:
        runs: "baseline", "noise_floor" and "candidate".
        diagnosis: what `diagnose` found, when the verdict asked for it.
    """
    baseline, candidate = runs["baseline"], runs["candidate"]
    difference = differences(baseline, candidate)
    facts = {
        "verdict": "pass" if verdict.passed else "fail",
        "cause": cause(verdict, diagnosis, plant),
        "causes": verdict.causes,
        "parted": verdict.parted,
        "diagnosis": diagnosis,
        "planted": plant or None,
        "candidate_backward": run.mamba3.mamba3_backward_kernel,
        "steps": len(candidate.steps),
        "mean_relative_loss_difference": mean_difference(baseline, candidate),
        "largest_relative_loss_difference": float(difference.max(initial=0.0)),
        "noise_floor": {
            "changed": f"mamba3_chunk_size {run.mamba3.chunk_size} -> {run.compare.floor_chunk_size}",
            "mean_relative_loss_difference": mean_difference(baseline, runs["noise_floor"]),
            "largest_relative_loss_difference": float(differences(baseline, runs["noise_floor"]).max(initial=0.0)),
        },
        "share_of_limit": {
            "loss": verdict.loss.worst_ratio,
            "gradient norm": verdict.grad_norm.worst_ratio,
            "parameter groups": max((s.worst_ratio for s in verdict.groups.values()), default=0.0),
            "kinds of parameter groups": max((s.worst_ratio for s in verdict.kinds.values()), default=0.0),
        },
        "first_loss": baseline.losses[0] if baseline.losses else None,
        "final_loss": {name: final_loss(r) for name, r in runs.items()},
        "byte_unigram_loss": baseline.summary["text"]["unigram_loss"],
        "text": {k: baseline.summary["text"][k] for k in ("documents", "tokens", "digest")},
        "initial_weights": baseline.summary["weights"],
        "parameters": baseline.summary["parameters"],
        "kernel_calls": {name: r.summary["kernel_calls"] for name, r in runs.items()},
        "losses": {name: r.losses for name, r in runs.items()},
        "seconds": {
            **{name: round(r.summary["seconds"], 2) for name, r in runs.items()},
            "this_call": round(seconds, 2),
        },
        "median_step_seconds": {name: median_step(r) for name, r in runs.items()},
        "peak_memory_bytes": {name: r.summary["peak_memory_bytes"] for name, r in runs.items()},
        "versions": baseline.summary["versions"],
        "device": baseline.summary["device"],
        "run": run.to_mapping(),
    }
    line = summary_line(facts, out)
    facts["summary"] = line
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(facts, indent=1))
    draw(out / "loss_curve.png", runs, verdict, facts)
    return line


def cause(verdict: Verdict, diagnosis: dict[str, Any] | None, plant: str = "") -> str | None:
    """Why the candidate failed, in a sentence or two; None when it passed."""
    if verdict.passed:
        return None
    text = verdict.causes[0]
    if diagnosis is not None:
        worst = diagnosis["worst"]
        if worst["error"] > diagnosis["standard"]:
            text = (
                f"gradient {worst['gradient']} of the operator is off by {worst['error']:.1e} in layer "
                f"{worst['layer']} (allowed {diagnosis['standard']:.0e}); {text}"
            )
        else:
            text += (
                f"; no gradient of the operator is off at step 1 (the worst, {worst['gradient']}, by "
                f"{worst['error']:.1e}, allowed {diagnosis['standard']:.0e})"
            )
    return f"{text} [planted: {plant}]" if plant else text


def final_loss(run: Run) -> float | None:
    """Mean loss of the last steps, None when one is not finite or there are none."""
    last = run.losses[-LAST_STEPS:]
    return None if not last or None in last else float(np.mean(last))


def median_step(run: Run) -> float | None:
    """Seconds of the median step after the first ones, in which kernels are compiled; None of a short run."""
    seconds = [s.seconds for s in run.steps[FIRST_STEPS:]]
    return float(np.median(seconds)) if seconds else None


def summary_line(facts: dict[str, Any], out: Path) -> str:
    """The report in one line."""
    if facts["verdict"] == "fail":
        return f"FAIL  the {facts['candidate_backward']} backward: {facts['cause']}; see {out / 'report.json'}"
    floor = facts["noise_floor"]
    return (
        f"PASS  the {facts['candidate_backward']} backward trains like the reference: over {facts['steps']} steps "
        f"the loss differs by {facts['mean_relative_loss_difference']:.1e} on average and "
        f"{facts['largest_relative_loss_difference']:.1e} at most (noise floor "
        f"{floor['mean_relative_loss_difference']:.1e} and {floor['largest_relative_loss_difference']:.1e}); "
        f"loss {facts['first_loss']:.2f} -> {facts['final_loss']['candidate']:.2f}, byte unigram "
        f"{facts['byte_unigram_loss']:.2f}; see {out / 'loss_curve.png'}"
    )


def draw(path: Path, runs: dict[str, Run], verdict: Verdict, facts: dict[str, Any]) -> None:
    """Loss, relative loss difference, gradient norm, and the parameter groups of the first steps, as one picture."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style = {
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "font.size": 10,
        "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False,
    }  # fmt: skip
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
        name = facts["candidate_backward"]
        _curves(axes[0, 0], runs, "loss", name)
        axes[0, 0].axhline(facts["byte_unigram_loss"], color=INK, lw=1, ls=":", label="byte unigram of the text")
        axes[0, 0].set(title="Loss", ylabel="nats per byte")
        axes[0, 0].legend()
        _curves(axes[1, 0], runs, "grad_norm", name)
        axes[1, 0].set(title="Gradient norm", yscale="log")
        _difference(axes[0, 1], differences(runs["baseline"], runs["candidate"]), verdict)
        _groups(axes[1, 1], verdict)
        for ax in (axes[0, 0], axes[0, 1], axes[1, 0]):
            ax.set_xlabel("step")
        color = "#228833" if verdict.passed else LIMIT
        what = "trains like the reference" if verdict.passed else "does not train like the reference"
        figure.suptitle(
            f"{facts['verdict'].upper()}: the {name} backward {what}", color=color, weight="bold", size=14
        )
        figure.savefig(path, dpi=110)
        plt.close(figure)


def _curves(ax: Any, runs: dict[str, Run], key: str, name: str) -> None:
    for run, label, look in (
        (runs["baseline"], "reference backward", {"color": BASELINE, "lw": 4, "alpha": 0.5}),
        (runs["candidate"], f"{name} backward", {"color": CANDIDATE, "lw": 1.4}),
    ):
        ax.plot([s.step for s in run.steps], [np.nan if (y := getattr(s, key)) is None else y for s in run.steps],
                label=label, **look)  # fmt: skip


def _difference(ax: Any, per_step: np.ndarray, verdict: Verdict) -> None:
    series = verdict.loss
    steps = np.arange(1, len(series.limit) + 1)
    ax.plot(steps, series.floor, color=FLOOR, lw=1, marker="o", ms=3, label="noise floor run")
    ax.plot(steps, per_step[: len(steps)], color=CANDIDATE, lw=0, marker="o", ms=4, label="candidate")
    ax.plot(steps, series.candidate, color=CANDIDATE, lw=1.6, label=f"candidate, mean of {WINDOW} steps")
    ax.plot(steps, series.limit, color=LIMIT, lw=1.2, ls="--", drawstyle="steps-mid", label="allowed")
    ax.set(title="Relative difference of the loss to the reference")
    _scale(ax, [*series.floor, *per_step, *series.limit])


def _groups(ax: Any, verdict: Verdict) -> None:
    ax.set(title=f"Gradient norm of every parameter group, first {FIRST_STEPS} steps")
    ax.set(ylabel="relative difference to the reference", xlabel="groups, by difference of the candidate")
    points = sorted(
        point for s in verdict.groups.values() for point in zip(s.candidate, s.floor, s.limit, strict=True)
    )
    if not points:
        return
    candidate, floor, limit = np.array(points).T
    x = np.arange(len(points))
    ax.scatter(x, floor, s=10, color=FLOOR, label="noise floor run")
    ax.scatter(x, candidate, s=14, color=CANDIDATE, label="candidate")
    ax.plot(x, limit, color=LIMIT, lw=1.2, ls="--", label="allowed")
    _scale(ax, [*candidate, *floor, *limit])


def _scale(ax: Any, values: list[float]) -> None:
    """Logarithmic, but with a zero, since many differences are exactly that; room for the legend above."""
    ax.set_yscale("symlog", linthresh=1e-7, linscale=0.5)
    ax.set_ylim(-1e-8, 30 * max([1e-6, *values]))
    ax.legend(ncols=2, loc="upper left")
