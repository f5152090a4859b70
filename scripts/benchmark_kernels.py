#!/usr/bin/env python
"""Time the operator's kernels at the official shapes, after checking them against the reference.

    python scripts/benchmark_kernels.py --output docs/benchmarks/h200.json
    python scripts/benchmark_kernels.py --kernel triton-ascend --shapes N64_P64_R4_C16 --repeats 5

Where mamba_ssm and tilelang are installed, state-spaces/mamba's TileLang kernels are timed in the same run, on the
same inputs (compiling takes them minutes). An NPU is timed the same way, by plain calls and without times by kernel:
those are `npu_acceptance.sh`'s.

Every case is checked first: outputs and all gradients against the fp32 reference on the same inputs. Then the forward
and the whole backward are timed (device events around replays of a CUDA graph, or around plain calls where graphs are
not available), over several sets of inputs in turn, so that no call finds its inputs in the cache; the median is
reported. A profile gives the time of every kernel of one backward.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
import sys
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_mamba3_plugin import platforms
from mindspeed_mamba3_plugin.ops import reference, registry
from mindspeed_mamba3_plugin.ops.types import GRADIENT_NAMES, TENSOR_ARGS, Inputs

OFFICIAL = (
    "N16_P64_R4_C8", "N32_P64_R4_C16", "N64_P64_R4_C16", "N128_P64_R4_C16", "N256_P64_R4_C8", "N64_P128_R4_C16",
    "N128_P32_R4_C16", "N128_P128_R4_C8", "N128_P64_R8_C8", "N128_P64_R2_C32", "N128_P64_R1_C64",
)  # fmt: skip
BOUND = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 1e-2}
DEVICE = platforms.detect()
ACCELERATOR = torch.get_device_module(DEVICE)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def sizes_of(shape: str) -> tuple[int, int, int, int]:
    """(N, P, R, C) of a name such as N128_P64_R4_C16."""
    try:
        N, P, R, C = (int(part[1:]) for part in shape.split("_"))
    except ValueError:
        raise SystemExit(f"--shapes: {shape!r} is not of the form N128_P64_R4_C16") from None
    return N, P, R, C


def make_inputs(
    shape: str, batch: int, length: int, heads: int, groups: int, dtype: torch.dtype, device: str, seed: int = 0,
    norm: bool = False,
) -> Inputs:  # fmt: skip
    """Inputs distributed as in upstream's tests."""
    N, P, R, C = sizes_of(shape)
    B, S, H, G = batch, length, heads, groups
    g = torch.Generator(device).manual_seed(seed)

    def normal(*size: int, of: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=g, device=device).to(of)

    dt = F.softplus(normal(B, H, S) - 3)
    return Inputs(
        Q=normal(B, S, R, G, N, of=dtype), K=normal(B, S, R, G, N, of=dtype), V=normal(B, S, H, P, of=dtype),
        ADT=-torch.rand(B, H, S, generator=g, device=device) * dt, DT=dt, Trap=normal(B, H, S, of=dtype),
        Q_bias=normal(H, R, N), K_bias=normal(H, R, N), MIMO_V=normal(H, R, P) / R, MIMO_Z=normal(H, R, P),
        MIMO_Out=normal(H, R, P) / R, Angles=normal(B, S, H, N // 4), D=normal(H), Z=normal(B, S, H, P, of=dtype),
        outproj_norm_weight=normal(H, P) if norm else None, cu_seqlens=None, chunk_size=C, rotary_dim_divisor=4,
        dtype=dtype, return_state=False, fuse_norm=norm, norm_eps=1e-5,
    )  # fmt: skip


def check(kernel, x: Inputs, grad_out: Tensor) -> dict[str, float]:
    """Relative L2 error of the output and of every gradient against the reference in fp32."""
    wide = {n: t.float() for n, t in zip(TENSOR_ARGS, x.tensors, strict=True) if t is not None}
    truth = replace(x, dtype=torch.float32, chunk_size=max(8, 64 // x.Q.shape[2]), **wide)
    found = {"out": kernel.forward(x)[0], **kernel.backward(x, grad_out)._asdict()}
    expected = {"out": reference.chunk_form(truth)[0], **reference.backward(truth, grad_out.float())._asdict()}
    errors = {}
    for name in ("out", *GRADIENT_NAMES):
        if expected[name] is not None:
            a, b = found[name].double(), expected[name].double()
            errors[name] = float((a - b).norm() / b.norm()) if bool(torch.isfinite(a).all()) else math.inf
    return errors


def floor_ms(x: Inputs, tflops: float, tbytes: float) -> float:
    """The least time of a whole backward: its products, or its inputs and outputs moved once with states and
    gradients of each head in 16 bits, whichever takes longer."""
    B, S, H, G, R, N, P = x.sizes
    rows, M = B * S * H * R, x.chunk_size * R
    flop = 2 * rows * (6 * N * P + 4 * M * N + 3 * M * P)
    size = x.Q.element_size()
    angles, values = B * S * H * x.Angles.shape[-1] * x.Angles.element_size(), B * S * H * P * size
    compulsory = 2 * (2 * B * S * R * G * N * size + 2 * values + angles + 3 * B * H * S * 4) + values
    staged = 4 * (rows // M) * N * P * 2 + 4 * rows * N * 2
    return max(flop / tflops * 1e-9, (compulsory + staged) / tbytes * 1e-9)


def timed(calls: list, repeats: int, graphs: bool) -> float:
    """Median milliseconds of one call, taking `calls` in turn, with the device busy before: what the host takes to
    launch the first of them is not the kernels' time."""
    for call in calls:
        call()
    ACCELERATOR.synchronize()
    if graphs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        run = graph.replay
    else:

        def run() -> None:
            for call in calls:
                call()

    times = []
    for _ in range(repeats):
        begin, end = ACCELERATOR.Event(enable_timing=True), ACCELERATOR.Event(enable_timing=True)
        run()
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def peak_extra(call) -> float:
    """MB that a call allocates at its peak, results included."""
    ACCELERATOR.synchronize()
    ACCELERATOR.reset_peak_memory_stats()
    before = ACCELERATOR.memory_allocated()
    result = call()
    ACCELERATOR.synchronize()
    peak = ACCELERATOR.max_memory_allocated() - before
    del result
    return peak / 1e6


def stages(call) -> dict[str, float]:
    """Milliseconds by kernel of one call."""
    from torch.profiler import ProfilerActivity, profile

    call()
    ACCELERATOR.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        for _ in range(3):
            call()
        ACCELERATOR.synchronize()
    found = {e.key: e.device_time_total / 3e3 for e in p.key_averages() if e.device_time_total > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def measure(shape: str, args: argparse.Namespace) -> dict:
    """One case: its errors, and its times and memory if the errors are inside the bound (which is ours: TileLang's
    are only reported)."""
    kernel, dtype = registry.load(args.kernel), DTYPES[args.dtype]

    def inputs(seed: int) -> tuple[Inputs, Tensor]:
        x = make_inputs(shape, args.batch, args.length, args.heads, args.groups, dtype, DEVICE, seed, norm=args.norm)
        g = torch.Generator(DEVICE).manual_seed(seed + 100)
        return x, torch.randn(x.V.shape, generator=g, device=DEVICE).to(dtype)

    sets = [inputs(seed) for seed in range(args.sets)]
    row: dict = {"shape": shape}
    if not args.no_check:
        row["errors"] = check(kernel, *sets[0])
        row["worst_error"] = max(row["errors"].values())
        ACCELERATOR.empty_cache()
        if args.kernel != "tilelang" and not row["worst_error"] < BOUND[dtype]:
            return row
    backwards = [lambda x=x, g=g: kernel.backward(x, g) for x, g in sets]
    row["backward_extra_MB"] = peak_extra(backwards[0])
    row["forward_ms"] = timed([lambda x=x: kernel.forward(x) for x, _ in sets], args.repeats, not args.no_graphs)
    row["backward_ms"] = timed(backwards, args.repeats, not args.no_graphs)
    row["floor_ms"] = floor_ms(sets[0][0], args.tflops, args.tbytes)
    row["times_floor"] = row["backward_ms"] / row["floor_ms"]
    if args.stages:
        row["forward_stages_ms"] = stages(lambda: kernel.forward(sets[0][0]))
        row["backward_stages_ms"] = stages(backwards[0])
    return row


def measure_tilelang(shape: str, args: argparse.Namespace) -> dict:
    """The same case with TileLang's kernels."""
    row = measure(shape, argparse.Namespace(**{**vars(args), "kernel": "tilelang", "stages": False}))
    ACCELERATOR.empty_cache()
    return {name: value for name, value in row.items() if name not in ("shape", "floor_ms")}


def environment() -> dict[str, str]:
    installed = {name: import_module(name).__version__ for name in ("torch", "triton", "tilelang") if find_spec(name)}
    return {
        "date": datetime.date.today().isoformat(),
        "device": ACCELERATOR.get_device_name(),
        "python": platform.python_version(),
        **installed,
    }


def line(label: str, row: dict) -> str:
    return (
        f"{label:18s} {row.get('worst_error', math.nan):8.1e} {row.get('forward_ms', math.nan):8.3f} "
        f"{row.get('backward_ms', math.nan):8.3f} {row.get('times_floor', math.nan):8.2f} "
        f"{row.get('backward_extra_MB', math.nan):7.0f}"
    )


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kernel", default=registry.resolve("auto", DEVICE), choices=registry.KERNEL_NAMES[1:])
    p.add_argument("--shapes", nargs="*", default=list(OFFICIAL), metavar="N128_P64_R4_C16")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--length", type=int, default=2048)
    p.add_argument("--heads", type=int, default=16)
    p.add_argument("--groups", type=int, default=1)
    p.add_argument("--dtype", default="bf16", choices=DTYPES)
    p.add_argument("--norm", action="store_true", help="with the fused norm")
    p.add_argument("--sets", type=int, default=3, help="sets of inputs taken in turn")
    p.add_argument("--repeats", type=int, default=20, help="measurements of which the median is taken")
    p.add_argument("--no-check", action="store_true")
    p.add_argument("--no-graphs", action="store_true", help="time plain calls, launch gaps included")
    p.add_argument("--stages", action="store_true", help="also the time of every kernel")
    p.add_argument("--tflops", type=float, default=711.0, help="measured matrix rate, for the floor")
    p.add_argument("--tbytes", type=float, default=4.3, help="measured TB/s of a copy, for the floor")
    p.add_argument("--output", type=Path, help="JSON file")
    p.add_argument("--alone", action="store_true", help="without TileLang's kernels beside")
    args = p.parse_args(argv)
    if DEVICE == "cpu":
        raise SystemExit("benchmark_kernels: neither an NVIDIA GPU nor an NPU here")
    args.no_graphs |= DEVICE != "cuda"
    args.stages &= DEVICE == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    beside = not args.alone and args.kernel != "tilelang" and not registry.missing("tilelang")
    print(f"{'shape':18s} {'error':>8s} {'fwd ms':>8s} {'bwd ms':>8s} {'x floor':>8s} {'MB':>7s}")
    for shape in args.shapes:
        row = measure(shape, args)
        rows.append(row)
        print(line(shape, row), flush=True)
        if beside:
            row["tilelang"] = measure_tilelang(shape, args)
            print(line("  TileLang", row["tilelang"]), flush=True)
        for name, ms in row.get("backward_stages_ms", {}).items():
            print(f"    {ms:7.4f} {name[:90]}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        options = {k: v for k, v in vars(args).items() if k not in ("output", "shapes")}
        args.output.write_text(
            json.dumps({"environment": environment(), "options": options, "cases": rows}, indent=1)
        )
    return int(any(row.get("worst_error", 0.0) >= BOUND[DTYPES[args.dtype]] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
