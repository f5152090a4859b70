"""Runs the public test file of state-spaces/mamba's MIMO kernels with those kernels replaced by ours.

    python tests/ops/upstream_adapter.py PATH/test_mamba3_mimo.py [--tolerance 0.02] [--jobs 8] [--cpu] [pytest ...]

The file (tests/ops/tilelang/test_mamba3_mimo.py there, commit e9594ce) runs from a temporary copy; nothing of it is
kept. --tolerance replaces its relative tolerance. --jobs runs the sizes side by side, since compiling takes most of
the time. --cpu runs it in Triton's interpreter, at small sizes.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import ModuleType

PACKAGE = "mamba_ssm.ops"
MODULES = {
    f"{PACKAGE}.tilelang.mamba3.mamba3_mimo": ["mamba3_mimo"],
    f"{PACKAGE}.tilelang.mamba3.mamba3_mimo_fwd": ["mamba_mimo_forward"],
    f"{PACKAGE}.tilelang.mamba3.mamba3_mimo_fwd_varlen": ["mamba_mimo_forward_varlen"],
    f"{PACKAGE}.tilelang.mamba3.mamba3_mimo_bwd": [
        "mamba_mimo_bwd_fwd",
        "mamba_mimo_bwd_bwd",
        "mamba_mimo_bwd_combined",
    ],
    f"{PACKAGE}.tilelang.mamba3.mamba3_mimo_bwd_varlen": ["mamba_mimo_bwd_combined_varlen"],
    f"{PACKAGE}.triton.mamba3.mamba3_mimo_utils": [
        "compute_dacs_segsum_triton",
        "compute_dacs_segsum_triton_varlen",
    ],
}
SMALL = {"FIXED_B": 1, "FIXED_S": 128, "FIXED_H": 2}


def install() -> None:
    """Put stand-ins for tilelang and mamba_ssm, with our functions, where `import` finds them."""
    from mindspeed_mamba3_plugin.ops import upstream

    sys.modules["tilelang"] = ModuleType("tilelang")
    for path, names in MODULES.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name not in sys.modules:
                sys.modules[name] = ModuleType(name)
                sys.modules[name].__path__ = []
                if depth > 1:
                    setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[name])
        for name in names:
            setattr(sys.modules[path], name, getattr(upstream, name))


def adapted(text: str, tolerance: float | None, cpu: bool) -> str:
    """The test file with another tolerance, or for the interpreter.

    Raises:
        ValueError: a line to replace is not there exactly once.
    """

    def replace(pattern: str, by: str, times: int | None = 1) -> None:
        nonlocal text
        text, found = re.subn(pattern, by, text, flags=re.MULTILINE)
        if found == 0 or times not in (None, found):
            raise ValueError(f"the test file has {found} lines that match {pattern!r}: is it that of commit e9594ce?")

    if tolerance is not None:
        replace(r"^REL_TOL = .*$", f"REL_TOL = {tolerance}")
    if cpu:
        for name, value in SMALL.items():
            replace(rf"^{name} = .*$", f"{name} = {value}")
        replace(r'"cuda"', '"cpu"', None)
        replace(r"not torch\.cuda\.is_available\(\)", "False")
    return text


class Share:
    """A pytest plugin that keeps every n-th size, with all tests of it, so that no kernel is compiled twice."""

    def __init__(self, which: int, of: int):
        self.which, self.of = which, of

    def pytest_collection_modifyitems(self, config, items: list) -> None:
        sizes = [item.name.partition("[")[2] for item in items]
        order = sorted(set(sizes))
        keep = [order.index(size) % self.of == self.which for size in sizes]
        config.hook.pytest_deselected(items=[i for i, kept in zip(items, keep, strict=True) if not kept])
        items[:] = [i for i, kept in zip(items, keep, strict=True) if kept]


def side_by_side(jobs: int, arguments: list[str]) -> int:
    """Run this script `jobs` times, each with its share; print what they printed and the sum of their results."""
    command = [sys.executable, __file__, *arguments]
    runs = [
        subprocess.Popen([*command, "--share", str(i), str(jobs)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for i in range(jobs)
    ]
    total, code = Counter(), 0
    for run in runs:
        text = run.communicate()[0].decode()
        print(text)
        total.update({kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|skipped|errors?)", text)})
        code = max(code, 0 if run.returncode == 5 else run.returncode)  # 5: a share without tests
    print("all shares: " + ", ".join(f"{n} {kind}" for kind, n in sorted(total.items())))
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path, help="upstream's test_mamba3_mimo.py")
    parser.add_argument("--tolerance", type=float, help="in place of the file's own (0.10)")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--share", type=int, nargs=2, default=(0, 1), metavar=("I", "N"), help="only every N-th size")
    parser.add_argument("--cpu", action="store_true", help="in Triton's interpreter, at small sizes")
    args, rest = parser.parse_known_args()
    if not args.file.is_file():
        parser.error(f"{args.file} does not exist: copy upstream's tests/ops/tilelang/test_mamba3_mimo.py there")
    if args.jobs > 1:
        tolerance = ["--tolerance", str(args.tolerance)] if args.tolerance is not None else []
        return side_by_side(args.jobs, [str(args.file), *tolerance, *["--cpu"] * args.cpu, *rest])
    if args.cpu:
        os.environ["TRITON_INTERPRET"] = "1"
    import pytest

    install()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / args.file.name
        copy.write_text(adapted(args.file.read_text(), args.tolerance, args.cpu))
        options = [str(copy), "-p", "no:cacheprovider", "--rootdir", folder, *rest]
        return int(pytest.main(options, plugins=[Share(*args.share)]))


if __name__ == "__main__":
    sys.exit(main())
