"""What a launch gives each unit of an Ascend 910B to do, read off its planned HIVM with the sizes of the launch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from . import hivm
from .cost import LONG_ROW, Work

_VECTOR_BYTES = 256  # one vector instruction, one cycle
# Cycles relative to an addition of as many elements.
_SLOW = {
    "vexp": 4,
    "vln": 4,
    "vdiv": 4,
    "vsqrt": 4,
    "vrsqrt": 4,
    "vrec": 4,
    "vtranspose": 4,
    "vcumsum": 4,
    "vreduce": 2,
}
_MULTIPLIES = 4096  # of 16-bit operands, a cube core's in one cycle
_BLOCK = 16  # rows and columns of a cube core's smallest tile
_SHORTEST_ROW = 128  # bytes: a row below takes as long


def of_launch(halves: Iterable[hivm.Half], programs: int, cube_cores: int, vector_cores: int) -> Work:
    """The work of a launch of `programs` programs, whose HIVM was read with the arguments and the grid of the launch.

    Every program is taken for as long as the first; more programs than cores run in rounds.
    """
    halves = list(halves)
    cube = any(h.cube for h in halves)
    mixed = len(halves) > 1 and any(op.name.startswith("v") for h in halves if not h.cube for op in h.ops)
    rounds = math.ceil(programs / (cube_cores if cube else vector_cores))
    total = Work(mixed=mixed)
    for half in halves:
        # One program of a mixed kernel runs on two vector cores.
        cores = 2 if half.split in ("1:2", "both cores do all") else 1
        total += _of_half(half, rounds, programs * cores)
    if not cube:
        total.tasks = rounds * max((op.times for h in halves for op in h.ops if op.depth == 1), default=0)
    return total


def _of_half(half: hivm.Half, rounds: int, cores: int) -> Work:
    work = Work(scalar_accesses=rounds * half.scalar_accesses)
    for op in half.ops:
        times = rounds * op.times
        if op.name == "sync_block_wait":
            work.handovers += times
        elif op.name.startswith("mmad"):
            work.cube_cycles += times * _cube_cycles(op)
        elif op.name in ("nd2nz", "fixpipe", "load", "store"):
            _transfer(work, op, half.cube, times, cores / rounds)
        elif op.name == "copy" or op.name.startswith("v"):
            widest = max((b.bytes for b in (*op.inputs, *op.outputs)), default=0)
            work.vector_calls += times
            work.vector_cycles += times * math.ceil(widest / _VECTOR_BYTES) * _SLOW.get(op.name, 1)
    return work


def _cube_cycles(op: hivm.Op) -> float:
    sizes = op.scalars[-3:]  # rows, inner size, columns
    if None in sizes or len(sizes) < 3:
        raise ValueError(f"a matrix product of unknown size: {op.text[:200]}")
    blocks = math.prod(math.ceil(n / _BLOCK) * _BLOCK for n in sizes)
    wide = 4 if op.inputs and op.inputs[0].element == "f32" else 1
    return blocks * wide / _MULTIPLIES


def _transfer(work: Work, op: hivm.Op, cube: bool, times: float, cores: float) -> None:
    ends = [*op.inputs, *op.outputs]
    outside = next((b for b in ends if b.space == "gm"), None)
    inside = next((b for b in ends if b.space != "gm" and b.elements), None)
    size = (outside if outside and outside.elements else inside or ends[0]).bytes if ends else 0
    if outside:
        work.memory_bytes += times * size * cores
        work.workspace_bytes += times * size * cores * outside.workspace
    if cube:
        work.cube_calls += times
        return
    work.transfers += times
    if op.name != "load":
        return
    row = min((b.row_bytes for b in (outside, inside) if b and b.elements), default=size)
    rows = times * size / row if row else 0
    if row % 32 and rows > times:
        work.unaligned_rows += rows
    elif row < _SHORTEST_ROW:
        work.rows += rows
    elif row < LONG_ROW:
        work.loaded_short += times * size
    else:
        work.loaded_long += times * size
