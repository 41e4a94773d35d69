"""Google Cloud's names of TPU slices and GPUs."""

import dataclasses
from typing import NamedTuple

from t5x._runtime.errors import UserError
from t5x.telemetry import devices

# Number of chips -> their arrangement.
_V2_GRIDS = {4: "2x2", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_2D_GRIDS = {1: "1x1", 8: "2x4", **_V2_GRIDS}
_3D_GRIDS = {
    4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8",
}  # fmt: skip


class _Tpu(NamedTuple):
    cloud: str  # prefix of gcloud's accelerator type
    cores: int  # per chip, as the number in the name counts them
    grids: dict[int, str]
    runtime: str  # image of a TPU VM
    vertex: str | None = None  # machine type of Vertex AI, with the chips per machine


_TPUS = {
    "TPU v2": _Tpu("v2", 2, _V2_GRIDS, "tpu-ubuntu2204-base"),
    "TPU v3": _Tpu("v3", 2, _V2_GRIDS, "tpu-ubuntu2204-base"),
    "TPU v4": _Tpu("v4", 2, _3D_GRIDS, "tpu-ubuntu2204-base"),
    "TPU v5e": _Tpu("v5litepod", 1, _2D_GRIDS, "v2-alpha-tpuv5-lite", "ct5lp-hightpu-{}t"),
    "TPU v5p": _Tpu("v5p", 2, _3D_GRIDS, "v2-alpha-tpuv5"),
    "TPU v6e": _Tpu("v6e", 1, _2D_GRIDS, "v2-alpha-tpuv6e", "ct6e-standard-{}t"),
}


class _Gpu(NamedTuple):
    vertex: str  # accelerator type of Vertex AI
    machines: dict[int, str]  # machine types of Compute Engine, by number of GPUs


_GPUS = {
    "NVIDIA L4": _Gpu(
        "NVIDIA_L4", {1: "g2-standard-12", 2: "g2-standard-24", 4: "g2-standard-48", 8: "g2-standard-96"}
    ),
    "NVIDIA A100 40GB": _Gpu("NVIDIA_TESLA_A100", {n: f"a2-highgpu-{n}g" for n in (1, 2, 4, 8)}),
    "NVIDIA A100": _Gpu("NVIDIA_A100_80GB", {n: f"a2-ultragpu-{n}g" for n in (1, 2, 4, 8)}),
    "NVIDIA H100": _Gpu("NVIDIA_H100_80GB", {n: f"a3-highgpu-{n}g" for n in (1, 2, 4, 8)}),
    "NVIDIA H200": _Gpu("NVIDIA_H200_141GB", {8: "a3-ultragpu-8g"}),
    "NVIDIA B200": _Gpu("NVIDIA_B200", {8: "a4-highgpu-8g"}),
}


@dataclasses.dataclass(frozen=True)
class Accelerators:
    """The accelerators of a job.

    Attributes:
      name: as the user wrote it, `v5e-16` or `h100x16`.
      machines: number of machines, one process each.
      per_machine: chips or GPUs of each machine.
      tpu, gpu: the cloud's names for this kind; one of the two is None.
      grid: arrangement of a TPU slice, such as `4x4`; empty for GPUs.
    """

    name: str
    machines: int
    per_machine: int
    tpu: _Tpu | None = None
    gpu: _Gpu | None = None
    grid: str = ""

    @property
    def cloud_type(self) -> str:
        """gcloud's accelerator type of a TPU slice."""
        assert self.tpu is not None
        return f"{self.tpu.cloud}-{self.name.rpartition('-')[2]}"


def parse(name: str) -> Accelerators:
    """Return the accelerators with this name, as `t5x plan --topology` takes it.

    >>> slice_ = parse("v5p-64")
    >>> slice_.machines, slice_.per_machine, slice_.grid, slice_.cloud_type
    (8, 4, '2x4x4', 'v5p-64')
    """
    topology = devices.parse_topology(name)
    if not topology.is_tpu:
        return _gpus(name, topology)
    tpu = _TPUS[topology.kind]
    chips, machines = int(name.rpartition("-")[2]) // tpu.cores, topology.devices // topology.per_machine
    if chips not in tpu.grids:
        sizes = ", ".join(str(size * tpu.cores) for size in sorted(tpu.grids))
        raise UserError(f"--topology {name}: there is no such slice. Sizes of {name.partition('-')[0]}: {sizes}.")
    return Accelerators(name, machines, chips // machines, tpu=tpu, grid=tpu.grids[chips])


def _gpus(name: str, topology: devices.Topology) -> Accelerators:
    if topology.kind not in _GPUS:
        known = ", ".join(kind.removeprefix("NVIDIA ").lower().replace(" ", "-") for kind in _GPUS)
        raise UserError(f"--topology {name}: `t5x launch` knows these GPUs of clouds: {known}. Example: h100x8.")
    if topology.devices % topology.per_machine:
        raise UserError(f"--topology {name}: several machines have {topology.per_machine} GPUs each. Use a multiple.")
    return Accelerators(name, topology.devices // topology.per_machine, topology.per_machine, gpu=_GPUS[topology.kind])
