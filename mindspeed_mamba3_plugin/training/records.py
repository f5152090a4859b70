"""What a run leaves in its folder: run.yaml, steps.jsonl (one object per step), summary.json (written last, so its
presence says that the run is finished) and TensorBoard files."""

from __future__ import annotations

import hashlib
import json
import math
import platform as host
import shutil
import sys
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import yaml
from tqdm import tqdm

from .config import RunConfig

_PACKAGES = ("mindspeed_mamba3_plugin", "torch", "megatron-core", "triton", "numpy")
_NPU_PACKAGES = ("torch_npu", "triton-ascend")  # named where they are


@dataclass
class Step:
    """One step. A number that is not finite is recorded as None, and `nonfinite` names the first such tensor."""

    step: int
    loss: float | None
    grad_norm: float | None
    grad_norms: dict[str, float | None]
    lr: float
    seconds: float
    nonfinite: str | None = None

    @classmethod
    def of(cls, step: int, loss: float, grad_norm: float, grad_norms: dict[str, float], lr: float, seconds: float):
        """The record of a step's raw numbers."""
        named = {"loss": loss, **{f"gradient of {name}": norm for name, norm in grad_norms.items()}}
        named["gradient norm"] = grad_norm
        bad = next((name for name, value in named.items() if not math.isfinite(value)), None)
        finite = {name: _finite(value) for name, value in grad_norms.items()}
        return cls(step, _finite(loss), _finite(grad_norm), finite, lr, seconds, bad)


@dataclass
class Run:
    """A finished run, read back."""

    summary: dict[str, Any]
    steps: list[Step] = field(default_factory=list)

    @property
    def losses(self) -> list[float | None]:
        return [s.loss for s in self.steps]


class Recorder:
    """Writes a run's folder, and shows its progress: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, folder: Path, run: RunConfig, label: str) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").unlink(missing_ok=True)
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)
        (folder / "run.yaml").write_text(yaml.safe_dump(run.to_mapping(), sort_keys=False))
        self._folder, self._label, self._total = folder, label, run.training.steps
        self._lines = (folder / "steps.jsonl").open("w")
        self._board = SummaryWriter(str(folder / "tensorboard"))
        self._bar = tqdm(total=self._total, desc=label, unit="step", disable=not sys.stderr.isatty())

    def add(self, step: Step) -> None:
        self._lines.write(json.dumps(asdict(step)) + "\n")
        self._lines.flush()
        scalars = {"loss": step.loss, "grad_norm": step.grad_norm, "lr": step.lr, "seconds": step.seconds}
        scalars |= {f"grad_norm/{name}": norm for name, norm in step.grad_norms.items()}
        for name, value in scalars.items():
            if value is not None:
                self._board.add_scalar(name, value, step.step)
        loss = "not finite" if step.loss is None else f"{step.loss:.4f}"
        self._bar.set_postfix(loss=loss, refresh=False)
        self._bar.update()
        every = max(1, self._total // 5)
        if self._bar.disable and (step.step in (1, self._total) or step.step % every == 0):
            print(f"{self._label}: step {step.step}/{self._total}  loss {loss}  {step.seconds:.2f} s", flush=True)

    def finish(self, summary: dict[str, Any]) -> None:
        """Say that the run is complete; after `close`."""
        (self._folder / "summary.json").write_text(json.dumps(summary, indent=1))

    def close(self) -> None:
        self._bar.close()
        self._board.close()
        self._lines.close()


def read(folder: Path) -> Run | None:
    """The finished run in `folder`, or None when there is none."""
    if not (folder / "summary.json").is_file():
        return None
    lines = (folder / "steps.jsonl").read_text().splitlines()
    return Run(json.loads((folder / "summary.json").read_text()), [Step(**json.loads(line)) for line in lines])


def identity(run: RunConfig, plant: dict[str, float]) -> str:
    """Hash of everything that a run's numbers depend on: settings, planted errors, this code, packages, device."""
    content = [run.digest(), plant, _source_digest(), versions(), torch.cuda.is_available()]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that the numbers depend on."""
    found = {"python": host.python_version()}
    for name in (*_PACKAGES, *_NPU_PACKAGES):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if name in _PACKAGES:
                found[name] = "not installed"
    return found


def _source_digest() -> str:
    digest = hashlib.sha256()
    package = __package__.partition(".")[0]
    roots = [Path(find_spec(name).origin).parent for name in (package, f"{package}.patches")]
    for path in sorted({p for root in roots for p in root.rglob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
