#!/usr/bin/env python
"""How the cost of a call grows: time per token and head, over lengths and over numbers of sequences and heads.

    python scripts/benchmark_growth.py --output docs/benchmarks/h200_growth.json

Three lengths next to each other are checked against the reference as well, and it is counted how many kernels were
compiled for all lengths after the first.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from benchmark_kernels import DTYPES, check, environment, make_inputs, timed
from torch import Tensor

from mindspeed_mamba3_plugin.ops import registry
from mindspeed_mamba3_plugin.ops.types import Inputs

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)  # of one sequence with 16 heads
ROWS = ((1, 4), (1, 8), (1, 16), (2, 16), (4, 16), (8, 16), (16, 16), (32, 16))  # sequences and heads, 2048 tokens
NEIGHBOURS = (2047, 2048, 2049)  # 4 sequences, 16 heads


def compiled() -> int:
    """Kernels compiled for this device so far."""
    from triton.runtime.jit import JITFunction

    modules = [m for name, m in sys.modules.items() if name.startswith("mindspeed_mamba3_plugin.ops.triton")]
    kernels = {id(k): k for m in modules for k in vars(m).values() if isinstance(k, JITFunction)}
    return sum(len(cache[0]) for kernel in kernels.values() for cache in kernel.device_caches.values())


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kernel", default="triton-gpu", choices=registry.KERNEL_NAMES[1:])
    p.add_argument("--shape", default="N128_P64_R4_C16")
    p.add_argument("--dtype", default="bf16", choices=DTYPES)
    p.add_argument("--repeats", type=int, default=8, help="measurements of which the median is taken")
    p.add_argument("--output", type=Path, help="JSON file")
    args = p.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("benchmark_growth: no NVIDIA GPU here")
    torch.backends.cuda.matmul.allow_tf32 = False
    kernel = registry.load(args.kernel)

    def inputs(B: int, S: int, H: int) -> tuple[Inputs, Tensor]:
        x = make_inputs(args.shape, B, S, H, 1, DTYPES[args.dtype], "cuda")
        return x, torch.randn(x.V.shape, device="cuda").to(x.dtype)

    def measure(sweep: str, B: int, S: int, H: int) -> dict:
        torch.cuda.empty_cache()
        x, g = inputs(B, S, H)
        forward = timed([lambda: kernel.forward(x)], args.repeats, True)
        backward = timed([lambda: kernel.backward(x, g)], args.repeats, True)
        row = {"sweep": sweep, "B": B, "S": S, "H": H, "forward_ms": forward, "backward_ms": backward}
        for name in ("forward", "backward"):
            row[f"{name}_ns_per_token_and_head"] = row[f"{name}_ms"] * 1e6 / (B * S * H)
        if sweep == "neighbours":
            row["worst_error"] = max(check(kernel, x, g).values())
        print(" ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
        return row

    rows = [measure("length", 1, LENGTHS[0], 16)]
    before = compiled()
    rows += [measure("length", 1, S, 16) for S in LENGTHS[1:]]
    rows += [measure("neighbours", 4, S, 16) for S in NEIGHBOURS]
    more = compiled() - before
    print(f"kernels compiled for {len(LENGTHS) - 1 + len(NEIGHBOURS)} more lengths: {more}")
    rows += [measure("rows", B, 2048, H) for B, H in ROWS]
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        result = {"environment": environment(), "shape": args.shape, "dtype": args.dtype, "more_compiled": more}
        args.output.write_text(json.dumps(result | {"cases": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
