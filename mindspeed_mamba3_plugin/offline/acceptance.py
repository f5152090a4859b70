"""The acceptance rule for an NPU operator: how fast it must be beside an A100; and tables of times against it.

Times are milliseconds by shape and entry ("bwd_fwd", "bwd_bwd"), measured or estimated: the caller says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from . import cases, report

Times = Mapping[str, Mapping[str, float]]

ENTRIES = ("bwd_fwd", "bwd_bwd")

# Share of the A100's speed to reach, by the resource that bounds the operator: 0.7 for one that works on cube and
# vector cores, 0.9 for one on vector cores alone, times 910B2's rate over the A100's, rounded as the rule has it.
REQUIRED = {
    "cube": {"mixed": 0.8, "vector": 1.0},
    "vector": {"mixed": 0.4, "vector": 0.5},
    "memory": {"mixed": 0.6, "vector": 0.8},
}
WANTED = (0.6, 0.8)  # judged in every table: bound by memory, as both entries are; and the strictest for mixed work


@dataclass(frozen=True)
class Verdict:
    """One time against the rule."""

    ms: float
    a100_ms: float
    required: float

    @property
    def ratio(self) -> float:
        """Speed as a share of the A100's."""
        return self.a100_ms / self.ms

    @property
    def limit_ms(self) -> float:
        """The longest time that meets the rule."""
        return self.a100_ms / self.required

    @property
    def met(self) -> bool:
        return self.ms <= self.limit_ms


def required(bound: str, kind: str = "mixed") -> float:
    """Share of the A100's speed to reach.

    Raises:
        ValueError: an unknown resource or kind of operator.
    """
    if bound not in REQUIRED:
        raise ValueError(f"bound is {bound!r}: must be one of {', '.join(REQUIRED)}")
    if kind not in REQUIRED[bound]:
        raise ValueError(f"kind is {kind!r}: must be one of {', '.join(REQUIRED[bound])}")
    return REQUIRED[bound][kind]


def judge(shape: str, entry: str, ms: float, share: float) -> Verdict:
    """One time of an official shape against a share of the A100's speed.

    Raises:
        ValueError: no time of an A100 is published for it, or the time is no positive number.
    """
    known = cases.official_times()
    if shape not in known:
        raise ValueError(f"shape is {shape!r}: must be one of {', '.join(known)}")
    if entry not in ENTRIES:
        raise ValueError(f"entry is {entry!r}: must be one of {', '.join(ENTRIES)}")
    if not (ms > 0 and math.isfinite(ms)):
        raise ValueError(f"the time of {entry} at {shape} is {ms} ms: must be a positive number")
    return Verdict(ms, known[shape][f"a100_{entry}_ms"], share)


def met(times: Times, share: float) -> dict[str, int]:
    """How many shapes meet the rule, by entry."""
    return {e: sum(judge(s, e, row[e], share).met for s, row in times.items() if e in row) for e in ENTRIES}


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def table(times: Times, title: str = "ms") -> str:
    """Markdown, `title` over our own times: each entry and shape against the A100 and against the published 910B3
    times of other ports, then how many meet the rule, with the geometric mean of the shares."""
    shares = [f"{share} of A100" for share in WANTED]
    head = ["kernel, shape", title, "A100 ms", "A100 / ours", *shares, "public Triton", "gain", "AscendC", "gain"]
    lines, sums = [], []
    for entry in ENTRIES:
        own = {shape: row[entry] for shape, row in times.items() if entry in row}
        for shape, ms in own.items():
            record = cases.official_times()[shape]
            verdicts = [judge(shape, entry, ms, share) for share in WANTED]
            line = [f"{entry} {shape}", f"{ms:.3f}", f"{verdicts[0].a100_ms:.3f}", f"{verdicts[0].ratio:.2f}"]
            line += [f"{'met' if v.met else 'not met'} ({v.limit_ms:.2f} ms)" for v in verdicts]
            for port in ("triton", "ascendc"):
                theirs = record[f"{port}_910b3_{entry}_ms"]
                line += [f"{theirs:.3f}", f"{theirs / ms:.1f}x"]
            lines.append(line)
        if own:
            ratios = [judge(shape, entry, ms, 1.0).ratio for shape, ms in own.items()]
            counts = ", ".join(f"{met({s: {entry: t} for s, t in own.items()}, w)[entry]} at {w}" for w in WANTED)
            sums.append(
                f"{entry}: of {len(own)} shapes meet the rule {counts}; geometric mean of A100 / ours "
                f"{geometric_mean(ratios):.2f}."
            )
    return "\n".join([report.table(head, lines), "", *sums])
