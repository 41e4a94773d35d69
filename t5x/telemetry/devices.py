"""Data sheet numbers of devices: bfloat16 peak, memory, bandwidths."""

import re
from typing import NamedTuple, Protocol

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
