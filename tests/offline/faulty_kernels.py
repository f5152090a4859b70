"""Kernels with planted faults, and a sound one, through the compile check; prints their faults as JSON."""

import json
import tempfile

import torch
import triton
import triton.language as tl

from mindspeed_mamba3_plugin.offline import compile_check, hivm, toolchain
from mindspeed_mamba3_plugin.offline.launches import ASCEND_910B3, intercepted


@triton.jit
def sound(x, y, tasks, M: tl.constexpr):
    m = tl.arange(0, M)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        tl.store(y + task * M + m, tl.exp(tl.load(x + task * M + m)))


@triton.jit
def scalar_loop(x, y, tasks, M: tl.constexpr):
    m = tl.arange(0, M)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        tl.store(y + task * M + m, tl.cumsum(tl.load(x + task * M + m), axis=0))


@triton.jit
def atomic(x, y, tasks, M: tl.constexpr):
    m = tl.arange(0, M)
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        tl.atomic_add(y + m, tl.load(x + task * M + m))


@triton.jit
def one_vector_core(x, y, tasks, M: tl.constexpr):
    m = tl.arange(0, M)
    at = m[:, None] * M + m[None, :]
    for task in range(tl.program_id(0), tasks, tl.num_programs(0)):
        a = tl.load(x + task * M * M + at).to(tl.bfloat16)
        tl.store(y + task * M * M + at, tl.exp(tl.dot(a, a)))


@triton.jit
def not_a_kernel(x, y, tasks, M: tl.constexpr):
    tl.store(y + tl.arange(0, M), tl.load(x + tl.arange(0, 2 * M)))


PLANTED = {
    "sound": (sound, 40, {"M": 1024}),
    "scalar loop": (scalar_loop, 40, {"M": 64}),
    "atomic": (atomic, 40, {"M": 64}),
    "one vector core": (one_vector_core, 20, {"M": 64}),
    "overflow": (sound, 40, {"M": 65536}),
    "fallback": (sound, 40, {"M": 32768}),
    "not a kernel": (not_a_kernel, 40, {"M": 64}),
    "more programs than cores": (sound, 4096, {"M": 1024}),
    "more programs than allowed": (sound, 70000, {"M": 1024}),
}

tempfile.tempdir = tempfile.mkdtemp()
compiler = toolchain.compilers()["1.2.0"]
found = {}
for name, (kernel, programs, constants) in PLANTED.items():
    launches = []
    x = torch.empty(1 << 20, device="meta")
    with intercepted(ASCEND_910B3, launches.append):
        try:
            kernel[(programs,)](x, x, 100, **constants)
        except RuntimeError as e:  # the runtime's own refusal
            found[name] = [str(e)]
            continue
    lowered = toolchain.lower(launches[0], ASCEND_910B3)
    compiled = toolchain.compile_lowered(lowered, ASCEND_910B3, compiler)
    found[name] = compile_check.faults(compiled, hivm.read(compiled.hivm))
    found[name] += compile_check.grid_faults(launches[0], ASCEND_910B3, lowered.mixed)
print(json.dumps(found))
