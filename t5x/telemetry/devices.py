"""Data sheet numbers of devices: bfloat16 peak, memory, bandwidths."""

import dataclasses
import re
from typing import NamedTuple, Protocol

from t5x._runtime.errors import UserError

TERA = 1e12


class Device(Protocol):
    """The part of `jax.Device` that is needed here."""

    device_kind: str


class Chip(NamedTuple):
    """Data sheet numbers of one JAX device.

    Attributes:
      tflops: TFLOP/s of dense bfloat16 matmuls.
      memory: device memory in GB.
      bandwidth: of that memory, GB/s.
      link: bandwidth to the other devices of a machine or TPU slice, GB/s in one direction, all links together.
    """

    tflops: float
    memory: float
    bandwidth: float
    link: float


# By JAX's device_kind. A device is a chip, except for TPU v2, v3 and 7x, where it is half a chip.
_BY_KIND = {
    "TPU v2": Chip(46 / 2, 8, 350, 124), "TPU v3": Chip(123 / 2, 16, 450, 164),
    "TPU v4 lite": Chip(138, 8, 614, 100), "TPU v4": Chip(275, 32, 1228, 300),
    "TPU v5 lite": Chip(197, 16, 819, 200), "TPU v5e": Chip(197, 16, 819, 200),
    "TPU v5": Chip(459, 95, 2765, 600), "TPU v5p": Chip(459, 95, 2765, 600),
    "TPU v6 lite": Chip(918, 32, 1640, 448), "TPU v6e": Chip(918, 32, 1640, 448),
    "TPU7x": Chip(2307 / 2, 96, 3690, 600),
    "NVIDIA GeForce RTX 3090": Chip(71, 24, 936, 32), "NVIDIA GeForce RTX 4090": Chip(165.2, 24, 1008, 32),
    "NVIDIA GeForce RTX 5090": Chip(209.5, 32, 1792, 64),
}  # fmt: skip

# By words in device_kind, specific ones first. Data sheet numbers with sparsity are halved.
_BY_WORDS = {
    "GB300": Chip(2500, 279, 8000, 900), "GB200": Chip(2500, 186, 8000, 900), "B300": Chip(2250, 270, 7700, 900),
    "B200": Chip(2250, 180, 7700, 900), "GH200": Chip(989.5, 96, 4000, 450),
    "H200 NVL": Chip(835.5, 141, 4800, 450), "H200": Chip(989.5, 141, 4800, 450),
    "H100 NVL": Chip(835.5, 94, 3900, 300), "H100 PCIe": Chip(756.5, 80, 2000, 64),
    "H100": Chip(989.5, 80, 3350, 450), "H20": Chip(148, 96, 4000, 450),
    "A100 40GB": Chip(312, 40, 1555, 300), "A100": Chip(312, 80, 2039, 300), "A800": Chip(312, 80, 2039, 200),
    "A40": Chip(149.7, 48, 696, 32), "A30": Chip(165, 24, 933, 32), "A10": Chip(125, 24, 600, 32),
    "L40S": Chip(362, 48, 864, 32), "L40": Chip(181, 48, 864, 32), "L4": Chip(121, 24, 300, 32),
    "MI325X": Chip(1307.4, 256, 6000, 448), "MI300X": Chip(1307.4, 192, 5300, 448), "MI210": Chip(181, 64, 1600, 150),
}  # fmt: skip
_PART_OF_A_GPU = re.compile(r"MIG|GRID|\d+[ABCQ]")


def chip_of(kind: str) -> Chip | None:
    """Return the numbers of a device kind; None for CPUs, parts of a GPU and unknown devices.

    >>> chip_of("NVIDIA A100-SXM4-40GB").memory
    40
    """
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    words = re.split(r"[^A-Za-z0-9.]+", kind)
    if any(map(_PART_OF_A_GPU.fullmatch, words)):
        return None
    return next((chip for needed, chip in _BY_WORDS.items() if set(needed.split()) <= set(words)), None)


def gpu_names() -> list[str]:
    """Return the names of known GPUs."""
    return [*_BY_WORDS, *(kind.removeprefix("NVIDIA GeForce ") for kind in _BY_KIND if kind.startswith("NVIDIA"))]


def peak_flops(device: Device) -> float | None:
    """Return the peak FLOP/s of dense bfloat16 matmuls; None if it is unknown, see `chip_of`.

    >>> from types import SimpleNamespace
    >>> peak_flops(SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3"))
    989500000000000.0
    """
    chip = chip_of(device.device_kind)
    return None if chip is None else chip.tflops * TERA


MAX_DEVICES = 512
_NETWORK_SPEED = 50.0  # GB/s per GPU between machines: one 400 Gbit/s port each
_GPUS_PER_MACHINE = 8
_CHIPS_PER_HOST = 4

# Generation -> (device kind, how many units of the number in the name make one JAX device).
_TPUS = {
    "v2": ("TPU v2", 1), "v3": ("TPU v3", 1), "v4": ("TPU v4", 2), "v5e": ("TPU v5e", 1),
    "v5litepod": ("TPU v5e", 1), "v5p": ("TPU v5p", 2), "v6e": ("TPU v6e", 1),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices of one kind.

    Attributes:
      name: as the user wrote it.
      kind: JAX's name of the device.
      chip: numbers of one device.
      devices: number of JAX devices.
      per_machine: devices of each machine.
      network: GB/s per device between machines; the same as `chip.link` within a TPU slice.
    """

    name: str
    kind: str
    chip: Chip
    devices: int
    per_machine: int
    network: float

    @property
    def is_tpu(self) -> bool:
        return self.kind.startswith("TPU")

    def __str__(self) -> str:
        machines = -(-self.devices // self.per_machine)
        return f"{self.devices} x {self.kind}, {self.chip.memory:g} GB each, on {machines} machine(s)"


def parse_topology(name: str) -> Topology:
    """Return the topology with this name.

    >>> [parse_topology(name).devices for name in ("v5p-64", "v3-32", "h200x16")]
    [32, 32, 16]
    """
    if match := re.fullmatch(r"(v\d\w*)-(\d+)", name, re.IGNORECASE):
        topology = _tpu_topology(name, match[1].lower(), int(match[2]))
    elif match := re.fullmatch(r"(\w.*?)x(\d+)", name, re.IGNORECASE):
        topology = _gpu_topology(name, match[1], int(match[2]))
    else:
        raise _unknown_topology(name)
    if not 1 <= topology.devices <= MAX_DEVICES:
        raise UserError(f"--topology {name} has {topology.devices} devices: it must have 1 to {MAX_DEVICES}.")
    return topology


def _tpu_topology(name: str, generation: str, number: int) -> Topology:
    if generation not in _TPUS:
        raise _unknown_topology(name)
    kind, cores = _TPUS[generation]
    if number % cores:
        raise UserError(f"--topology {name}: the number counts cores, two per chip of {generation}. Use an even one.")
    devices = number // cores
    if kind in ("TPU v2", "TPU v3"):
        per_machine = 2 * _CHIPS_PER_HOST
    else:  # hosts of v5e and v6e have 8 chips if one is enough, and 4 otherwise
        per_machine = devices if kind in ("TPU v5e", "TPU v6e") and devices <= 8 else _CHIPS_PER_HOST
    chip = _BY_KIND[kind]
    return Topology(name, kind, chip, devices, min(per_machine, devices), chip.link)


def _gpu_topology(name: str, model: str, devices: int) -> Topology:
    words = re.sub(r"[-_ ]+", " ", model).lower()
    known = {gpu.lower(): gpu for gpu in gpu_names()}
    if words not in known:
        raise _unknown_topology(name)
    kinds = (f"{maker} {known[words]}" for maker in ("NVIDIA", "NVIDIA GeForce"))
    kind, chip = next((kind, chip) for kind in kinds if (chip := chip_of(kind)))
    return Topology(name, kind, chip, devices, min(devices, _GPUS_PER_MACHINE), _NETWORK_SPEED)


def _unknown_topology(name: str) -> UserError:
    gpus = ", ".join(gpu.lower().replace(" ", "-") for gpu in gpu_names())
    return UserError(
        f"--topology is {name!r}: it must be a TPU slice, such as v4-32 ({', '.join(_TPUS)}), or a number of GPUs, "
        f"such as h200x8 ({gpus})."
    )
