#!/usr/bin/env python
"""Compile the kernels of a family for an NVIDIA GPU that need not be there, and look at what came out.

    python scripts/check_gpu_compile.py --capability 90
    python scripts/check_gpu_compile.py --capability 80 --shapes N128_P64_R4_C16 --dtype fp32
    python scripts/check_gpu_compile.py --kernel triton-ascend

For every kernel of a forward and a backward: registers, bytes of stack (spills) and shared memory, instructions and
barriers. Exits with 1 if a kernel reads a uniform register that nothing set: ptxas 12.8 (in Triton 3.6) makes such
code of some products, which then read from a wild address.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from benchmark_kernels import DTYPES, OFFICIAL, make_inputs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from mindspeed_mamba3_plugin.ops import registry
from mindspeed_mamba3_plugin.ops.triton import ascend, gpu

_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][A-Z0-9_]\S*)\s*(.*?);", re.MULTILINE)
_SETS_UNIFORM = ("U", "R2UR", "S2UR", "CS2UR", "LDCU", "VOTEU", "REDUX", "ELECT")


class OfflineDriver:
    """What the runtime asks of a driver in order to compile."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def unset_reads(sass: str) -> list[str]:
    """Instructions that read a uniform register which no instruction before them sets. Loops are not followed: what
    comes earlier in the text counts as before."""
    found, known = [], {63}  # 63 is the register that is always 0
    for address, op, rest in _INSTRUCTION.findall(sass):
        operands = [o.strip() for o in rest.split(",")]
        while operands and re.fullmatch(r"!?U?P\w+", operands[0]):
            operands.pop(0)
        size = 4 if ".128" in op else 2 if ".64" in op or "WIDE" in op else 1
        target = None
        if op.startswith(_SETS_UNIFORM) and operands and re.fullmatch(r"UR\d+", operands[0]):
            target = int(operands.pop(0)[2:])
        for place, operand in enumerate(operands):
            for kind, number, wide in re.findall(r"(gdesc\[|desc\[|)UR(\d+)(\.64)?", operand):
                first = int(number)
                if kind == "gdesc[":  # two descriptors; the first goes unused where the left operand is in registers
                    left = sum(bool(re.match(r"R\d+", o)) for o in operands[:place]) == 2
                    needed = range(first + 2 if left else first, first + 4)
                else:
                    needed = range(first, first + (2 if kind or wide or (".64" in op and target is not None) else 1))
                if not known.issuperset(needed):
                    found.append(f"{address}: {op} {rest}")
        if target is not None:
            known.update(range(target, target + size))
    return found


def inspect(name: str, shape: str, kernel) -> bool:
    """Print a line about a compiled kernel; whether it reads what nothing set."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(kernel.asm["cubin"])
        f.flush()
        dump, usage = (
            subprocess.run([_CUOBJDUMP, option, f.name], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
    ops = [op for _, op, _ in _INSTRUCTION.findall(dump)]
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    barriers = sum(op.startswith("BAR") for op in ops)
    wild = unset_reads(dump)
    counts = f"{registers:>9s} {stack:>6s} {kernel.metadata.shared:>7d} {len(ops):>12d} {barriers:>8d}"
    print(f"{shape:18s} {name:12s} {counts}", *wild[:1], flush=True)
    return bool(wild)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kernel", default="triton-gpu", choices=("triton-gpu", "triton-ascend"), help="the family")
    p.add_argument("--capability", type=int, default=90, help="as in sm_90")
    p.add_argument("--shapes", nargs="*", default=list(OFFICIAL), metavar="N128_P64_R4_C16")
    p.add_argument("--dtype", default="bf16", choices=DTYPES)
    p.add_argument("--heads", type=int, default=16, help="few make some kernels' tiles others")
    p.add_argument("--norm", action="store_true", help="with the fused norm")
    args = p.parse_args(argv)
    driver.set_active(OfflineDriver(args.capability))
    gpu._capability = lambda device: args.capability
    ascend.target_of = lambda device: "cuda"
    family = registry.load(args.kernel)
    run, seen = JITFunction.run, {}

    def compile_only(self, *a, warmup: bool, **options):
        kernel = run(self, *a, warmup=True, **options)
        seen[self.fn.__name__.strip("_").removesuffix("_kernel"), kernel.hash] = kernel
        return kernel

    JITFunction.run = compile_only
    wild = False
    print(f"{'shape':18s} {'kernel':12s} registers  stack  shared instructions barriers")
    for shape in args.shapes:
        seen.clear()
        for batch in (1, 8):  # the second fills a card, where some kernels are others
            x = make_inputs(shape, batch, 128, args.heads, 1, DTYPES[args.dtype], "cpu", norm=args.norm)
            family.forward(x)
            family.backward(x, torch.zeros_like(x.V))
        for (name, _), kernel in seen.items():
            wild |= inspect(name, shape, kernel)
    return int(wild)


if __name__ == "__main__":
    sys.exit(main())
