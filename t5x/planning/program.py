"""The compiled train step: XLA's memory and collectives."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator

import jax
import numpy as np

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(rf"= (\(?[a-z].*?) ({'|'.join(_KINDS)})(?:-start)?\(")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_ARRAY = re.compile(r"([a-z]+\d*\w*)\[([\d,]*)\]")
_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")
_BITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation of the program.

    Attributes:
      kind: all-reduce, all-gather, …
      count: how many times it runs in a step.
      size: bytes of the array before a reduction or after a gather, on one device.
      group: devices that take part.
      across: whether a group spans several machines.
    """

    kind: str
    count: int
    size: int
    group: int
    across: bool

    @property
    def traffic(self) -> float:
        """Bytes that each device sends in all runs, with ring algorithms."""
        rounds = 2 if self.kind == "all-reduce" else 1
        share = 1.0 if self.kind == "collective-permute" else (self.group - 1) / self.group
        return rounds * self.count * self.size * share


@dataclasses.dataclass(frozen=True)
class Program:
    """What XLA reports about a compiled step, per device.

    Attributes:
      arguments, temporaries: bytes. The temporaries are those of a CPU: with attention scores and float32 copies.
    """

    arguments: int
    temporaries: int
    collectives: list[Collective]

    def counts(self) -> dict[str, int]:
        """Return how many times each kind of collective runs in a step."""
        found: Counter[str] = Counter()
        for collective in self.collectives:
            found[collective.kind] += collective.count
        return dict(sorted(found.items()))


def compile_program(lowered: jax.stages.Lowered, per_machine: int) -> Program:
    """Compile a lowered function and read memory and collectives from the result."""
    compiled = lowered.compile()
    stats, hlo = compiled.memory_analysis(), compiled.as_text()
    assert stats is not None and hlo is not None, "a CPU's compiler reports both"
    found = list(collectives(hlo, per_machine))
    return Program(stats.argument_size_in_bytes, stats.temp_size_in_bytes, found)


def collectives(hlo: str, per_machine: int) -> Iterator[Collective]:
    """Yield the collectives of an HLO module; those in a loop count once per iteration.

    Args:
      hlo: the text of the module.
      per_machine: number of consecutive devices on each machine.
    """
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if found := _COMPUTATION.match(line):
            name = found[2]
            entry = name if found[1] else entry
        elif name:
            bodies.setdefault(name, []).append(line)
    for name, runs in _runs(bodies, entry).items():
        for line in bodies.get(name, ()):
            if (found := _INSTRUCTION.search(line)) and (groups := _groups(line)) is not None and groups.shape[1] > 1:
                kind, group = found[2], groups.shape[1]
                size = _size(found[1]) * (group if kind == "reduce-scatter" else 1)
                across = bool((groups // per_machine != groups[:, :1] // per_machine).any())
                yield Collective(kind, runs, size, group, across)


def _runs(bodies: dict[str, list[str]], entry: str) -> Counter[str]:
    """Return how many times each computation runs."""
    runs: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        runs[name] += times
        for line in bodies.get(name, ()):
            called = _CALLED.findall(line)
            if branches := _BRANCHES.search(line):
                called += [branch.strip().lstrip("%") for branch in branches[1].split(",")]
            trips = _TRIPS.search(line)
            for other in called:
                visit(other, times * int(trips[1]) if trips else times)

    visit(entry, 1)
    return runs


def _groups(line: str) -> np.ndarray | None:
    """Return the devices of each group, [groups, devices]; None if the instruction names none.

    XLA writes groups in three ways: `{{0,1},{2,3}}`, `[2,2]<=[4]T(0)` and `mesh['a'=2,'b'=2] {'a'}`.
    """
    numbers = lambda text: [int(n) for n in _BITS.findall(text)]
    if found := re.search(r"(?:source_target_pairs|replica_groups)=\{(\{.*?\})\}", line):
        return np.array([numbers(group) for group in found[1].split("},{")])
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        devices = np.arange(np.prod(numbers(found[2]))).reshape(numbers(found[2]))
        return (devices.transpose(numbers(found[3])) if found[3] else devices).reshape(numbers(found[1]))
    if found := re.search(r"replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}", line):
        return _mesh_groups(re.findall(r"'([^']+)'=(\d+)", found[1]), _AXIS.findall(found[2]))
    return None


def _mesh_groups(mesh: list[tuple[str, str]], axes: list[tuple[str, str, str]]) -> np.ndarray:
    """Return the groups along some axes of a mesh; `('a', '2', '4')` is the part of size 4 of `a` after its first 2."""
    shape, within = [], []
    for name, size in mesh:
        parts = [(int(before or 1), int(length or size)) for axis, before, length in axes if axis == name]
        done = 1
        for before, length in sorted(parts):
            shape += [before // done, length]
            within += [False, True]
            done = before * length
        shape.append(int(size) // done)
        within.append(False)
    order = sorted(range(len(shape)), key=within.__getitem__)
    count = int(np.prod([size for size, inside in zip(shape, within, strict=True) if inside]))
    return np.arange(np.prod(shape)).reshape(shape).transpose(order).reshape(-1, count)


def _size(shapes: str) -> int:
    """Return the bytes of the arrays in a shape such as `(f32[8,16]{1,0}, bf16[4])`."""
    total = 0
    for dtype, dims in _ARRAY.findall(shapes):
        bits = int(found[0]) if (found := _BITS.search(dtype)) else 8
        total += bits // 8 * int(np.prod([int(n) for n in dims.split(",") if n]))
    return total
