"""Read planned HIVM: the operations of each half of a kernel in their loops, and the on-chip memory they take."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

ON_CHIP = {"ub": 192 * 1024, "cbuf": 512 * 1024, "cc": 128 * 1024}  # bytes of UB, L1 and L0C on Ascend 910B
_WIDTH = {
    "f32": 4, "i32": 4, "f16": 2, "bf16": 2, "i16": 2, "i8": 1, "ui8": 1, "i1": 1 / 8, "i64": 8, "index": 8, "f64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Buffer:
    """The type of a memref operand; shape is () where it is not known."""

    space: str  # "gm", "ub", "cbuf" or "cc"
    shape: tuple[int, ...]
    element: str
    strides: tuple[int | None, ...] = ()  # in elements, None where not known; () is contiguous
    workspace: bool = False  # global memory by which the halves of a mixed kernel exchange tiles

    @property
    def elements(self) -> int:
        return math.prod(self.shape) if self.shape else 0

    @property
    def bytes(self) -> float:
        return self.elements * _WIDTH.get(self.element, 4)

    @property
    def row_bytes(self) -> float:
        """Bytes of a piece that lies in one run of memory."""
        run, strides = 1, self.strides or _contiguous(self.shape)
        for size, stride in zip(reversed(self.shape), reversed(strides), strict=True):
            if size > 1 and stride != run:
                break
            run *= size
        return run * _WIDTH.get(self.element, 4)


@dataclass
class Op:
    """One operation, and how often a core executes it."""

    name: str
    times: float
    inputs: list[Buffer]
    outputs: list[Buffer]
    scalars: list[float | None]  # of its inputs, in order
    text: str
    depth: int  # loops around it


@dataclass
class Half:
    """One function of a kernel: a pure kernel's only one, or the cube or the vector half of a mixed one."""

    name: str
    ops: list[Op] = field(default_factory=list)
    used: dict[str, int] = field(default_factory=dict)  # bytes by on-chip memory
    scalar_loops: list[int] = field(default_factory=list)  # iterations of each loop over single elements of UB
    scalar_accesses: float = 0  # executed UB accesses of single elements
    unplaced: int = 0  # on-chip buffers without an address
    atomics: int = 0
    split: str = ""  # of a mixed kernel's vector half: "1:2", "first core only" or "both cores do all"

    @property
    def cube(self) -> bool:
        return any(op.name.startswith("mmad") for op in self.ops)


def read(text: str, arguments: Mapping[str, int] | None = None, unknown_trips: float = 1) -> list[Half]:
    """The halves of a kernel.

    Args:
        text: the module, as printed before convert-hivm-to-std.
        arguments: values of the integer arguments by SSA name, for loops whose bounds are known at launch only.
        unknown_trips: iterations of a loop whose bounds are read from memory.
    """
    functions = re.findall(r"^  func\.func @(\w+)\([^\n]*\n(.*?)^  }", text, re.S | re.M)
    return [
        _Reader(name, body, dict(arguments or {}), unknown_trips).half
        for name, body in functions
        if "_infer_" not in name
    ]


def argument_names(values: list[int | None], grid: tuple[int, ...]) -> dict[str, int]:
    """A kernel's integer arguments by SSA name: after three of the runtime's own come the caller's, in order with
    None for those that are no integers, then the grid."""
    named = {f"%arg{3 + i}": v for i, v in enumerate([*values, *grid])}
    return {k: v for k, v in named.items() if v is not None}


_ARITH = {
    "addi": lambda a, b: a + b, "subi": lambda a, b: a - b, "muli": lambda a, b: a * b,
    "divsi": lambda a, b: int(a / b), "floordivsi": lambda a, b: a // b, "remsi": lambda a, b: math.fmod(a, b),
    "ceildivsi": lambda a, b: -(-a // b), "minsi": min, "maxsi": max,
}  # fmt: skip
_DIVISIONS = ("divsi", "floordivsi", "remsi", "ceildivsi")
_KEPT = ("index_cast", "extsi", "trunci", "extui", "index_castui")
_VIEWS = "subview|cast|collapse_shape|expand_shape|reinterpret_cast|view|memory_space_cast"
_WORKSPACE = "%arg2"  # the runtime's own argument
_SILENT = ("pointer_cast", "get_block_idx", "get_sub_block_idx", "set_mask_norm", "set_ffts_base_addr")


class _Reader:
    def __init__(self, name: str, body: str, values: dict[str, float], unknown_trips: float):
        self.half = Half(name, used=dict.fromkeys(ON_CHIP, 0))
        self.values = values
        self.types: dict[str, Buffer] = {}
        self.sources: dict[str, str] = {}
        self.of_core: set[str] = set()  # which of a cube core's vector cores this is, and comparisons with it
        self.unknown_trips = unknown_trips
        if name.endswith("_mix_aiv"):
            self.half.split = (
                "first core only" if "limit_sub_block_id0" in body
                else "1:2" if "get_sub_block_idx" in body else "both cores do all"
            )  # fmt: skip
        # A tile cut off by the end of a sequence is filled first: one in many.
        body = re.sub(
            r"^( *)scf\.if [^\n]*\n(?:\1 +[^\n]*\n)*\1} \{hivm\.unlikely_condition\}\n", "", body, flags=re.M
        )
        loops: list[tuple[int, str, float, list[str]]] = []  # indent, induction variable, trips, lines inside
        for line in body.splitlines():
            indent = len(line) - len(line.lstrip())
            while loops and indent <= loops[-1][0]:
                self._close(loops.pop())
            line = line.strip()
            if loops:
                loops[-1][3].append(line)
            if loop := re.match(r"(?:%[\w:]+ = )?scf\.for (%\w+) = (%[\w-]+) to (%[\w-]+) step (%[\w-]+)", line):
                variable, *bounds = loop.groups()
                first, last, step = map(self.values.get, bounds)
                known = None not in (first, last, step) and step
                trips = max(0, -(-(last - first) // step)) if known else self.unknown_trips
                if first is not None:
                    self.values[variable] = first
                loops.append((indent, variable, trips, []))
            elif "scf.while" in line:
                loops.append((indent, "", self.unknown_trips, []))
            else:
                self._line(line, math.prod(trips for _, _, trips, _ in loops), len(loops))
        while loops:
            self._close(loops.pop())

    def _close(self, loop: tuple[int, str, float, list[str]]) -> None:
        _, variable, trips, lines = loop
        touches = [line for line in lines if re.search(r"memref\.(load|store)\b.*address_space<ub>", line)]
        if variable and any(re.search(re.escape(variable) + r"\b", line.split(" : ")[0]) for line in touches):
            self.half.scalar_loops.append(int(trips))

    def _line(self, line: str, times: float, depth: int) -> None:
        result, _, operation = line.partition(" = ") if line.startswith("%") else ("", "", line)
        result = result.split(":")[0]
        if m := re.match(r"arith\.constant (-?\d+) : ", operation):
            self.values[result] = int(m[1])
        elif operation.startswith(("hivm.hir.get_block_idx", "hivm.hir.get_sub_block_idx")):
            self.values[result] = 0
            if "sub_block" in operation:
                self.of_core.add(result)
        elif (m := re.match(r"scf\.if (%[\w-]+)", operation)) and m[1] in self.of_core:
            self.half.split = "both cores do all"  # and one of them keeps it
        elif m := re.match(rf"memref\.(?:{_VIEWS}) (%[\w-]+)", operation):
            self.sources[result] = m[1]
            self.types[result] = _buffer(operation.rpartition(" to ")[2].rpartition(" into ")[2])
        elif operation.startswith("memref.alloc"):
            self.types[result] = _buffer(operation.rpartition(" : ")[2])
            self.half.unplaced += self.types[result].space in ON_CHIP
        elif re.match(r"memref\.(load|store)\b.*address_space<ub>", operation):
            self.half.scalar_accesses += times
        elif (m := re.match(r"arith\.select %[\w-]+, (%[\w-]+), ", operation)) and m[1] in self.types:
            self.types[result] = self.types[m[1]]
        elif m := re.match(r"arith\.(\w+) (?:\w+, )?(%[\w-]+)(?:, (%[\w-]+))?", operation):
            self._arithmetic(result, *m.groups())
        elif m := re.match(r"hivm\.hir\.(\w+)", operation):
            self._operation(m[1], result, operation, times, depth)

    def _arithmetic(self, result: str, name: str, left: str, right: str | None) -> None:
        a, b = self.values.get(left), self.values.get(right or "")
        if (name in _KEPT or name == "cmpi") and {left, right} & self.of_core:
            self.of_core.add(result)
        if name in _KEPT and a is not None:
            self.values[result] = a
        elif (
            name in _ARITH
            and None not in (a, b)
            and (b or not name.startswith(("div", "rem", "floordiv", "ceildiv")))
        ):
            self.values[result] = _ARITH[name](a, b)

    def _operation(self, name: str, result: str, text: str, times: float, depth: int) -> None:
        if name == "pointer_cast":
            buffer = self.types[result] = _buffer(text.rpartition(" : ")[2])
            if buffer.space in ON_CHIP:
                size = math.ceil(buffer.bytes / 32) * 32
                for address in re.findall(r"%[\w-]+", text.split("(")[1].split(")")[0]):
                    end = int(self.values.get(address, 0)) + size
                    self.half.used[buffer.space] = max(self.half.used[buffer.space], end)
        if name in _SILENT:
            return
        self.half.atomics += "atomic" in text
        inputs, scalars = self._operands(text, "ins")
        outputs, _ = self._operands(text, "outs")
        self.half.ops.append(Op(name, times, inputs, outputs, scalars, text, depth))

    def _operands(self, text: str, group: str) -> tuple[list[Buffer], list[float | None]]:
        found = re.search(rf"\b{group}\((.*?) : ", text)
        if not found:
            return [], []
        names = re.findall(r"%[\w-]+", found[1])
        buffers = [self._known(n) for n in names if n in self.types]
        return buffers, [self.values.get(n) for n in names if n not in self.types]

    def _known(self, name: str) -> Buffer:
        """The type of a value, or of the nearest buffer it is a view of that has a known shape."""
        buffer = self.types[name]
        for _ in range(16):
            if (known := self.types[name]).shape:
                return replace(
                    known, space=buffer.space, element=buffer.element, workspace=self._root(name) == _WORKSPACE
                )
            if self.sources.get(name) not in self.types:
                break
            name = self.sources[name]
        return buffer

    def _root(self, name: str) -> str:
        while name in self.sources:
            name = self.sources[name]
        return name


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _buffer(text: str) -> Buffer:
    found = re.match(r"\s*memref<((?:[\d?]+x)*)(\w+)", text)
    if not found:
        return Buffer("", (), "")
    sizes = found[1].split("x")[:-1]
    space = re.search(r"address_space<(\w+)>", text)
    shape = () if "?" in sizes else tuple(map(int, sizes)) or (1,)
    steps = re.search(r"strided<\[([^\]]*)\]", text)
    strides = tuple(int(n) if n.isdigit() else None for n in steps[1].split(", ")) if steps else ()
    return Buffer(space[1] if space else "", shape, found[2], strides)


def executed(half: Half) -> Iterator[Op]:
    """The operations that take a pipe's time: without flags, waits and barriers."""
    for op in half.ops:
        if not op.name.startswith(("set_", "wait_", "pipe_", "sync_")):
            yield op
