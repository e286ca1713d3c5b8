"""What a compiled program moves between chips, and its largest arrays, from HLO text.

    while (trips) ─► body ─► fusion ─► all-gather      bytes · trips, each piece once

A scanned layer appears once in the text and runs once a layer, so that everything is
weighted by the trips of the loops around it. The TPU compiler splits an asynchronous
collective into pieces, spread over the fusions that it overlaps with; they share a
channel and a chain, and count once.

Source: the text format of HLO, https://openxla.org/xla/operation_semantics.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import numpy as np

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_DTYPE_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_SHAPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)$")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|called_computations|branch_computations|"
    r"true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
# Instructions whose result is another one's memory, or no memory at all.
_NO_BUFFER = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional",
    "constant", "iota", "after-all", "partition-id", "opt-barrier",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO text."""

    name: str
    shape: str
    opcode: str
    rest: str

    @property
    def source(self) -> str:
        """Where in the JAX program it comes from."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    def called(self, attribute: str = "") -> list[str]:
        """Returns the computations it runs, or the one of an attribute."""
        names = []
        for found in _CALLED.finditer(self.rest):
            if not attribute or found[0].startswith(f"{attribute}="):
                names += re.findall(r"[\w.\-]+", found[1])
        return names


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a step, its pieces put together.

    Attributes:
        kind: one of ``KINDS``.
        shape: of its result, as HLO writes it, without layouts.
        bytes: of the whole array that one run gathers, reduces or passes on, on one
            chip: an all-gather's result, a reduce-scatter's operand.
        trips: how many times a step runs it.
        groups: numbers of the chips that talk to each other, [groups members]; None if
            the text doesn't say.
        source: the operation of the JAX program that it serves.
    """

    kind: str
    shape: str
    bytes: int
    trips: int
    groups: np.ndarray | None
    source: str

    @property
    def total_bytes(self) -> int:
        """Bytes of all its runs in a step."""
        return self.bytes * self.trips

    def group_size(self, num_chips: int) -> int:
        """How many chips take part together."""
        return num_chips if self.groups is None else self.groups.shape[1]

    def crosses(self, chips_per_slice: int) -> bool:
        """Whether chips of different slices take part, slices being the outer axis."""
        if self.groups is None:
            return True
        slices = self.groups // chips_per_slice
        return bool((slices != slices[:, :1]).any())


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An array in a chip's main memory.

    Attributes:
        shape: as HLO writes it, without layouts.
        bytes: of one, without padding.
        count: how many instructions make such an array at such a place.
        source: the operation of the JAX program that it holds the result of.
    """

    shape: str
    bytes: int
    count: int
    source: str


class Program:
    """The text of one compiled program, taken apart."""

    def __init__(self, text: str):
        """Parses ``compiled.as_text()``.

        Raises:
            ValueError: this is no HLO text, or of a form that isn't known.
        """
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current: list[Instruction] = []
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header[2], [])
                if header[1]:
                    self.entry = header[2]
            elif found := _INSTRUCTION.match(line):
                current.append(Instruction(*found.groups()))
        if not self.entry:
            raise ValueError("The compiled program's text has no ENTRY computation.")
        self._trips: dict[str, int] | None = None

    def trips(self) -> dict[str, int]:
        """Returns how many times a step runs each computation."""
        if self._trips is None:
            order = self._callers_first()
            self._trips = dict.fromkeys(self.computations, 0)
            self._trips[self.entry] = 1
            for name in order:
                for instruction in self.computations[name]:
                    times = self._trips[name]
                    if instruction.opcode == "while":
                        times *= self._loop_trips(instruction)
                    for called in instruction.called():
                        if called in self._trips:
                            self._trips[called] += times
        return self._trips

    def _callers_first(self) -> list[str]:
        seen: set[str] = set()
        order: list[str] = []
        todo = [(self.entry, False)]
        while todo:
            name, is_done = todo.pop()
            if is_done:
                order.append(name)
            elif name not in seen and name in self.computations:
                seen.add(name)
                todo.append((name, True))
                for instruction in self.computations[name]:
                    todo += [(called, False) for called in instruction.called()]
        return order[::-1]

    def _loop_trips(self, loop: Instruction) -> int:
        """Reads how often a loop runs: what its condition compares the counter with."""
        known = re.search(r'known_trip_count[^}]*?"?n"?:"?(\d+)', loop.rest)
        if known:
            return int(known[1])
        todo, limits = loop.called("condition"), []
        while todo:
            for instruction in self.computations[todo.pop()]:
                todo += instruction.called()
                number = re.match(r"(\d+)\)", instruction.rest)
                if instruction.opcode == "constant" and number:
                    limits.append(int(number[1]))
        if not limits:
            raise ValueError(
                f"Loop {loop.name} of the compiled program has no constant limit: how "
                "often it runs can't be read."
            )
        return max(limits)

    def collectives(self) -> list[Collective]:
        """Lists the collectives of a step, largest first; pieces of one count once."""
        pieces: dict[str, list[tuple[Collective, bool]]] = {}
        for name, instruction in self._instructions():
            kind = instruction.opcode.removesuffix("-start")
            if kind not in KINDS or not self.trips()[name]:
                continue
            key = _chain(instruction) or f"{name}/{instruction.name}"
            pieces.setdefault(key, []).append(
                (self._collective(kind, name, instruction), _is_in_loop(instruction))
            )
        found = []
        for parts in pieces.values():
            # A gather that isn't the loop's own may be spread over its trips.
            choose = max if any(in_loop for _, in_loop in parts) else min
            trips = choose(part.trips for part, _ in parts)
            largest = max((part for part, _ in parts), key=lambda part: part.bytes)
            found.append(dataclasses.replace(largest, trips=trips))
        return sorted(found, key=lambda c: -c.total_bytes)

    def _collective(
        self, kind: str, computation: str, instruction: Instruction
    ) -> Collective:
        groups = _groups(instruction.rest)
        sizes = [size for _, size, _ in _arrays(instruction.shape)]
        size = sum(sizes)
        if instruction.opcode.endswith("-start") and kind != "all-reduce":
            size = max(sizes)  # Its result holds the operand too.
        if kind == "reduce-scatter":
            size *= 1 if groups is None else groups.shape[1]
        if kind == "all-reduce" and "all-reduce-scatter" in computation:
            kind = "reduce-scatter"  # The TPU compiler's own way to write one.
        return Collective(
            kind,
            _plain(instruction.shape),
            size,
            self.trips()[computation],
            groups,
            instruction.source,
        )

    def buffers(self, count: int = 10) -> list[Buffer]:
        """Lists the largest arrays in main memory that the program makes.

        Arrays that share memory because they don't live at the same time are listed
        both.
        """
        found: dict[tuple[str, str], Buffer] = {}
        for _, instruction in self._makers():
            for shape, size, is_in_hbm in _arrays(instruction.shape):
                if is_in_hbm:
                    key = (shape, instruction.source)
                    seen = found[key].count if key in found else 0
                    found[key] = Buffer(shape, size, seen + 1, instruction.source)
        return sorted(found.values(), key=lambda b: -b.bytes)[:count]

    def traffic(self) -> int:
        """Estimates the bytes of main memory that arrays made in a step move.

        Each is written once and read once. Updates in place are left out.
        """
        total = 0
        for name, instruction in self._makers():
            if self._is_update(instruction):
                continue
            sizes = [size for _, size, is_hbm in _arrays(instruction.shape) if is_hbm]
            total += 2 * self.trips()[name] * sum(sizes)
        return total

    def _is_update(self, instruction: Instruction) -> bool:
        updates = "dynamic-update-slice"
        called = [i for name in instruction.called() for i in self.computations[name]]
        inner = instruction.opcode == "fusion" and any(
            i.opcode == updates for i in called
        )
        return instruction.opcode == updates or inner

    def _makers(self) -> Iterator[tuple[str, Instruction]]:
        """Yields the instructions that make arrays outside of fusions."""
        fused = {
            called
            for _, instruction in self._instructions()
            if instruction.opcode not in ("while", "conditional")
            for called in instruction.called()
        }
        for name, instruction in self._instructions():
            makes = instruction.opcode not in _NO_BUFFER
            if name not in fused and makes and not instruction.opcode.endswith("-done"):
                yield name, instruction

    def _instructions(self) -> Iterator[tuple[str, Instruction]]:
        for name, instructions in self.computations.items():
            for instruction in instructions:
                yield name, instruction


def _chain(instruction: Instruction) -> str:
    """Returns what the pieces of one asynchronous collective have in common, or ""."""
    if "async_collective_fusion_config" not in instruction.rest:
        return ""
    ids = re.findall(r'channel_id=\d+|chain_id="\d+"', instruction.rest)
    return " ".join([*ids, _plain(instruction.shape)])


def _is_in_loop(instruction: Instruction) -> bool:
    """Whether the JAX program has the operation inside a loop."""
    return "while/body" in instruction.source


def _arrays(shape: str) -> Iterator[tuple[str, int, bool]]:
    """Yields (shape, bytes, whether in main memory) of each array of a result."""
    for dtype, dims, layout in _SHAPE.findall(shape):
        sizes = [int(d) for d in dims.split(",") if d]
        size = math.prod(sizes) * _bits(dtype) // 8
        yield f"{dtype}[{dims}]", size, not re.search(r"S\([1-9]", layout)


def _bits(dtype: str) -> int:
    if dtype in _DTYPE_BITS:
        return _DTYPE_BITS[dtype]
    digits = re.match(r"[a-z]+(\d+)", dtype)
    return int(digits[1]) if digits else 0


def _plain(shape: str) -> str:
    return ", ".join(plain for plain, _, _ in _arrays(shape))


def _groups(rest: str) -> np.ndarray | None:
    """Reads which chips talk to each other, in any of HLO's ways to write it."""
    if found := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", rest):
        rows = [r.split(",") for r in re.findall(r"\{([\d, ]+)\}", found[1])]
        same_length = len({len(row) for row in rows}) == 1
        return np.array(rows, int) if same_length else None
    if found := re.search(
        r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest
    ):
        ids = np.arange(math.prod(_ints(found[3]))).reshape(_ints(found[3]))
        if found[4]:
            ids = ids.transpose(_ints(found[4]))
        return ids.reshape(int(found[1]), int(found[2]))
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest):
        sizes = {a: int(n) for a, n in re.findall(r"'([^']+)'=(\d+)", found[1])}
        axes = re.findall(r"'([^']+)'(:\(\d+\)\d+)?", found[2])
        if any(part for _, part in axes):
            return None
        ids = np.arange(math.prod(sizes.values())).reshape(list(sizes.values()))
        inner = [list(sizes).index(axis) for axis, _ in axes]
        outer = [i for i in range(len(sizes)) if i not in inner]
        members = math.prod(ids.shape[i] for i in inner)
        return ids.transpose(*outer, *inner).reshape(-1, members)
    if found := re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", rest):
        return np.array([_ints(p) for p in re.findall(r"\{([\d,]+)\}", found[1])])
    return None


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
