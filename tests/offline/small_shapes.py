"""Every kernel that the operator's tests would launch on an Ascend 910B, through its compiler:

    PYTHONPATH=.:tests/ops .venv-ascend/bin/python tests/offline/small_shapes.py

The compile check has the official shapes; on a chip the tests come first, at small and odd ones.
"""

import sys
from collections.abc import Iterator
from unittest import mock

import torch
from cases import make
from test_kernels import OPTIONS

from mindspeed_mamba3_plugin.offline import compile_check, hivm, toolchain
from mindspeed_mamba3_plugin.offline.launches import ASCEND_910B3, Launch, intercepted
from mindspeed_mamba3_plugin.ops.triton import ascend
from mindspeed_mamba3_plugin.ops.types import Inputs

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def launches(x: Inputs) -> list[Launch]:
    """What a forward and a backward of x launch."""
    made: list[Launch] = []
    with mock.patch.object(ascend, "target_of", lambda device: "npu"), intercepted(ASCEND_910B3, made.append):
        out, _ = ascend.forward(x)
        ascend.backward(x, out)
    return made


def faults() -> Iterator[tuple[str, str, list[str]]]:
    """Test, kernel and what is wrong with it, of every binary."""
    compiler, seen = next(iter(toolchain.compilers().values())), set()
    for name, dtype in DTYPES.items():
        for title, options in OPTIONS.items():
            for launch in launches(make(**options, return_state=True, dtype=dtype)):
                if launch.key not in seen:
                    seen.add(launch.key)
                    lowered = toolchain.lower(launch, ASCEND_910B3)
                    compiled = toolchain.compile_lowered(lowered, ASCEND_910B3, compiler)
                    yield f"{title}, {name}", launch.name, compile_check.faults(compiled, hivm.read(compiled.hivm))


def main() -> int:
    """Returns 0, or 1 where a kernel does not compile; what the compiler does more slowly than asked is said only."""
    compile_check.own_temporary_folder()
    count = failed = slower = 0
    for title, kernel, wrong in faults():
        count += 1
        if wrong:
            fell_back = all(fault.startswith("the compiler fell back") for fault in wrong)
            slower, failed = slower + fell_back, failed + (not fell_back)
            print(f"{kernel} ({title}): {'; '.join(wrong)[:300]}", flush=True)
    print(f"{count} kernels: {failed} with a fault, {slower} compiled otherwise than asked")
    return int(failed > 0 or not count)


if __name__ == "__main__":
    sys.exit(main())
