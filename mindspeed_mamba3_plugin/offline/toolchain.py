"""The Ascend compiler without CANN: a kernel's launch through triton-ascend and bishengir-compile to planned HIVM.

HIVM with on-chip addresses and synchronisation is the last form before the closed assembler; overflow of on-chip
memory is decided there, by the compiler itself.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from .launches import Chip, Launch

# Launch options that the compiler is told, as triton-ascend tells it.
_FLAGS = {
    "multibuffer": "enable-auto-multi-buffer",
    "enable_auto_bind_sub_block": "enable-auto-bind-sub-block",
    "enable_hivm_auto_cv_balance": "enable-hivm-auto-cv-balance",
    "sync_solver": "enable-hivm-graph-sync-solver",
    "unit_flag": "enable-hivm-unit-flag-sync",
    "inject_barrier_all": "enable-hivm-inject-barrier-all-sync",
    "inject_block_all": "enable-hivm-inject-block-all-sync",
    "limit_auto_multi_buffer_only_for_local_buffer": "limit-auto-multi-buffer-only-for-local-buffer",
    "set_workspace_multibuffer": "set-workspace-multibuffer",
    "tile_mix_vector_loop": "tile-mix-vector-loop",
    "tile_mix_cube_loop": "tile-mix-cube-loop",
    "limit_auto_multi_buffer_of_local_buffer": "limit-auto-multi-buffer-of-local-buffer",
    "disable_auto_inject_block_sync": "disable-auto-inject-block-sync",
}
_ALWAYS = ("--enable-hfusion-compile=true", "--enable-hivm-compile=true", "--enable-triton-kernel-compile=true")
_ERROR = re.compile(r"error:|Assertion|LLVM ERROR")
_PATIENCE = 120  # seconds for one kernel; the usual is below one
_LAST_IR = "convert-hivm-to-std"

# Stands in for CANN's assembler, so that the exit status tells whether everything before it passed. It keeps what it
# was given: version 1.0.0 of the compiler cannot print it.
_NO_ASSEMBLER = """#!/bin/sh
[ "$1" = "--version" ] && echo "hivmc 0.0.0"
[ -f "$1" ] && cp "$1" "$HIVMC_INPUT"
exit 0
"""


@dataclass
class Lowered:
    """A kernel in the linalg dialect, as triton-ascend hands it to the compiler; `error` says why there is none."""

    name: str
    text: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def mixed(self) -> bool:
        """Whether it has matrix products."""
        return self.metadata.get("mix_mode") == "mix"


@dataclass
class Compiled:
    """A kernel as planned HIVM; `error` says why there is none."""

    name: str
    hivm: str = ""
    notes: list[str] = field(default_factory=list)  # what the compiler did instead of what was asked
    error: str = ""


def compilers() -> dict[str, Path]:
    """The ascendnpu-ir compilers unpacked in this environment by version, newest first."""
    found = {p.name: p / "ascendnpuir/bin/bishengir-compile" for p in Path(sys.prefix, "ascendnpu-ir").glob("[0-9]*")}
    return dict(sorted(found.items(), key=lambda item: [int(n) for n in re.findall(r"\d+", item[0])], reverse=True))


def lower(launch: Launch, chip: Chip, attempts: int = 4) -> Lowered:
    """The kernel of a launch through triton-ascend's front half. Never raises for a kernel that does not compile."""
    from triton._C.libtriton import ir
    from triton.backends import backends
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    # The stages live in a module that is not in sys.modules.
    stages = backends["ascend"].compiler.add_stages.__globals__
    target = GPUTarget("npu", chip.arch, 0)
    backend = make_backend(target)
    options = backend.parse_options(dict(launch.options))
    metadata = {"hash": "offline", "target": target, **options.__dict__}
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    try:
        module = launch.source.make_ir(
            options, backend.get_codegen_implementation(), backend.get_module_map(), context
        )
        module = stages["make_ttir"](module, metadata, options)
        text = stages["ttir_to_linalg"](module, metadata, options, named_ops=True)
    except subprocess.CalledProcessError as e:
        if e.returncode < 0 and attempts > 1:  # it crashes now and then on what it takes the next time
            return lower(launch, chip, attempts - 1)
        said = _error_lines(e.stderr.decode(errors="replace"))
        return Lowered(launch.name, error=f"triton-adapter-opt ended with {e.returncode}: {said}")
    except Exception as e:
        return Lowered(launch.name, error=_reasons(e))
    text, metadata = stages["_parse_linalg_metadata"](text, metadata)
    return Lowered(launch.name, text, metadata)


def compile_lowered(kernel: Lowered, chip: Chip, compiler: Path) -> Compiled:
    """A lowered kernel through one bishengir-compile. Never raises for a kernel that does not compile."""
    if kernel.error:
        return Compiled(kernel.name, error=kernel.error)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.mlir")
        source.write_text(kernel.text)
        command = [str(compiler), str(source), f"--target={chip.arch}", *_ALWAYS]
        known = _options_of(compiler)
        command += [
            f"--{flag}={kernel.metadata[name]}"
            for name, flag in _FLAGS.items()
            if kernel.metadata.get(name) is not None and flag in known
        ]
        if prints := "--mlir-print-ir-before" in known:
            command.append(f"--mlir-print-ir-before={_LAST_IR}")
        command += ["-o", str(Path(folder, "kernel"))]
        path = os.pathsep.join((_assembler_folder(), os.environ.get("PATH", "")))
        given = Path(folder, "given.mlir")
        environment = {**os.environ, "PATH": path, "HIVMC_INPUT": str(given)}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=folder, env=environment, timeout=_PATIENCE
            )
        except subprocess.TimeoutExpired:
            return Compiled(kernel.name, error=f"bishengir-compile did not end within {_PATIENCE} s")
        handed_over = given.read_text() if given.exists() and not prints else ""
    head, *dumps = re.split(r"^// -----// IR Dump.*$", done.stderr, flags=re.M)
    last = dumps[-1] if dumps else handed_over
    end = last.rfind("\n}\n") + 3
    said = done.stdout + head + last[end:]
    result = Compiled(kernel.name, last[:end], re.findall(r"\[NOTE\] *([^\n]*)", said))
    if done.returncode:
        result.error = f"bishengir-compile ended with {done.returncode}: {_error_lines(said)}"
    elif not last:
        result.error = f"bishengir-compile printed no IR before {_LAST_IR}"
    return result


def _reasons(error: BaseException) -> str:
    """The chain of reasons, innermost first: Triton names the line outside and the cause inside."""
    reasons = []
    while error is not None:
        reasons.append(f"{type(error).__name__}: {str(error).strip()}")
        error = error.__cause__
    return "; from ".join(reversed(reasons))


def _error_lines(text: str) -> str:
    overflow = re.search(r"(\w+) overflow, requires (\d+) bits while (\d+) bits available", text)
    if overflow:
        memory, need, have = overflow.groups()
        return f"{memory} overflow, needs {int(need) // 8} of {int(have) // 8} bytes"
    lines = [line.split("error:")[-1].strip() for line in text.splitlines() if _ERROR.search(line)]
    return "; ".join(dict.fromkeys(lines))[:2000] or text.strip()[-600:]


@lru_cache(maxsize=8)
def _options_of(compiler: Path) -> str:
    return subprocess.run([str(compiler), "--help"], capture_output=True, text=True).stdout


@lru_cache(maxsize=1)
def _assembler_folder() -> str:
    folder = tempfile.mkdtemp(prefix="hivmc-")
    for name in ("hivmc", "hivmc-a5"):
        program = Path(folder, name)
        program.write_text(_NO_ASSEMBLER)
        program.chmod(0o755)
    return folder
