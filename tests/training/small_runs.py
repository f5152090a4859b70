"""A small run, records of it, and made-up records to judge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mindspeed_mamba3_plugin.ops.api import planted
from mindspeed_mamba3_plugin.ops.types import GRADIENT_NAMES
from mindspeed_mamba3_plugin.training.config import RunConfig
from mindspeed_mamba3_plugin.training.records import Run, Step
from mindspeed_mamba3_plugin.training.trainer import Job, session

SMALL = {
    "model": {
        "hybrid_override_pattern": "M*-M",
        "hidden_size": 32,
        "ffn_hidden_size": 32,
        "num_attention_heads": 2,
        "mamba_state_dim": 16,
        "mamba_head_dim": 16,
        "mamba_num_heads": 2,
    },
    "mamba3": {
        "use_mamba3_mixer": True,
        "mamba3_mimo_rank": 2,
        "mamba3_chunk_size": 16,
        "mamba3_forward_kernel": "reference",
        "mamba3_backward_kernel": "reference",
        "mamba3_outproj_norm": True,
    },
    "data": {"sequence_length": 32, "max_bytes": 100_000},
    "training": {"steps": 2},
}

GROUPS = tuple(f"group of {name}" for name in GRADIENT_NAMES)


def trained(run: RunConfig, text: Path, plant: dict[str, float] | None = None) -> Run:
    """The records of a run in this process."""
    with session(run), planted(plant or {}):
        job = Job(run, str(text / "text"), text / "index")
        steps = list(job.steps())
        return Run(summary(weights=job.weights, data=job.seen.hexdigest()), steps)


def summary(backward: str = "reference.backward", **facts: Any) -> dict[str, Any]:
    """What the judge and the report read of a summary.json."""
    return {
        "identity": "i",
        "weights": "w",
        "data": "d",
        "kernel_calls": {"reference.forward": 4, backward: 4},
        "text": {"unigram_loss": 3.1, "documents": 1, "tokens": 2, "digest": "t"},
        "parameters": 3,
        "seconds": 1.0,
        "peak_memory_bytes": None,
        "versions": {},
        "device": "cpu",
        **facts,
    }


def synthetic(
    steps: int = 20, noise: float = 0.0, scale: dict[str, float] | None = None, backward: str = "reference.backward"
) -> Run:
    """A made-up run whose numbers are off by the relative `noise`, and whose groups are scaled by `scale`."""
    records = []
    for n in range(1, steps + 1):
        sign = 1 if n % 2 else -1
        groups = {g: 0.5 * (scale or {}).get(g, 1.0) * (1 + sign * noise) for g in GROUPS}
        records.append(
            Step.of(n, (6 / (1 + 0.1 * n)) * (1 + sign * noise), 2.0 * (1 + sign * noise), groups, 1e-3, 0.1)
        )
    return Run(summary(backward), records)
