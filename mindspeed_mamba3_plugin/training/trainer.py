"""One training run on megatron.core alone: `python -m mindspeed_mamba3_plugin.training.trainer --config FILE`."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import enable, platforms, revert
from ..config import ConfigError
from ..ops import registry
from ..ops.api import planted
from ..ops.types import GRADIENT_NAMES
from . import data
from .config import RunConfig
from .records import Recorder, Step, identity, versions

NOT_FINITE = 3  # exit status of a run that stopped at a value that is not finite; its records are complete


def train(
    run: RunConfig,
    folder: Path,
    plant: dict[str, float] | None = None,
    text: Path | None = None,
    label: str = "train",
) -> dict[str, Any]:
    """Train, and leave the records of the run in `folder` (see `records`); of several ranks, the first writes.

    Args:
        plant: factors by which gradients of the operator are falsified, {"dk": 1.01}.
        text: folder of the tokenised text (default: `folder`/text).

    Returns:
        The summary, as written to summary.json.
    """
    started = time.perf_counter()
    text = text or folder / "text"
    identified = identity(run, plant or {})  # now: the code on disk may change while this runs
    with session(run), planted(plant or {}):
        first = dist.get_rank() == 0
        if first:
            data.prepare(text, run.data.max_bytes)
        dist.barrier()
        facts = data.prepare(text, run.data.max_bytes)
        job = Job(run, facts["prefix"], text / "index")
        registry.reset_kernel_calls()
        recorder = Recorder(folder, run, label) if first else None
        try:
            for step in job.steps():
                if recorder is not None:
                    recorder.add(step)
        finally:
            if recorder is not None:
                recorder.close()
        summary = {
            "identity": identified,
            "planted": plant or {},
            "steps": step.step,
            "last_loss": step.loss,
            "nonfinite": step.nonfinite,
            "weights": job.weights,
            "data": job.seen.hexdigest(),
            "parameters": job.parameters,
            "text": facts,
            "kernel_calls": registry.kernel_calls(),
            "seconds": time.perf_counter() - started,
            "peak_memory_bytes": platforms.current().peak_memory(),
            "versions": versions(),
            "device": platforms.detect(),
        }
        if recorder is not None:
            recorder.finish(summary)
    return summary


class Job:
    """Model, optimizer and data of a run, stepped one at a time. Lives inside `session`."""

    def __init__(self, run: RunConfig, prefix: str, cache: Path) -> None:
        from megatron.core import parallel_state

        from . import model

        self.run = run
        self.model = model.build_model(run)
        self.optimizer, self.schedule = model.build_optimizer(run, self.model)
        self.weights = model.weights_digest(self.model)
        self.parameters = model.parameter_count(self.model)
        self.seen = hashlib.sha256()  # of the tokens, in the order in which they were trained on
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self._batches = self._counted(data.batches(run, prefix, cache, rank, ranks))
        self._gradient_norms = model.gradient_norms

    def steps(self) -> Iterator[Step]:
        """Train; the last step is the one after which a number is not finite, or the run's last."""
        for number in range(1, self.run.training.steps + 1):
            with platforms.Timer(platforms.current()) as timer:
                loss = self.gradients()
                norms = self._gradient_norms(self.model)
                lr = self.optimizer.param_groups[0]["lr"]
                _, grad_norm, _ = self.optimizer.step()
                self.schedule.step(1)
            step = Step.of(number, loss, float(grad_norm), norms, lr, timer.seconds)
            yield step
            if step.nonfinite is not None:
                return

    def gradients(self) -> float:
        """Forward and backward of the next step's micro-batches; returns the mean loss in nats per token."""
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        t = self.run.training
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=self._batches,
            model=[self.model],
            num_microbatches=t.num_microbatches,
            seq_length=self.run.data.sequence_length,
            micro_batch_size=t.micro_batch_size,
            forward_only=False,
        )
        loss = torch.stack([part["loss"] for part in parts]).mean()
        group = parallel_state.get_data_parallel_group()
        dist.all_reduce(loss, group=group)
        return float(loss) / group.size()

    def _counted(self, batches: Iterator[dict[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
        device = platforms.current().device()
        for batch in batches:
            self.seen.update(batch["tokens"].numpy().tobytes())
            yield {name: tensor.to(device) for name, tensor in batch.items()}


def _forward_step(batches: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module):
    batch = next(batches)
    out = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])

    def loss_of(token_losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mask = batch["loss_mask"]
        loss = (token_losses.float() * mask).sum() / mask.sum()
        return loss, {"loss": loss.detach().clone()}  # megatron divides the other one in place

    return out, loss_of


@contextmanager
def session(run: RunConfig) -> Iterator[None]:
    """Platform, plugin, process groups and seeds of one run; torchrun's variables say how many ranks there are."""
    platform = platforms.current()
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(run.training.threads)
    platform.activate(deterministic=True)
    from megatron.core import parallel_state, tensor_parallel

    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(platform.COLLECTIVE_BACKEND)
    else:  # alone: no port that another run could hold
        dist.init_process_group(platform.COLLECTIVE_BACKEND, store=dist.HashStore(), rank=0, world_size=1)
    try:
        enable(run.mamba3)
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=run.training.tensor_parallel)
        torch.manual_seed(run.training.seed)
        tensor_parallel.model_parallel_cuda_manual_seed(run.training.seed)
        yield
    finally:
        revert()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])


def parse_plant(text: str) -> dict[str, float]:
    """ "dk=1.01,dq=0.99" -> {"dk": 1.01, "dq": 0.99}. Raises ConfigError for anything else."""
    factors = {}
    for part in filter(None, text.split(",")):
        name, _, factor = part.partition("=")
        if name not in GRADIENT_NAMES:
            raise ConfigError(f"--plant {text}: no gradient named {name!r}; allowed are {', '.join(GRADIENT_NAMES)}")
        try:
            factors[name] = float(factor)
        except ValueError:
            raise ConfigError(f"--plant {text}: {part!r} must be NAME=FACTOR, for example dk=1.01") from None
    return factors


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of one run. Returns the exit status: 0, 2 (usage), NOT_FINITE or 130 (Ctrl-C)."""
    parser = argparse.ArgumentParser(prog="train.py", description="Train one hybrid Mamba-3 model from a YAML file.")
    parser.add_argument("--config", required=True, help="YAML file of the run")
    parser.add_argument("--out", type=Path, help="folder of the run's records (default: runs/<name of the file>)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override one key")
    parser.add_argument("--plant", default="", metavar="NAME=FACTOR", help="falsify gradients of the operator")
    parser.add_argument("--text", type=Path, help="folder of the tokenised text (default: OUT/text)")
    parser.add_argument("--label", default="train", help="name shown by the progress bar")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", module="megatron")  # it tells at length which accelerator packages are absent
    try:
        run, plant = RunConfig.from_yaml(args.config, args.set), parse_plant(args.plant)
        run.mamba3.check_environment()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = args.out or Path("runs") / Path(args.config).stem
    try:
        summary = train(run, folder, plant, args.text, args.label)
    except KeyboardInterrupt:
        return 130
    finite = summary["nonfinite"] is None
    if finite:
        line = f"{summary['steps']} steps, last loss {summary['last_loss']:.4f}"
    else:
        line = f"stopped at step {summary['steps']}, {summary['nonfinite']} is not finite"
    if os.environ.get("RANK", "0") == "0":
        print(f"{args.label}: {line}; see {folder}", flush=True)
    return 0 if finite else NOT_FINITE


if __name__ == "__main__":
    sys.exit(main())
