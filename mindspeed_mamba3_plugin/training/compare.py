"""The loss-curve comparison: three runs in processes of their own, a verdict, and its report.

baseline     the run of the YAML file on the reference, forward and backward
noise floor  the baseline with another chunk size: same maths, other rounding
candidate    the run of the YAML file as it is, on the backward kernel that it names
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from .. import platforms
from ..config import ConfigError, flag
from . import data, records
from .config import RunConfig
from .judge import judge
from .report import write_report
from .trainer import NOT_FINITE, parse_plant


class RunFailed(RuntimeError):
    """A run's process ended without a result."""


@dataclass(frozen=True)
class Variant:
    """One of the three runs."""

    name: str
    run: RunConfig
    plant: str = ""

    @property
    def identity(self) -> str:
        return records.identity(self.run, parse_plant(self.plant))

    def environment(self) -> dict[str, str]:
        """The process's environment; only a Triton candidate without an accelerator runs in the interpreter."""
        env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        env.setdefault("OMP_NUM_THREADS", str(self.run.training.threads))
        if self.run.mamba3.mamba3_backward_kernel.startswith("triton") and platforms.detect() == "cpu":
            env["TRITON_INTERPRET"] = "1"
        return env


def variants(run: RunConfig, plant: str = "") -> tuple[Variant, Variant, Variant]:
    """Baseline, noise floor and candidate of a run.

    Raises:
        ConfigError: the candidate is the baseline, or the floor's chunk size is the baseline's.
    """
    kernel, chunk = run.mamba3.mamba3_backward_kernel, run.compare.floor_chunk_size
    if kernel in ("auto", "reference"):
        raise ConfigError(
            f"mamba3.mamba3_backward_kernel {kernel}: must name the kernel to compare with the reference "
            f"(triton, triton-ascend, triton-gpu or tilelang)"
        )
    if chunk == run.mamba3.chunk_size:
        raise ConfigError(f"compare.floor_chunk_size {chunk}: must differ from {flag('mamba3_chunk_size')} {chunk}")
    run.mamba3.check_environment()
    baseline = run.with_mamba3(mamba3_forward_kernel="reference", mamba3_backward_kernel="reference")
    return (
        Variant("baseline", baseline),
        Variant("noise_floor", baseline.with_mamba3(mamba3_chunk_size=chunk)),
        Variant("candidate", run, plant),
    )


def compare(run: RunConfig, out: Path, plant: str = "", fresh: bool = False) -> bool:
    """Run what is not there yet, judge, and write `out`/report.json and loss_curve.png. Returns whether it passed."""
    started = time.perf_counter()
    three = variants(run, plant)
    data.prepare(out / "text", run.data.max_bytes)
    done = [_obtain(variant, out, fresh) for variant in three]
    baseline, floor, candidate = done
    verdict = judge(run, baseline, candidate, floor)
    diagnosis = None if verdict.passed else _diagnose(three[2], out)
    line = write_report(out, run, dict(zip(("baseline", "noise_floor", "candidate"), done, strict=True)), verdict,
                        diagnosis, plant, time.perf_counter() - started)  # fmt: skip
    print(line, flush=True)
    return verdict.passed


def _obtain(variant: Variant, out: Path, fresh: bool) -> records.Run:
    """The variant's finished run, from `out` when it is there and nothing that it depends on has changed."""
    folder = out / variant.name
    found = None if fresh else records.read(folder)
    if found is not None and found.summary["identity"] == variant.identity:
        print(f"{variant.name}: finished before, reused ({folder})", flush=True)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(variant.run.to_mapping(), sort_keys=False))
        _process(variant, "trainer", "--config", config, "--out", folder, "--text", out / "text",
                 "--label", variant.name, "--plant", variant.plant)  # fmt: skip
        found = records.read(folder)
    calls = ", ".join(f"{name} {n}" for name, n in sorted(found.summary["kernel_calls"].items()))
    print(f"{variant.name}: initial weights {found.summary['weights'][:12]}, kernel calls: {calls}", flush=True)
    return found


def _diagnose(candidate: Variant, out: Path) -> dict | None:
    """Compare the operator's gradients one by one, in the candidate's environment."""
    print("the runs differ: comparing every gradient of the operator at step 1", flush=True)
    result = out / "diagnosis.json"
    result.unlink(missing_ok=True)
    try:
        _process(candidate, "diagnose", "--config", out / candidate.name / "run.yaml", "--text", out / "text",
                 "--plant", candidate.plant, "--out", result)  # fmt: skip
    except RunFailed as error:
        print(f"no diagnosis: {error}", file=sys.stderr)
        return None
    return json.loads(result.read_text())


def _process(variant: Variant, module: str, *arguments: str | Path) -> None:
    command = [sys.executable, "-m", f"{__package__}.{module}", *map(str, arguments)]
    if (ranks := variant.run.training.tensor_parallel) > 1:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    status = subprocess.run(command, env=variant.environment()).returncode
    if status in (130, -signal.SIGINT):
        raise KeyboardInterrupt
    if status not in (0, NOT_FINITE):
        raise RunFailed(f"the {variant.name} process ended with status {status}; its messages are above")


def main(argv: Sequence[str] | None = None) -> int:
    """Command line. Returns 0 (the curves agree), 1 (they do not, or a run failed), 2 (usage) or 130 (Ctrl-C)."""
    parser = argparse.ArgumentParser(
        prog="compare_loss_curves.py",
        description="Train the same model on the reference backward and on another one, and say whether they agree.",
    )
    parser.add_argument("--config", required=True, help="YAML file of the run; its backward kernel is the candidate")
    parser.add_argument("--out", type=Path, help="folder of runs and report (default: runs/<name of the file>)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")
    parser.add_argument(
        "--plant", default="", metavar="NAME=FACTOR", help="falsify gradients of the candidate, for example dk=1.01"
    )
    again = parser.add_mutually_exclusive_group()
    again.add_argument("--resume", action="store_true", help="reuse finished runs that are still valid (default)")
    again.add_argument("--fresh", action="store_true", help="run everything again")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", module="megatron")  # it tells at length which accelerator packages are absent
    out = args.out or Path("runs") / (Path(args.config).stem + ("_planted" if args.plant else ""))
    try:
        run = RunConfig.from_yaml(args.config, args.set)
        parse_plant(args.plant)
        return 0 if compare(run, out, args.plant, args.fresh) else 1
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"FAIL  {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\ninterrupted; finished runs in {out} are reused next time", file=sys.stderr)
        return 130
