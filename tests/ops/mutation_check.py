"""Plant errors in a copy of the operator, one at a time, and see that the tests of the plain family notice each.

Run by scripts/mutation_check.sh; arguments are the names of the mutations to try, all by default. A mutation that
survives is a hole in the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FAMILY = "mindspeed_mamba3_plugin/ops/triton/ascend"
sys.path.insert(0, str(ROOT))

from mindspeed_mamba3_plugin.ops.types import GRADIENT_NAMES  # noqa: E402


class Mutation(NamedTuple):
    """Replace `old`, which must occur exactly once in `path`, by `new`; `tests` are pytest's arguments."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...] = ("tests/ops/test_kernels.py", "-k", "ascend and options_in_fp32")


_BACKWARD = "    return bwd_bwd(x, bwd_fwd(x, grad_out))\n"
SCALED = [
    Mutation(
        f"{name} * 1.01",
        f"{FAMILY}/__init__.py",
        _BACKWARD,
        f"    g = bwd_bwd(x, bwd_fwd(x, grad_out))\n"
        f"    return g if g.{name} is None else g._replace({name}=g.{name} * 1.01)\n",
    )
    for name in GRADIENT_NAMES
]
SLIPS = [
    Mutation(
        "mask <= instead of <",
        f"{FAMILY}/decay.py",
        "tl.store(mixing + square, tl.where(col < row, inside",
        "tl.store(mixing + square, tl.where(col <= row, inside",
    ),
    Mutation(
        "next token's share of the scale dropped",
        f"{FAMILY}/decay.py",
        "gamma + d_next * rest_next",
        "gamma + 0.0 * d_next * rest_next",
    ),
    Mutation(
        "share past the end kept",
        f"{FAMILY}/decay.py",
        "t[None, :] < reach, t[None, :] + 1 < reach)",
        "t[None, :] < reach, t[None, :] < reach)",
    ),
    Mutation(
        "angle of the neighbour",
        f"{FAMILY}/angles.py",
        "tl.load(local + (task * C + token) * AP + n",
        "tl.load(local + (task * C + (token + 1) % C) * AP + n",
    ),
    Mutation(
        "D dropped in the backward",
        f"{FAMILY}/values.py",
        "grad += skip * do_rows",
        "grad += 0.0 * skip * do_rows",
    ),
    Mutation(
        "what a chunk has in O taken for the state's",
        f"{FAMILY}/decay_bwd.py",
        "dinto = tl.load(dlog_o + vector) - tl.load(inside + block)",
        "dinto = tl.load(dlog_o + vector)",
    ),
    Mutation(
        "a chunk's own decay left out of the scan",
        f"{FAMILY}/states.py",
        "state = state * tl.load(whole + chunk * H + h) + tl.load(own + at)",
        "state = state + tl.load(own + at)",
    ),
    Mutation(
        "last chunk's decay with the padding",
        f"{FAMILY}/decay.py",
        "a = tl.load(adt + place, mask=here, other=0.0)",
        "a = tl.load(adt + place, mask=here, other=-1.0)",
    ),
    Mutation(
        "what crosses into later chunks dropped from the angle gradient",
        f"{FAMILY}/angles.py",
        "more = tl.where(reach > C, A, 0)",
        "more = tl.where(reach > C, 0, 0)",
    ),
    Mutation(
        "heads of a group summed too few",
        f"{FAMILY}/rotate.py",
        "dk_hi = tl.zeros((1, RP, BT, NH), dtype=tl.float32)\n"
        "        for first in range(g * (H // G), (g + 1) * (H // G), HB):",
        "dk_hi = tl.zeros((1, RP, BT, NH), dtype=tl.float32)\n"
        "        for first in range(g * (H // G), g * (H // G) + 1, HB):",
    ),
    Mutation(
        "norm's mean over padding",
        f"{FAMILY}/gate.py",
        "tl.sum(dy * unit, axis=2)[:, :, None] / P",
        "tl.sum(dy * unit, axis=2)[:, :, None] / PP",
    ),
    Mutation("half a turn too much a chunk", f"{FAMILY}/angles.py", "turn = wrap(total)", "turn = total + 0.5"),
    Mutation(
        "rounded operands with the norm",
        "mindspeed_mamba3_plugin/ops/triton/plan.py",
        "return torch.float32 if x.fuse_norm else x.dtype",
        "return x.dtype",
        ("tests/ops/test_precision.py", "-k", "ascend and nearly_cancels"),
    ),
]


def survives(mutation: Mutation) -> bool:
    """True when the tests pass on the mutated copy."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        shutil.copytree(ROOT / "mindspeed_mamba3_plugin", copy / "mindspeed_mamba3_plugin")
        shutil.copytree(ROOT / "tests", copy / "tests")
        target = copy / mutation.path
        target.write_text(target.read_text().replace(mutation.old, mutation.new))
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests],
            cwd=copy,
            env={**os.environ, "PYTHONPATH": str(copy)},
            capture_output=True,
            text=True,
        )  # fmt: skip
        if run.returncode not in (0, 1):
            raise SystemExit(f"{mutation.name}: the tests did not run\n{run.stdout}{run.stderr}")
        return run.returncode == 0


def main() -> int:
    chosen = [m for m in (*SCALED, *SLIPS) if not sys.argv[1:] or m.name in sys.argv[1:]]
    for mutation in chosen:
        if (count := (ROOT / mutation.path).read_text().count(mutation.old)) != 1:
            raise SystemExit(f"{mutation.name}: its text occurs {count} times in {mutation.path}")
    survivors = []
    for mutation in chosen:
        alive = survives(mutation)
        survivors += [mutation.name] * alive
        print(f"{'SURVIVED' if alive else 'caught':<9} {mutation.name}", flush=True)
    print(f"{len(chosen)} mutations, {len(survivors)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
