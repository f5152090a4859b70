"""Run what an NPU would be given on the CPU: a kernel's linalg IR, as triton-ascend lowers it, to machine code.

This tests the Ascend lowering itself, with correct bf16. Needs triton-ascend and the LLVM 19 command-line tools
(Debian: mlir-19-tools and llvm-19) and a C compiler.
"""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import torch

from .launches import Chip, Launch, intercepted
from .toolchain import lower

TOOLS = ("mlir-opt-19", "mlir-translate-19", "llc-19", "cc")

_PASSES = (
    "--allow-unregistered-dialect", "--inline", "--symbol-dce", "--convert-elementwise-to-linalg",
    "--linalg-generalize-named-ops", "--eliminate-empty-tensors", "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops", "--expand-strided-metadata", "--lower-affine", "--math-uplift-to-fma",
    "--convert-math-to-libm", "--arith-expand=include-bf16=true", "--convert-scf-to-cf", "--convert-cf-to-llvm",
    "--convert-arith-to-llvm", "--convert-math-to-llvm", "--memref-expand", "--expand-strided-metadata",
    "--lower-affine", "--convert-arith-to-llvm", "--finalize-memref-to-llvm", "--convert-func-to-llvm",
    "--reconcile-unrealized-casts",
)  # fmt: skip

# What MLIR's memory lowering calls for a copy between two strided buffers of one shape.
_RUNTIME = r"""
#include <stdint.h>
#include <string.h>
typedef struct { int64_t rank; void *descriptor; } Any;
static void copy(char *to, const int64_t *to_strides, const char *from, const int64_t *from_strides,
                 const int64_t *sizes, int64_t rank, int64_t width) {
  if (rank == 0) { memcpy(to, from, width); return; }
  for (int64_t i = 0; i < sizes[0]; i++)
    copy(to + i * to_strides[0] * width, to_strides + 1, from + i * from_strides[0] * width, from_strides + 1,
         sizes + 1, rank - 1, width);
}
void memrefCopy(int64_t width, Any *from, Any *to) {
  char **f = from->descriptor, **t = to->descriptor; /* allocated, aligned, offset, sizes, strides */
  int64_t *fi = (int64_t *)f + 2, *ti = (int64_t *)t + 2, rank = from->rank;
  copy(t[1] + ti[0] * width, ti + 1 + rank, f[1] + fi[0] * width, fi + 1 + rank, fi + 1, rank, width);
}
"""

# Library functions of the NPU compiler, by their meaning.
_CUMSUM = """  func.func private @{name}(%tile: {tile}, %axis: i32, %reverse: i1) -> {tile} {{
    {flatten}
    %c0 = arith.constant 0 : index
    %c1 = arith.constant 1 : index
    %rows = arith.constant {rows} : index
    %columns = arith.constant {columns} : index
    %last = arith.constant {last} : index
    %r = scf.for %i = %c1 to %rows step %c1 iter_args(%a = %x) -> {type} {{
      %back = arith.subi %last, %i : index
      %before_i = arith.subi %i, %c1 : index
      %before_back = arith.addi %back, %c1 : index
      %row = arith.select %reverse, %back, %i : index
      %before = arith.select %reverse, %before_back, %before_i : index
      %s = scf.for %j = %c0 to %columns step %c1 iter_args(%b = %a) -> {type} {{
        %p = tensor.extract %b[%before, %j] : {type}
        %q = tensor.extract %b[%row, %j] : {type}
        %sum = arith.addf %p, %q : {element}
        %n = tensor.insert %sum into %b[%row, %j] : {type}
        scf.yield %n : {type}
      }}
      scf.yield %s : {type}
    }}
    {restore}
    return %result : {tile}
  }}"""
_CUMSUM_CALL = re.compile(
    r"  func\.func private @(triton_cumsum\w*)\((tensor<((?:\d+x)+)(\w+)>), i32, i1\) -> tensor<[^>]*>"
)

_RSQRT = re.compile(r"^( *)(%\w+) = math\.rsqrt (%\w+) : (\S+)$", re.M)


def missing() -> str | None:
    """Which command-line tools are not there, or None."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{', '.join(absent)} not found (Debian: apt-get install mlir-19-tools llvm-19 gcc)" if absent else None


class Machine:
    """Builds kernels and runs their launches, remembering what it built.

    Raises:
        RuntimeError: a kernel cannot be lowered or built, with the tool's words.
    """

    def __init__(self, chip: Chip):
        self.chip = chip
        self.ran: dict[str, int] = {}  # launches by kernel
        self._folder = tempfile.TemporaryDirectory(prefix="native-")
        self._built: dict[str, tuple[ctypes.CDLL, list[str]]] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, every kernel launch on CPU tensors runs here."""
        with intercepted(self.chip, self.run):
            yield

    def run(self, launch: Launch) -> None:
        if launch.key not in self._built:
            self._built[launch.key] = self._build(launch)
        library, kinds = self._built[launch.key]
        values = [v for name, v in launch.arguments.items() if name not in launch.source.constants]
        # Ahead of the caller's come a lock and a workspace, which only an NPU uses.
        own = torch.zeros(1, dtype=torch.uint8)
        arguments = _memref(own) + _memref(own)
        for kind, value in zip(kinds[2 : 2 + len(values)], values, strict=True):
            arguments += _memref(value) if kind.startswith("memref") else [_SCALARS[kind](value)]
        function = getattr(library, launch.name)
        function.restype = None
        for program in product(*map(range, launch.grid)):
            function(*arguments, *(ctypes.c_int32(v) for v in (*launch.grid, *program)))
        self.ran[launch.name] = self.ran.get(launch.name, 0) + 1

    def _build(self, launch: Launch) -> tuple[ctypes.CDLL, list[str]]:
        lowered = lower(launch, self.chip)
        if lowered.error:
            raise RuntimeError(f"{launch.name}: {lowered.error}")
        text = re.sub(r"\s*annotation\.mark[^\n]*", "", lowered.text)
        text = _RSQRT.sub(_rsqrt, _CUMSUM_CALL.sub(_cumsum, text))
        stem = Path(self._folder.name, f"{launch.name}{len(self._built)}")
        paths = {kind: stem.with_suffix(f".{kind}") for kind in ("mlir", "llvm", "ll", "o", "c", "so")}
        paths["mlir"].write_text(text)
        paths["c"].write_text(_RUNTIME)
        for command in (
            ["mlir-opt-19", paths["mlir"], *_PASSES, "-o", paths["llvm"]],
            ["mlir-translate-19", "--mlir-to-llvmir", paths["llvm"], "-o", paths["ll"]],
            ["llc-19", "-O2", "-relocation-model=pic", "-filetype=obj", paths["ll"], "-o", paths["o"]],
            ["cc", "-O2", "-shared", "-fPIC", paths["o"], paths["c"], "-o", paths["so"], "-lm"],
        ):
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(f"{launch.name}: {command[0]}: {done.stderr.strip()[:1500]}")
        head = re.search(rf"func\.func @{launch.name}\((.*?)\) attributes", text, re.S).group(1)
        return ctypes.CDLL(str(paths["so"])), re.findall(r"%arg\d+: (memref<[^>]*>|\w+)", head)


_SCALARS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "f32": ctypes.c_float}


def _memref(t: torch.Tensor) -> list:
    pointer = ctypes.c_void_p(t.data_ptr())
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(t.numel()), ctypes.c_int64(1)]


def _cumsum(call: re.Match) -> str:
    """The sum along the first axis, of a tile of two axes or more."""
    name, tile, sizes, element = call.groups()
    rows, *rest = map(int, sizes.split("x")[:-1])
    columns = math.prod(rest)
    flat = f"tensor<{rows}x{columns}x{element}>"
    groups = f"[[0], {list(range(1, len(rest) + 1))}]"
    return _CUMSUM.format(
        name=name, tile=tile, type=flat, rows=rows, columns=columns, last=rows - 1, element=element,
        flatten=f"%x = tensor.collapse_shape %tile {groups} : {tile} into {flat}",
        restore=f"%result = tensor.expand_shape %r {groups} output_shape {[rows, *rest]} : {flat} into {tile}",
    )  # fmt: skip


def _rsqrt(operation: re.Match) -> str:
    indent, result, x, kind = operation.groups()
    value = "dense<1.0>" if kind.startswith("tensor") else "1.0"
    root, one = f"%root_{result[1:]}", f"%one_{result[1:]}"
    lines = (
        f"{root} = math.sqrt {x} : {kind}",
        f"{one} = arith.constant {value} : {kind}",
        f"{result} = arith.divf {one}, {root} : {kind}",
    )
    return "\n".join(indent + line for line in lines)
