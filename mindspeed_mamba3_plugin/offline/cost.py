"""How long a kernel would take on an Ascend 910B: an estimate from what its units are given to do, not a measurement.

The constants were fitted to published 910B times of public Triton kernels. They hold within a factor of two for
kernels that walk over many tasks with double-buffering, in rows of at least 128 bytes, with vector operations on
tiles of at least 4 KiB.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Constants:
    """What work costs. Times are in ns, rates in bytes per ns."""

    vector_call: float  # issue of one vector operation
    transfer_call: float  # of one load or store of a vector core, or of a cube core in a kernel of products alone
    mixed_call: float  # of one load or store of a cube core that waits for vector cores, and they for it
    hbm: float  # all cores, what is not workspace
    memory: float  # all cores, workspace included
    load: float  # a vector core's loads; inf where other limits were found to explain everything
    load_short: float  # the same for rows below LONG_ROW
    row: float  # the least that one row of a load takes
    unaligned_row: float  # the same for rows that are no multiple of 32 bytes
    overlap: float  # share of the other units' time that is not hidden behind the busiest: 0 none, 1 everything
    launch: float
    task: float = 0  # what a vector core loses per task where loading ahead fails


LONG_ROW = 512  # bytes
CLOCK = 1.8  # cycles per ns, of cube and vector cores
INF = float("inf")

# Two fits of equal quality that differ in how much is hidden, and a case in which everything unknown goes wrong.
_POINTS = Constants(
    vector_call=15, transfer_call=30, mixed_call=300, hbm=1250, memory=2000, load=20, load_short=13, row=10,
    unaligned_row=24, overlap=0.15, launch=1600,
)  # fmt: skip
_FAMILIES = replace(
    _POINTS, vector_call=10, mixed_call=100, hbm=1800, load=INF, load_short=INF, row=0, unaligned_row=0, overlap=1.0
)
FITS = {
    "A": _POINTS,
    "B": _FAMILIES,
    "harsh": replace(_POINTS, mixed_call=450, hbm=1200, overlap=0.3, task=1300),
}


@dataclass
class Work:
    """What one launch gives its busiest core to do; bytes in global memory are those of all cores."""

    mixed: bool = False  # a cube core and its vector cores work on the same task
    tasks: float = 0  # of the busiest vector core in a kernel without products
    cube_cycles: float = 0
    cube_calls: float = 0  # loads and stores of the cube core
    vector_cycles: float = 0
    vector_calls: float = 0
    transfers: float = 0  # loads and stores of a vector core
    loaded_long: float = 0  # bytes in rows of at least LONG_ROW
    loaded_short: float = 0
    rows: float = 0  # among the short ones, those too short for their bytes to matter
    unaligned_rows: float = 0
    memory_bytes: float = 0
    workspace_bytes: float = 0
    handovers: float = 0  # waits of a cube core for its vector cores or the other way round
    scalar_accesses: float = 0  # of single elements of UB: far outside of what the constants hold for

    def __add__(self, other: Work) -> Work:
        total = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(Work) if f.name != "mixed"}
        return Work(mixed=self.mixed or other.mixed, **total)

    def __truediv__(self, n: float) -> Work:
        share = {f.name: getattr(self, f.name) / n for f in fields(Work) if f.name != "mixed"}
        return Work(mixed=self.mixed, **share)


@dataclass(frozen=True)
class Estimate:
    ns: float
    units: dict[str, float]  # ns of each unit alone

    @property
    def bound(self) -> str:
        return max(self.units, key=self.units.get) if any(self.units.values()) else "launch"


def units(work: Work, c: Constants) -> dict[str, float]:
    """ns that each unit takes alone."""
    cube_call = c.mixed_call if work.mixed else c.transfer_call
    return {
        "memory": max((work.memory_bytes - work.workspace_bytes) / c.hbm, work.memory_bytes / c.memory),
        "vector": work.vector_cycles / CLOCK + work.vector_calls * c.vector_call,
        "transfers": work.transfers * c.transfer_call + work.loaded_long / c.load + work.loaded_short / c.load_short
        + work.rows * c.row + work.unaligned_rows * c.unaligned_row,
        "cube calls": work.cube_calls * cube_call,
        "cube": work.cube_cycles / CLOCK,
    }  # fmt: skip


def estimate(work: Work, c: Constants) -> Estimate:
    """The busiest unit, what the others do not hide behind it, and the launch."""
    busy = units(work, c)
    longest = max(busy.values())
    rest = sum(busy.values()) - longest
    return Estimate(c.launch + longest + c.overlap * rest + work.tasks * c.task, busy)
