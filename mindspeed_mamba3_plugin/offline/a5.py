"""The same kernels through the compiler for Ascend 950 (A5), where a product can be handed to the vector cores' own
memory. Reported, not required: the kernels are planned for a 910B.

    PYTHONPATH=. .venv-ascend/bin/python -m mindspeed_mamba3_plugin.offline.a5 [--write docs/ascend.md]
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import cases, compile_check, hivm, report, toolchain
from .launches import ASCEND_910B3, Chip

ASCEND_950 = Chip("Ascend950PR_9589", 32, 64)
ON_CHIP = {"ub": 248 * 1024, "cbuf": 512 * 1024, "cc": 256 * 1024}
# What triton-ascend sets by itself where it finds such a chip.
OPTIONS = {
    "compile_on_910_95": True,
    "multibuffer": False,
    "enable_auto_bind_sub_block": False,
    "enable_select_analysis": True,
}
_TO_UB = re.compile(r"hivm\.hir\.fixpipe.*outs\([^)]*address_space<ub>")
_TO_L1 = re.compile(r"hivm\.hir\.copy.*address_space<ub>.*outs\([^)]*address_space<cbuf>")


@dataclass
class Row:
    """One kernel at one shape."""

    shape: str
    kernel: str
    error: str = ""
    used: dict[str, int] = field(default_factory=dict)  # bytes by on-chip memory, the larger of both halves
    to_ub: int = 0  # results of products that go to UB directly
    split: int = 0  # of these, with half of the rows for each vector core
    to_l1: int = 0  # operands of products that come from UB directly
    one_core: int = 0  # places that the second vector core skips


def compiler(version: str) -> Path:
    """The A5 compiler beside the 910B's of an ascendnpu-ir version.

    Raises:
        ValueError: that version is not unpacked here.
    """
    compile_check.require([version])
    return toolchain.compilers()[version].with_name("bishengir-compile-a5")


def examined(shape: str, kernel: toolchain.Lowered, path: Path) -> Row:
    """A lowered kernel through the compiler, and what its planned HIVM shows."""
    compiled = toolchain.compile_lowered(kernel, ASCEND_950, path)
    if compiled.error:
        return Row(shape, kernel.name, compiled.error)
    halves, text = hivm.read(compiled.hivm), compiled.hivm
    return Row(
        shape,
        kernel.name,
        used={m: max((h.used[m] for h in halves), default=0) for m in ON_CHIP},
        to_ub=len(_TO_UB.findall(text)),
        split=text.count("<ROW_SPLIT>"),
        to_l1=len(_TO_L1.findall(text)),
        one_core=text.count("limit_sub_block_id0"),
    )


def rows(shapes: Sequence[cases.Shape], version: str) -> Iterator[Row]:
    """Every kernel of the three entry points, bf16."""
    from ..ops.triton import ascend

    path = compiler(version)
    for shape in shapes:
        seen = set()
        for made in cases.passes(cases.Case(shape, "bf16", "plain"), ASCEND_910B3, ascend).values():
            for launch in made.launches:
                if launch.key not in seen:
                    seen.add(launch.key)
                    there = replace(launch, options={**launch.options, **OPTIONS})
                    yield examined(shape.name, toolchain.lower(there, ASCEND_950), path)


def tables(found: Sequence[Row], version: str) -> str:
    """Markdown: what fits and what does not, and how products and element-wise work meet."""
    failed = [r for r in found if r.error]
    sizes = ", ".join(f"{n} {ON_CHIP[m]}" for m, n in report.MEMORIES.items())
    parts = [
        f"bishengir-compile-a5 of ascendnpu-ir {version}, {ASCEND_950.arch}, bf16, with the options that "
        f"triton-ascend sets there: {len(found)} kernels at {len({r.shape for r in found})} shapes, {len(failed)} "
        f"that do not fit. Bytes on chip of {sizes}:\n"
    ]
    shapes = list(dict.fromkeys(r.shape for r in found))
    lines = []
    for kernel in dict.fromkeys(r.kernel for r in found):
        cells = []
        for shape in shapes:
            own = [r for r in found if (r.kernel, r.shape) == (kernel, shape)]
            cells.append(" ".join(dict.fromkeys(map(_cell, own))))
        lines.append([_stage(kernel), *cells])
    parts.append(
        report.table(["UB, or L0C of a kernel of products", *(s.rpartition("_C")[0] for s in shapes)], lines)
    )
    mixed = [r for r in found if r.to_ub or r.to_l1]
    if mixed:
        parts.append("\nKernels whose products meet element-wise work, handed over on the chip:\n")
        head = ["kernel", "results to UB", "split over both cores", "operands from UB", "skipped by the second core"]
        alike: dict[tuple, list[str]] = {}
        for r in mixed:
            alike.setdefault((r.kernel, r.to_ub, r.split, r.to_l1, r.one_core), []).append(
                r.shape.rpartition("_C")[0]
            )
        lines = [[f"{_stage(k)}: {', '.join(own)}", *map(str, numbers)] for (k, *numbers), own in alike.items()]
        parts.append(report.table(head, lines))
    return "\n".join(parts)


def _stage(kernel: str) -> str:
    return kernel.strip("_").removesuffix("_kernel")


def _cell(row: Row) -> str:
    if row.error:
        needs = re.search(r"(\w+) overflow, needs (\d+)", row.error)
        known = needs and needs[1] in report.MEMORIES
        return f"needs {needs[2]} of {report.MEMORIES[needs[1]]}" if known else "fails"
    return str(row.used["ub"] or row.used["cc"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, also where kernels do not fit: this reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this Markdown file")
    parser.add_argument("--version", default="1.2.0", help="of ascendnpu-ir (default 1.2.0)")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", help="default: all 11")
    given = parser.parse_args(arguments)
    known = {s.name: s for s in cases.official_shapes()}
    if wrong := [s for s in given.shapes or () if s not in known]:
        parser.error(f"--shapes {wrong[0]}: must be one of {', '.join(known)}")
    compile_check.own_temporary_folder()
    try:
        found = list(rows([known[s] for s in given.shapes or known], given.version))
    except ValueError as e:
        parser.error(str(e))
    text = tables(found, given.version)
    print(text)
    for row in found:
        if row.error:
            print(f"{row.kernel} {row.shape}: {row.error}", file=sys.stderr)
    if given.write:
        report.write(given.write, "a5", text, by="mindspeed_mamba3_plugin.offline.a5")
    return 0


if __name__ == "__main__":
    sys.exit(main())
