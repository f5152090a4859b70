#!/usr/bin/env python3
"""One official shape on this machine's NPU: errors of all gradients, then times of the two backward kernels, as JSON.

    python scripts/npu_measure.py --shape N128_P64_R4_C16 --output FOLDER

Errors are those against the reference in fp64 on the CPU, on the same inputs. Times are taken at the official size,
over several sets of inputs in turn: of every kernel by the profiler, and of whole calls, gaps included, by events.
With --dry-run everything that needs no chip is done on the CPU, in Triton's interpreter, at a small size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

if __name__ == "__main__" and "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import plain_port
import torch
from benchmark_kernels import make_inputs
from torch import Tensor

from mindspeed_mamba3_plugin import platforms
from mindspeed_mamba3_plugin.offline import cases
from mindspeed_mamba3_plugin.ops import reference, registry
from mindspeed_mamba3_plugin.ops.types import GRADIENT_NAMES, TENSOR_ARGS, Inputs
from mindspeed_mamba3_plugin.platforms import npu
from mindspeed_mamba3_plugin.platforms.npu_timing import KernelTime, elapsed, profiled

FAMILY = "triton-ascend"
ACCURACY_LENGTH = 512
DRY_LENGTH, DRY_HEADS = 20, 2
SETS, REPEATS, PROFILED = 3, 10, 3  # inputs in turn, timings of each, calls of each in a profile
# What is asked of every gradient: relative L2 error, and in fp32 the mean error as a share of the mean size.
STANDARD = {"bf16": {"l2": 5e-3}, "fp32": {"l2": 1e-4, "mean": 1e-3}}


def moved(x: Inputs, device: str) -> Inputs:
    return replace(x, **{n: t.to(device) for n, t in zip(TENSOR_ARGS, x.tensors, strict=True) if t is not None})


def gradient_of(x: Inputs, seed: int) -> Tensor:
    """A gradient of the output, made on the CPU."""
    return torch.randn(x.V.shape, generator=torch.Generator().manual_seed(seed)).to(x.Q.device, x.dtype)


def errors(shape: str, dtype: str, device: str, length: int, heads: int) -> dict[str, dict[str, float]]:
    """Of the output and every gradient: "l2", the relative L2 error, and "mean", mean |error| over mean |value|."""
    x = make_inputs(shape, 1, length, heads, 1, cases.DTYPES[dtype], "cpu")
    grad_out = gradient_of(x, 1)
    wide = {n: t.double() for n, t in zip(TENSOR_ARGS, x.tensors, strict=True) if t is not None}
    truth = replace(x, **wide, dtype=torch.float64)
    wanted = {"out": reference.forward(truth)[0], **reference.backward(truth, grad_out.double())._asdict()}
    kernel, there = registry.load(FAMILY), moved(x, device)
    given = {"out": kernel.forward(there)[0], **kernel.backward(there, grad_out.to(device))._asdict()}
    found = {}
    for name in ("out", *GRADIENT_NAMES):
        if wanted[name] is not None:
            a, b = given[name].cpu().double(), wanted[name].double()
            found[name] = {
                "l2": float((a - b).norm() / b.norm()),
                "mean": float((a - b).abs().mean() / b.abs().mean()),
            }
    return found


def above_standard(found: dict[str, dict[str, dict[str, float]]], dtypes: Iterable[str]) -> list[str]:
    """Where errors by dtype, name and kind miss what is asked, one sentence each; NaN misses it too."""
    return [
        f"{dtype} {name}: {kind} error {value[kind]:.1e}, allowed {limit:.0e}"
        for dtype in dtypes
        for name, value in found[dtype].items()
        for kind, limit in STANDARD[dtype].items()
        if not value[kind] < limit
    ]


def same_bits(x: Inputs, grad_out: Tensor) -> bool:
    """Whether two backward calls give the same finite bits, for every gradient."""
    a, b = (registry.load(FAMILY).backward(x, grad_out) for _ in range(2))
    pairs = [(s, t) for s, t in zip(a, b, strict=True) if s is not None]
    return all(torch.equal(s, t) and bool(torch.isfinite(s).all()) for s, t in pairs)


def difference(both: dict[str, KernelTime], first: dict[str, KernelTime]) -> dict[str, KernelTime]:
    """The kernels of the second of two entry points, from those of both and of the first."""
    none = KernelTime(0, 0.0)
    rest = {n: (t.launches - first.get(n, none).launches, t.ms - first.get(n, none).ms) for n, t in both.items()}
    return {n: KernelTime(launches, ms) for n, (launches, ms) in rest.items() if launches > 0}


def on_chip(sets: list[tuple[Inputs, Tensor]], folder: Path) -> dict:
    """Times by kernel and by call, in ms. Where the profiler fails, events stand in for the kernels' own times: with
    the gaps between kernels they are no shorter."""
    family = registry.load(FAMILY)
    spent: dict[str, list[float]] = {"forward": [], "bwd_fwd": [], "bwd_bwd": []}
    for x, g in sets:
        for row in elapsed([lambda _, x=x: family.forward(x)], REPEATS + 1)[1:]:
            spent["forward"] += row
        halves = [lambda _, x=x, g=g: family.bwd_fwd(x, g), lambda residuals, x=x: family.bwd_bwd(x, residuals)]
        for before, after in elapsed(halves, REPEATS + 1)[1:]:
            spent["bwd_fwd"].append(before)
            spent["bwd_bwd"].append(after)
    by_event = {name: statistics.median(ms) for name, ms in spent.items()}
    calls = sets * PROFILED
    try:
        first = profiled([lambda x=x, g=g: family.bwd_fwd(x, g) for x, g in calls], folder / "profile_bwd_fwd")
        both = profiled([lambda x=x, g=g: family.backward(x, g) for x, g in calls], folder / "profile_backward")
    except (ImportError, OSError, RuntimeError) as error:
        print(f"no times by kernel: {error}", file=sys.stderr)
        return {
            **times({}, {}, by_event),
            "device_ms": {entry: by_event[entry] for entry in ("bwd_fwd", "bwd_bwd")},
            "profile_error": str(error),
        }
    return times(first, both, by_event)


def times(first: dict[str, KernelTime], both: dict[str, KernelTime], spent: dict[str, float]) -> dict:
    kernels = {"bwd_fwd": first, "bwd_bwd": difference(both, first)}
    return {
        "kernels": {entry: {n: asdict(t) for n, t in found.items()} for entry, found in kernels.items()},
        "device_ms": {entry: sum(t.ms for t in found.values()) for entry, found in kernels.items()},
        "elapsed_ms": spent,
    }


@contextmanager
def interpreted() -> Iterator[dict[str, KernelTime]]:
    """Inside, launches in Triton's interpreter are counted and timed, by kernel."""
    from triton.runtime import interpreter

    found: dict[str, KernelTime] = {}
    launch = interpreter.GridExecutor.__call__

    def timed(self, *arguments, **keywords):
        started = time.perf_counter()
        launch(self, *arguments, **keywords)
        before = found.get(self.fn.__name__, KernelTime(0, 0.0))
        ms = 1e3 * (time.perf_counter() - started)
        found[self.fn.__name__] = KernelTime(before.launches + 1, before.ms + ms)

    with mock.patch.object(interpreter.GridExecutor, "__call__", timed):
        yield found


def clocked(parts: Sequence[Callable[[object], object]]) -> list[float]:
    """What `elapsed` returns of one repetition, by the host's clock."""
    value, spent = None, []
    for part in parts:
        started = time.perf_counter()
        value = part(value)
        spent.append(1e3 * (time.perf_counter() - started))
    return spent


def dry(x: Inputs, grad_out: Tensor) -> dict:
    """What `on_chip` returns, of one call in the interpreter."""
    family, spent = registry.load(FAMILY), {}
    (spent["forward"],) = clocked([lambda _: family.forward(x)])
    with interpreted() as first:
        (spent["bwd_fwd"],) = clocked([lambda _: family.bwd_fwd(x, grad_out)])
    with interpreted() as both:
        residuals = family.bwd_fwd(x, grad_out)
        (spent["bwd_bwd"],) = clocked([lambda _: family.bwd_bwd(x, residuals)])
    return times(first, both, spent)


def direct_translation(x: Inputs, grad_out: Tensor, dry_run: bool) -> dict[str, float | str]:
    """ms of both kernels of scripts/plain_port.py, or why they do not run: at some shapes they are too large."""
    sums = plain_port.prepare(x)
    parts = [
        lambda _: plain_port.bwd_fwd(x, sums, grad_out),
        lambda first: plain_port.bwd_bwd(x, sums, grad_out, first["states"]),
    ]
    try:
        rows = [clocked(parts)] if dry_run else elapsed(parts, REPEATS + 1)[1:]
    except Exception as error:  # whatever the compiler raises is the answer
        return {"error": f"{type(error).__name__}: {str(error).strip()[:300]}"}
    return dict(zip(("bwd_fwd", "bwd_bwd"), map(statistics.median, zip(*rows, strict=True)), strict=True))


def measure(shape: str, folder: Path, dry_run: bool) -> dict:
    """Everything about one shape, as written to `folder`/result.json."""
    device = "cpu" if dry_run else "npu"
    length, heads = (DRY_LENGTH, DRY_HEADS) if dry_run else (ACCURACY_LENGTH, cases.H)
    if not dry_run:
        import torch_npu  # noqa: F401  registers torch.npu

        torch.npu.set_device(0)
    result: dict = {"shape": shape, "dtype": "bf16", "dry_run": dry_run}
    result["errors"] = {dtype: errors(shape, dtype, device, length, heads) for dtype in STANDARD}
    # In the few elements of a dry run the rounding of bf16 scatters around its standard.
    result["above_standard"] = above_standard(result["errors"], ["fp32"] if dry_run else STANDARD)
    B, S = (1, DRY_LENGTH) if dry_run else (cases.B, cases.S)
    sets = []
    for seed in range(1 if dry_run else SETS):
        x = make_inputs(shape, B, S, heads, cases.G, torch.bfloat16, "cpu", seed)
        sets.append((moved(x, device), gradient_of(x, seed + 100).to(device)))
    result["same_bits"] = same_bits(*sets[0])
    result |= dry(*sets[0]) if dry_run else on_chip(sets, folder)
    result["peak_memory_bytes"] = None if dry_run else platforms.current().peak_memory()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "result.json"
    path.write_text(json.dumps(result, indent=1))
    # Last, since it may take the device with it.
    x = make_inputs(shape, B, 2 * sets[0][0].chunk_size if dry_run else S, heads, cases.G, torch.bfloat16, "cpu")
    result["direct_translation_ms"] = direct_translation(moved(x, device), gradient_of(x, 1).to(device), dry_run)
    path.write_text(json.dumps(result, indent=1))
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, 1 (an error above the standard, or other bits the second time) or 2 (usage)."""
    shapes = [s.name for s in cases.official_shapes()]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", required=True, choices=shapes, metavar="SHAPE", help=", ".join(shapes))
    parser.add_argument("--output", required=True, type=Path, metavar="FOLDER")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, small, no measurement")
    given = parser.parse_args(arguments)
    if not given.dry_run and (why := npu.missing()) is not None:
        print(f"error: {why}; or try --dry-run", file=sys.stderr)
        return 2
    found = measure(given.shape, given.output, given.dry_run)
    how = "dry run, no measurement" if given.dry_run else "of all kernels, on the device"
    spent = ", ".join(f"{entry} {ms:.3f} ms" for entry, ms in found["device_ms"].items())
    print(f"{given.shape}: {spent} ({how}); same bits twice: {'yes' if found['same_bits'] else 'NO'}")
    for sentence in found["above_standard"]:
        print(f"  ABOVE THE STANDARD: {sentence}")
    return int(bool(found["above_standard"]) or not found["same_bits"])


if __name__ == "__main__":
    sys.exit(main())
