"""Which gradient of the operator is wrong? Both backward kernels on the layers' real inputs of the first step."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import reference
from ..ops.api import mamba3_mimo, planted
from ..ops.types import GRADIENT_NAMES, TENSOR_ARGS, Gradients, Inputs
from . import data
from .config import RunConfig
from .trainer import Job, parse_plant, session

# Standard for an operator gradient against the reference on the same inputs, relative L2.
STANDARD = {"fp32": 1e-4, "bf16": 5e-3}


def diagnose(run: RunConfig, text: Path, plant: dict[str, float]) -> dict[str, Any]:
    """Run the first step on the reference, then compare the candidate's backward of every Mamba-3 layer with it.

    Returns:
        {"errors": {gradient: largest relative L2 error over the layers}, "worst": {"gradient", "layer", "error"},
        "standard": the error that is allowed}; layers count from 0 over the whole pattern
    """
    calls: list[tuple[Inputs, Tensor]] = []
    original = reference.backward

    def recording(x: Inputs, grad_out: Tensor) -> Gradients:
        calls.append((x, grad_out.clone()))
        return original(x, grad_out)

    facts = data.prepare(text, run.data.max_bytes)
    baseline = run.with_mamba3(mamba3_backward_kernel="reference")
    with session(baseline):
        with mock.patch.object(reference, "backward", recording):
            Job(baseline, facts["prefix"], text / "index").gradients()
        layers = [i for i, letter in enumerate(run.model.hybrid_override_pattern) if letter == "M"]
        errors: dict[str, dict[int, float]] = {}
        # The backward visits the layers from the last to the first.
        for layer, (x, grad_out) in zip(reversed(layers), calls, strict=False):
            wanted = _gradients(x, grad_out, "reference")
            with planted(plant):
                given = _gradients(x, grad_out, run.mamba3.mamba3_backward_kernel)
            for name, gradient in wanted.items():
                errors.setdefault(name, {})[layer] = _relative_error(given[name], gradient)
    gradient, layer, error = max(
        ((name, layer, error) for name, by_layer in errors.items() for layer, error in by_layer.items()),
        key=lambda found: found[2],
    )
    return {
        "errors": {name: max(by_layer.values()) for name, by_layer in errors.items()},
        "worst": {"gradient": gradient, "layer": layer, "error": error},
        "standard": STANDARD[run.model.params_dtype],
    }


def _gradients(x: Inputs, grad_out: Tensor, kernel: str) -> dict[str, Tensor]:
    """The operator's gradients by name, through its public entry."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in x.tensors]
    arguments = dict(zip(TENSOR_ARGS, leaves, strict=True))
    with torch.enable_grad():
        out = mamba3_mimo(
            **arguments,
            chunk_size=x.chunk_size,
            rotary_dim_divisor=x.rotary_dim_divisor,
            dtype=x.dtype,
            cu_seqlens=x.cu_seqlens,
            fuse_pregate_headwise_rms_norm=x.fuse_norm,
            outproj_norm_eps=x.norm_eps,
            forward_kernel="reference",
            backward_kernel=kernel,
        )
        present = {name: leaf for name, leaf in zip(GRADIENT_NAMES, leaves, strict=True) if leaf is not None}
        return dict(zip(present, torch.autograd.grad(out, list(present.values()), grad_out), strict=True))


def _relative_error(given: Tensor, wanted: Tensor) -> float:
    """Relative L2 error over all tensor-parallel ranks' shares; infinite where something is not finite."""
    from megatron.core import parallel_state

    device, given, wanted = given.device, given.cpu().double(), wanted.cpu().double()  # NPUs do not calculate in fp64
    squares = torch.stack([(given - wanted).square().sum(), wanted.square().sum()]).float().to(device)
    dist.all_reduce(squares, group=parallel_state.get_tensor_model_parallel_group())
    error, size = squares.tolist()
    return math.sqrt(error / max(size, 1e-30)) if math.isfinite(error) else math.inf


def main(argv: Sequence[str] | None = None) -> int:
    """Command line, used by `compare` in a process with the candidate's environment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--plant", default="")
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", module="megatron")
    found = diagnose(RunConfig.from_yaml(args.config), args.text, parse_plant(args.plant))
    if os.environ.get("RANK", "0") == "0":
        args.out.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
