"""The report of scripts/npu_acceptance.sh: from what its steps left in the folder to report.md, times by stage and
shape as JSON, and the files that calibrate the estimates of scripts/check_ascend_compile.py."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_mamba3_plugin.__main__ import examine
from mindspeed_mamba3_plugin.offline import acceptance, cases
from mindspeed_mamba3_plugin.offline.report import acceptance_table, table

TITLE = {False: "ms", True: "ms in the dry run"}
DRY = "**DRY RUN on a CPU, in Triton's interpreter, at small sizes. No number below is a measurement of a chip.**"


def stage(kernel: str) -> str | None:
    """The name of a stage in the estimates, or None for what is no kernel of ours."""
    return kernel.strip("_").removesuffix("_kernel") if kernel.endswith("_kernel") else None


def per_launch(result: Mapping[str, Any]) -> dict[str, float]:
    """ms of one launch of every stage of the backward."""
    launches: dict[str, float] = {}
    spent: dict[str, float] = {}
    for kernels in result["kernels"].values():
        for kernel, found in kernels.items():
            if name := stage(kernel):
                launches[name] = launches.get(name, 0) + found["launches"]
                spent[name] = spent.get(name, 0) + found["ms"]
    return {name: spent[name] / launches[name] for name in spent}


def calibration(result: Mapping[str, Any]) -> dict[str, Any]:
    """One shape in the form of scripts/check_ascend_compile.py --calibrate."""
    return {"shape": result["shape"], "dtype": result["dtype"], "measured_ms": per_launch(result)}


def versions() -> dict[str, Any]:
    """Everything whose version a time depends on."""
    found = examine()
    known = {name: v for name, v in found["versions"].items() if v}
    known |= {"plugin": found["plugin"], "python": platform.python_version(), "host": platform.platform()}
    if found["device"] == "npu":
        import torch

        known |= {"device": torch.npu.get_device_name(0), "cann": _cann(), "driver": _said("npu-smi", "info")}
    else:
        known["device"] = found["device"]
    return known | {"compiler": _said("bishengir-compile", "--version"), "commit": _said("git", "rev-parse", "HEAD")}


def _cann() -> str:
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME") or ""
    for path in sorted(Path(home).glob("**/ascend_toolkit_install.info")) if home else ():
        return path.read_text(errors="replace").strip()
    return f"not found below {home or 'ASCEND_HOME_PATH, which is not set'}"


def _said(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return f"no {command[0]} on PATH"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).resolve().parent
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {error}"
    return (done.stdout or done.stderr).strip()


def write(folder: Path, steps: Sequence[Mapping[str, Any]], dry_run: bool) -> int:
    """Write the report into `folder` and print its verdict. Returns 0 when every step passed and, outside of a dry
    run, the acceptance rule is met at every shape; else 1."""
    order = [s.name for s in cases.official_shapes()]
    files = sorted(folder.glob("shapes/*/result.json"), key=lambda path: order.index(path.parent.name))
    results = {path.parent.name: json.loads(path.read_text()) for path in files}
    where = versions()
    (folder / "calibration").mkdir(exist_ok=True)
    for shape, result in results.items():
        if result["kernels"]["bwd_bwd"]:
            (folder / "calibration" / f"{shape}.json").write_text(json.dumps(calibration(result), indent=1))
    times = {"dry_run": dry_run, "versions": where, "ms": {s: per_launch(r) for s, r in results.items()}}
    (folder / "times.json").write_text(json.dumps(times, indent=1))
    shutil.rmtree(folder / "loss_curve/text", ignore_errors=True)  # made from Python's own sources
    curve = folder / "loss_curve/report.json"
    loss = json.loads(curve.read_text()) if curve.exists() else None
    device = {s: r["device_ms"] for s, r in results.items()}
    failed = [s["name"] for s in steps if s["status"] != "passed"]
    share = acceptance.REQUIRED["memory"]
    missed = {e: sum(e in r for r in device.values()) - n for e, n in acceptance.met(device, share).items()}
    facts = {"dry_run": dry_run, "versions": where, "steps": list(steps), "results": results, "loss_curve": loss}
    (folder / "report.json").write_text(json.dumps(facts, indent=1))
    (folder / "report.md").write_text(text(steps, results, where, loss, dry_run))

    print()
    if results:
        print(acceptance_table(device, TITLE[dry_run]))
    passed = not failed and bool(steps) and (dry_run or not any(missed.values()))
    parts = [f"not passed: {', '.join(failed)}"] if failed else [f"{len(steps)} processes passed"]
    if results and not dry_run:
        parts += [
            f"{entry} misses {share} of an A100 at {n} of {len(results)} shapes" for entry, n in missed.items() if n
        ]
    if dry_run:
        parts.append("a dry run: the times above are not of a chip")
    print(f"\n{'PASS' if passed else 'FAIL'}  {'; '.join(parts)}\nsend back this folder: {folder}")
    return 0 if passed else 1


def text(
    steps: Sequence[Mapping[str, Any]],
    results: Mapping[str, Mapping[str, Any]],
    where: Mapping[str, Any],
    loss: Mapping[str, Any] | None,
    dry_run: bool,
) -> str:
    """report.md."""
    parts = ["# The operator on an Ascend NPU", *([DRY] if dry_run else []), "## Steps"]
    rows = [[s["name"], s["status"], f"{s['seconds']:.0f}", s["detail"].replace("|", "/")] for s in steps]
    parts.append(table(["step", "status", "s", "last line"], rows))
    if results:
        parts += ["## Errors", _errors(results)]
        title = "Times of all kernels of a call, by the profiler"
        lost = {shape: r["profile_error"] for shape, r in results.items() if "profile_error" in r}
        if lost:
            title += (
                " (by events, gaps included, where it failed: "
                + "; ".join(f"{s}, {e}" for s, e in lost.items())
                + ")"
            )
        parts += [
            f"## Against the acceptance rule\n\n{title}:",
            acceptance_table(_times(results, "device_ms"), TITLE[dry_run]),
        ]
        parts += [
            "The same calls by events, gaps between kernels included:",
            acceptance_table(_times(results, "elapsed_ms"), TITLE[dry_run]),
        ]
        parts += [f"## One launch, {TITLE[dry_run]}", _stages(results)]
        parts += ["## Beside the direct translation, by events", _beside_port(results, TITLE[dry_run])]
    if loss is not None:
        parts += ["## Loss curves", loss["summary"]]
    shown = [f"- {name}: {' / '.join(str(value).splitlines()[:3])}" for name, value in where.items()]
    return "\n\n".join([*parts, "## Versions", "\n".join(shown)]) + "\n"


def _times(results: Mapping[str, Mapping[str, Any]], kind: str) -> dict[str, dict[str, float]]:
    return {s: {e: r[kind][e] for e in acceptance.ENTRIES} for s, r in results.items()}


def _errors(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The largest errors of the gradients by shape, against fp64 on the CPU."""
    rows = []
    for shape, result in results.items():
        row = [shape]
        for dtype, kind in (("bf16", "l2"), ("fp32", "l2"), ("fp32", "mean")):
            name = max(result["errors"][dtype], key=lambda n: result["errors"][dtype][n][kind])
            row.append(f"{result['errors'][dtype][name][kind]:.1e} {name}")
        above = "; ".join(result["above_standard"]) or "none"
        rows.append([*row, above, "yes" if result["same_bits"] else "NO"])
    head = [
        "shape",
        "bf16, relative L2",
        "fp32, relative L2",
        "fp32, mean relative",
        "above the standard",
        "same bits twice",
    ]
    return table(head, rows)


def _beside_port(results: Mapping[str, Mapping[str, Any]], title: str) -> str:
    """The same two kernels translated one by one (scripts/plain_port.py)."""
    rows = []
    for entry in acceptance.ENTRIES:
        for shape, result in results.items():
            ms, port = result["elapsed_ms"][entry], result.get("direct_translation_ms", {"error": "not reached"})
            theirs = (
                [port["error"].splitlines()[0].replace("|", "/"), ""]
                if "error" in port
                else [f"{port[entry]:.3f}", f"{port[entry] / ms:.1f}x"]
            )
            rows.append([f"{entry} {shape}", f"{ms:.3f}", *theirs])
    return table(["kernel, shape", title, "direct translation", "gain"], rows)


def _stages(results: Mapping[str, Mapping[str, Any]]) -> str:
    launches = {shape: per_launch(result) for shape, result in results.items()}
    names = list(dict.fromkeys(name for found in launches.values() for name in found))
    rows = [[name, *(f"{found[name]:.3f}" if name in found else "" for found in launches.values())] for name in names]
    return table(["stage", *(shape.rpartition("_C")[0] for shape in launches)], rows)
