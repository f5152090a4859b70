"""The command line of scripts/check_ascend_compile.py."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

from . import calibrate, cases, compile_check, cost, estimate, port, report

QUICK_SHAPES = ("N128_P64_R4_C16", "N256_P64_R4_C8", "N128_P64_R1_C64")
REQUIRED_COMPILERS = ("1.2.0", "1.1.0")  # 1.0.0 is reported only


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="check_ascend_compile.py",
        description="Compile every kernel of the operator for Ascend 910B without a chip, and judge it.",
    )
    shapes = [s.name for s in cases.official_shapes()]
    parser.add_argument("--quick", action="store_true", help="three shapes, bf16, the newest compiler")
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=None, metavar="SHAPE", help="default: all 11")
    parser.add_argument("--dtypes", nargs="+", choices=list(cases.DTYPES), default=None)
    parser.add_argument("--variants", nargs="+", choices=cases.VARIANTS, default=None)
    parser.add_argument("--compilers", nargs="+", default=None, metavar="VERSION", help="of ascendnpu-ir")
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables into this Markdown file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="put all rows into this file")
    parser.add_argument(
        "--estimate", action="store_true", help="instead, estimate the time of every kernel and compare with an A100"
    )
    parser.add_argument(
        "--calibrate", type=Path, metavar="FILE", help="with --estimate: times measured on a chip, see docs/ascend.md"
    )
    parser.add_argument(
        "--plain-port", type=Path, metavar="FILE", help="with --estimate: the direct translation in this file as well"
    )
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}, must be at least 1")
    for option in ("calibrate", "plain_port"):
        if getattr(given, option) and not given.estimate:
            parser.error(f"--{option.replace('_', '-')} is given without --estimate, it changes nothing else")
    if given.estimate:
        return _estimate(parser, given, given.shapes or list(QUICK_SHAPES if given.quick else shapes))
    matrix = compile_check.matrix(
        given.shapes or list(QUICK_SHAPES if given.quick else shapes),
        given.dtypes or (["bf16"] if given.quick else ["bf16", "fp16", "fp32"]),
        given.variants or list(cases.VARIANTS),
    )
    compilers = given.compilers or list(REQUIRED_COMPILERS[:1] if given.quick else REQUIRED_COMPILERS)
    try:
        compile_check.require(compilers)
    except ValueError as e:
        parser.error(str(e))

    started, rows = time.monotonic(), []
    groups = len({(c.shape, c.dtype) for c in matrix})
    for count, (name, found) in enumerate(compile_check.check_all(matrix, compilers, jobs=given.jobs), 1):
        rows += found
        wrong = [r for r in found if r.faults]
        state = "ok" if not wrong else f"{len(wrong)} FAULTY"
        print(
            f"[{count}/{groups}] {name}: {len(found)} kernels {state} ({time.monotonic() - started:.0f} s)",
            flush=True,
        )
        for row in wrong:
            print(f"    {row.kernel} ({row.case.variant}, {row.compiler}): {'; '.join(row.faults)}")
    if given.json:
        given.json.write_text(json.dumps([asdict(r) for r in rows], indent=1))
    if given.write:
        report.write(given.write, "compile", report.compile_tables(rows))
    faulty = sum(bool(r.faults) for r in rows)
    verdict = f"FAIL  {faulty} of {len(rows)}" if faulty or not rows else f"PASS  all {len(rows)}"
    print(
        f"{verdict} kernels compile to planned HIVM for Ascend910B3 as required "
        f"({len(matrix)} cases, ascendnpu-ir {', '.join(compilers)}, {time.monotonic() - started:.0f} s)"
    )
    return 1 if faulty or not rows else 0


def _estimate(parser: argparse.ArgumentParser, given: argparse.Namespace, shapes: list[str]) -> int:
    version, dtype = (given.compilers or REQUIRED_COMPILERS)[0], (given.dtypes or ["bf16"])[0]
    if given.variants not in (None, ["plain"]):
        parser.error(f"--variants is {given.variants}, --estimate takes plain alone, as the A100 was timed")
    fits, parts = cost.FITS, []
    try:
        compile_check.require([version])
        if given.calibrate:
            measured = calibrate.read(given.calibrate)
            ((_, known),) = estimate.all_stages([measured.shape], measured.dtype, version)
            fits, scales = calibrate.calibrated(estimate.mean_works(known), measured)
            parts.append(report.calibration(measured, scales))
        if given.plain_port:
            port.load(given.plain_port)
    except ValueError as e:
        parser.error(str(e))
    found = dict(estimate.all_stages(shapes, dtype, version, given.jobs))
    verdicts = [
        estimate.verdict(shape, entry, [s for s in own if s.entry == entry], fits)
        for entry in estimate.ENTRIES
        for shape, own in found.items()
    ]
    parts.append(report.estimate_tables(found, verdicts, fits, f"{dtype}, ascendnpu-ir {version}"))
    if given.plain_port:
        matrix = compile_check.matrix(shapes, [dtype], ["plain"])
        ports = port.all_judged(given.plain_port, matrix, version, given.jobs)
        parts.append(report.port_table(ports, verdicts, fits))
    print("\n".join(parts))
    if given.json:
        given.json.write_text(json.dumps([asdict(v) for v in verdicts], indent=1))
    if given.write:
        report.write(given.write, "estimate", "\n".join(parts))
    met = sum(v.reaches(v.required) for v in verdicts)
    print(f"ESTIMATE  {met} of {len(verdicts)} reach what the acceptance rule asks for in every case of constants")
    return 0


if __name__ == "__main__":
    sys.exit(main())
