"""Names of device topologies: `v4-32`, `v5e-16`, `h200x8`."""

import dataclasses
import re

from t5x.errors import UserError
from t5x.telemetry.devices import Chip, chip_of, gpu_names

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
        topology = _tpu(name, match[1].lower(), int(match[2]))
    elif match := re.fullmatch(r"(\w.*?)x(\d+)", name, re.IGNORECASE):
        topology = _gpu(name, match[1], int(match[2]))
    else:
        raise _unknown(name)
    if not 1 <= topology.devices <= MAX_DEVICES:
        raise UserError(f"--topology {name} has {topology.devices} devices: it must have 1 to {MAX_DEVICES}.")
    return topology


def _tpu(name: str, generation: str, number: int) -> Topology:
    if generation not in _TPUS:
        raise _unknown(name)
    kind, cores = _TPUS[generation]
    if (chip := chip_of(kind)) is None:
        raise _unknown(name)
    if number % cores:
        raise UserError(f"--topology {name}: the number counts cores, two per chip of {generation}. Use an even one.")
    devices = number // cores
    if kind in ("TPU v2", "TPU v3"):
        per_machine = 2 * _CHIPS_PER_HOST
    else:  # hosts of v5e and v6e have 8 chips if one is enough, and 4 otherwise
        per_machine = devices if kind in ("TPU v5e", "TPU v6e") and devices <= 8 else _CHIPS_PER_HOST
    return Topology(name, kind, chip, devices, min(per_machine, devices), chip.link)


def _gpu(name: str, model: str, devices: int) -> Topology:
    words = re.sub(r"[-_ ]+", " ", model).lower()
    known = {gpu.lower(): gpu for gpu in gpu_names()}
    if words not in known:
        raise _unknown(name)
    kinds = (f"{maker} {known[words]}" for maker in ("NVIDIA", "NVIDIA GeForce"))
    kind, chip = next((kind, chip) for kind in kinds if (chip := chip_of(kind)))
    return Topology(name, kind, chip, devices, min(devices, _GPUS_PER_MACHINE), _NETWORK_SPEED)


def _unknown(name: str) -> UserError:
    gpus = ", ".join(gpu.lower().replace(" ", "-") for gpu in gpu_names())
    return UserError(
        f"--topology is {name!r}: it must be a TPU slice, such as v4-32 ({', '.join(_TPUS)}), or a number of GPUs, "
        f"such as h200x8 ({gpus})."
    )
