#!/usr/bin/env python3
"""The first hour with an Ascend 910B: checks the environment, tests the operator, measures its errors and times at
the official shapes, and compares loss curves, each step in processes of its own. Installs nothing; leaves one folder
with logs, JSON and report.md to send back.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("doctor", "tests", "measure", "loss_curve")
PATIENCE = {"doctor": 300, "tests": 3600, "measure": 1800, "loss_curve": 3600}  # seconds, of each process
DRY_SHAPES = ("N16_P64_R4_C8", "N128_P64_R1_C64")
TESTS = [f"tests/ops/test_{name}.py" for name in ("kernels", "precision", "random_shapes", "upstream", "api")]
DRY_TESTS = ("tests/ops/test_kernels.py", "-k", "triton-ascend and rank and options")
DRY_RUN = {  # of the loss-curve comparison: seconds on a CPU
    "model.hybrid_override_pattern": "M", "model.hidden_size": 32, "model.ffn_hidden_size": 32,
    "model.num_attention_heads": 2, "model.mamba_state_dim": 16, "model.mamba_head_dim": 16,
    "model.mamba_num_heads": 2, "model.params_dtype": "fp32", "mamba3.mamba3_mimo_rank": 2,
    "data.sequence_length": 32, "data.max_bytes": 100000, "optimizer.lr_warmup_steps": 0, "training.steps": 2,
    "training.micro_batch_size": 1,
}  # fmt: skip
# What a step imports beside the operator's own needs, and how to get it.
NEEDED = {
    "tests": {"pytest": "pip install pytest", "hypothesis": "pip install hypothesis"},
    "loss_curve": {
        "megatron.core": "pip install --no-deps megatron-core==0.16.1, or a Megatron-LM tree on PYTHONPATH",
        "einops": "pip install einops", "matplotlib": "pip install matplotlib", "tqdm": "pip install tqdm",
        "tensorboard": "pip install tensorboard",
    },
}  # fmt: skip


@dataclass
class Step:
    """How one process of a step ended."""

    name: str
    status: str  # passed, failed, or missing (something that it needs is not installed)
    seconds: float
    log: str
    detail: str = ""


def problems(dry_run: bool) -> list[str]:
    """Why the steps cannot run here, each with its remedy."""
    found = []
    if not (3, 10) <= sys.version_info[:2] <= (3, 12):
        found.append(
            f"this is Python {sys.version.split()[0]}, it must be 3.10 to 3.12: name another with PYTHON=..."
        )
    for name, remedy in {"torch": "pip install torch", "triton": "pip install triton-ascend==3.2.0"}.items():
        if find_spec(name) is None:
            found.append(f"{name} is not installed: {remedy}")
    if not _importable("mindspeed_mamba3_plugin.patches"):
        found.append("the plugin is not installed in this environment: pip install --no-deps --editable .")
    if found or dry_run:
        return found
    from mindspeed_mamba3_plugin.platforms import npu

    if (why := npu.missing()) is not None:
        return [why]
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # no Ascend backend in this triton, no compiler of CANN, no g++ for its helper
        found.append(
            f"triton finds no NPU ({error}): triton-ascend alone may be installed (pip uninstall triton, pip install "
            "triton-ascend==3.2.0), CANN 8.5 or later must be on PATH ('source <CANN>/set_env.sh'), and g++"
        )
    return found


def _importable(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ImportError:
        return False


def commands(step: str, folder: Path, shapes: Sequence[str], dry_run: bool) -> dict[str, list[str]]:
    """The processes of a step by name."""
    python = sys.executable
    if step == "doctor":
        return {"doctor": [python, "-m", "mindspeed_mamba3_plugin", "doctor"]}
    if step == "tests":
        result = f"--junitxml={folder / 'tests.xml'}"
        return {"tests": [python, "-m", "pytest", "-q", "-x" if dry_run else "--maxfail=50", result,
                          *(DRY_TESTS if dry_run else TESTS)]}  # fmt: skip
    if step == "measure":
        one = [python, "scripts/npu_measure.py", *(["--dry-run"] if dry_run else []), "--shape"]
        return {f"measure_{shape}": [*one, shape, "--output", str(folder / "shapes" / shape)] for shape in shapes}
    changes = [part for key, value in (DRY_RUN if dry_run else {}).items() for part in ("--set", f"{key}={value}")]
    return {"loss_curve": [python, "scripts/compare_loss_curves.py", "--config", "configs/smoke_npu.yaml", "--fresh",
                           "--out", str(folder / "loss_curve"), *changes]}  # fmt: skip


def environment(dry_run: bool) -> dict[str, str]:
    """Of every process. Children find their device themselves; in a dry run there is none."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if dry_run:
        env |= {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return env


def run(name: str, command: list[str], folder: Path, patience: int, env: dict[str, str]) -> Step:
    """One process, its output in a log; whatever happens to it, the next one runs."""
    log, started = folder / "logs" / f"{name}.log", time.monotonic()
    with log.open("w") as output:
        print(f"$ {' '.join(command)}", file=output, flush=True)
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, timeout=patience
            )
            detail = "" if done.returncode == 0 else f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            detail = f"did not end within {patience} s"
    last = log.read_text(errors="replace").strip().splitlines()[-1][:300]
    seconds = time.monotonic() - started
    return Step(
        name, "failed" if detail else "passed", seconds, f"logs/{log.name}", f"{detail}: {last}" if detail else last
    )


def run_all(folder: Path, steps: Sequence[str], shapes: Sequence[str], dry_run: bool) -> list[Step]:
    """Every process of the steps in turn, each said as it ends."""
    found: list[Step] = []
    for step in steps:
        lacking = [f"{n}: {how}" for n, how in NEEDED.get(step, {}).items() if not _importable(n)]
        for name, command in commands(step, folder, shapes, dry_run).items():
            if lacking:
                found.append(Step(name, "missing", 0.0, "", "; ".join(lacking)))
            else:
                print(f"{name} ...", flush=True)
                found.append(run(name, command, folder, PATIENCE[step], environment(dry_run)))
            print(f"{name}: {found[-1].status} ({found[-1].seconds:.0f} s)  {found[-1].detail}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 (every step passed and the rule is met), 1 (not so) or 2 (usage)."""
    import npu_report

    from mindspeed_mamba3_plugin.offline import cases

    known = [s.name for s in cases.official_shapes()]
    parser = argparse.ArgumentParser(
        prog="npu_acceptance.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="all that needs no chip, small, on the CPU")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="default: all")
    parser.add_argument("--shapes", nargs="+", choices=known, metavar="SHAPE", help="default: all 11")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: runs/npu_acceptance/<time>")
    given = parser.parse_args(arguments)
    folder = given.out or ROOT / "runs/npu_acceptance" / datetime.now().strftime("%Y%m%d-%H%M%S")
    if folder.exists() and any(folder.iterdir()):
        parser.error(f"--out {folder}: is not empty; name another folder")
    shapes = given.shapes or list(DRY_SHAPES if given.dry_run else known)
    folder = folder.resolve()
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    if given.dry_run:
        print("DRY RUN on the CPU: no number of it is a measurement")
    done: list[Step] = []
    try:
        done = run_all(folder, given.steps, shapes, given.dry_run)
    except KeyboardInterrupt:
        print("\ninterrupted; the report says what was done", file=sys.stderr)
    return npu_report.write(folder, [vars(s) for s in done], given.dry_run)


if __name__ == "__main__":
    if missing := problems("--dry-run" in sys.argv):
        for sentence in missing:
            print(f"FAIL  {sentence}", file=sys.stderr)
        print("(--dry-run tries the scripts out on a CPU)", file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
