"""The acceptance rule for an NPU operator: how fast it must be beside an A100.

Times are milliseconds by shape and entry ("bwd_fwd", "bwd_bwd"), measured or estimated: the caller says which.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from . import cases

Times = Mapping[str, Mapping[str, float]]

ENTRIES = ("bwd_fwd", "bwd_bwd")

# Share of the A100's speed that an operator on cube and vector cores must reach, by the resource that bounds it: 0.7
# times 910B2's rate over the A100's, rounded as the rule has it. (An operator on vector cores alone must reach 0.9.)
REQUIRED = {"memory": 0.6, "vector": 0.4, "cube": 0.8}
WANTED = (0.6, 0.8)  # judged in every table: what memory asks for, and the strictest


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
