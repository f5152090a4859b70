#!/usr/bin/env python
"""Pictures of measurements kept as JSON.

python scripts/plot_benchmarks.py comparison docs/benchmarks/h200_beside_tilelang.json out.png
python scripts/plot_benchmarks.py growth docs/benchmarks/h200_growth.json out.png
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def comparison(axes, ours: dict) -> None:
    """Backward times of both by shape, where both were timed, and how many times as fast ours is."""
    cases = [case for case in ours["cases"] if "tilelang" in case]
    shapes = [case["shape"] for case in cases]
    mine = [case["backward_ms"] for case in cases]
    other = [case["tilelang"]["backward_ms"] for case in cases]
    floor = [case["floor_ms"] for case in cases]
    place = range(len(shapes))
    axes.bar([i - 0.2 for i in place], other, 0.4, label="TileLang", color="#9aa7b5")
    axes.bar([i + 0.2 for i in place], mine, 0.4, label="triton-gpu", color="#1b7f5c")
    axes.scatter([i + 0.2 for i in place], floor, marker="_", s=160, color="black", label="floor", zorder=3)
    for i, (a, b) in enumerate(zip(mine, other, strict=True)):
        axes.text(i + 0.2, a + 0.05, f"{b / a:.1f}x", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(list(place), [s.replace("_", "\n", 1) for s in shapes], fontsize=7)
    axes.set_ylabel("whole backward, ms")
    axes.set_title(f"{ours['environment']['device']}, B 4, S 2048, H 16, bf16")
    axes.legend()


def growth(axes, measured: dict) -> None:
    """Time per token and head over sequence lengths and over the number of sequences times heads."""
    sweeps = {
        "length": ("S", "one sequence, 16 heads: length"),
        "rows": (None, "2048 tokens: sequences x heads"),
    }
    for axis, (sweep, (key, label)) in zip(axes, sweeps.items(), strict=True):
        cases = sorted(
            (c for c in measured["cases"] if c["sweep"] == sweep), key=lambda c: c[key] if key else c["B"] * c["H"]
        )
        x = [c[key] if key else c["B"] * c["H"] for c in cases]
        for name, color in (("backward", "#1b7f5c"), ("forward", "#9aa7b5")):
            axis.plot(x, [c[f"{name}_ns_per_token_and_head"] for c in cases], "o-", label=name, color=color)
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel(label)
        axis.set_ylabel("ns per token and head")
        axis.grid(alpha=0.3)
        axis.legend()
    axes[0].set_title(f"{measured['environment']['device']}, {measured['shape']}, {measured['dtype']}")


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("comparison", "growth"))
    p.add_argument("measured", type=Path, help="JSON file")
    p.add_argument("picture", type=Path, help="PNG file to write")
    args = p.parse_args(argv)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size, columns = ((10, 4.5), 1) if args.what == "comparison" else ((10, 3.8), 2)
    figure, axes = plt.subplots(1, columns, figsize=size, layout="constrained")
    (comparison if args.what == "comparison" else growth)(axes, json.loads(args.measured.read_text()))
    figure.savefig(args.picture, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
