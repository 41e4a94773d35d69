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
class CompiledStep:
    """XLA's report on a compiled train step, per device.

    Attributes:
      arguments, temporaries: bytes. The temporaries are those of a CPU: with attention scores and float32 copies.
    """

    arguments: int
    temporaries: int
    collectives: list[Collective]

    def counts(self) -> dict[str, int]:
        """Return how many times each kind of collective runs in a step."""
        counts: Counter[str] = Counter()
        for collective in self.collectives:
            counts[collective.kind] += collective.count
        return dict(sorted(counts.items()))


def compile_step(lowered: jax.stages.Lowered, per_machine: int) -> CompiledStep:
    """Compile a lowered function and read memory and collectives from the result."""
    compiled = lowered.compile()
    stats, hlo = compiled.memory_analysis(), compiled.as_text()
    assert stats is not None and hlo is not None, "a CPU's compiler reports both"
    return CompiledStep(stats.argument_size_in_bytes, stats.temp_size_in_bytes, list(collectives(hlo, per_machine)))


def collectives(hlo: str, per_machine: int) -> Iterator[Collective]:
    """Yield the collectives of an HLO module; those in a loop count once per iteration.

    Args:
      hlo: the text of the module.
      per_machine: number of consecutive devices on each machine.
    """
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            name = header[2]
            entry = name if header[1] else entry
        elif name:
            bodies.setdefault(name, []).append(line)
    for name, runs in _runs(bodies, entry).items():
        for line in bodies.get(name, ()):
            if (match := _INSTRUCTION.search(line)) and (groups := _groups(line)) is not None and groups.shape[1] > 1:
                kind, group = match[2], groups.shape[1]
                size = _size(match[1]) * (group if kind == "reduce-scatter" else 1)
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
            for computation in called:
                visit(computation, times * int(trips[1]) if trips else times)

    visit(entry, 1)
    return runs


def _groups(line: str) -> np.ndarray | None:
    """Return the devices of each group, [groups, devices]; None if the instruction names none.

    XLA writes groups in three ways: `{{0,1},{2,3}}`, `[2,2]<=[4]T(0)` and `mesh['a'=2,'b'=2] {'a'}`.
    """
    if match := re.search(r"(?:source_target_pairs|replica_groups)=\{(\{.*?\})\}", line):
        return np.array([_numbers(group) for group in match[1].split("},{")])
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        devices = np.arange(np.prod(_numbers(match[2]))).reshape(_numbers(match[2]))
        return (devices.transpose(_numbers(match[3])) if match[3] else devices).reshape(_numbers(match[1]))
    if match := re.search(r"replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}", line):
        return _mesh_groups(re.findall(r"'([^']+)'=(\d+)", match[1]), _AXIS.findall(match[2]))
    return None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


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
        bits = (_numbers(dtype) or [8])[0]
        total += bits // 8 * int(np.prod(_numbers(dims)))
    return total
