"""Peak performance of devices: dense bfloat16 matmuls, from the vendors' data sheets."""

import re
from typing import Protocol

TERA = 1e12


class Device(Protocol):
    """The part of `jax.Device` that is needed here."""

    device_kind: str


# TFLOP/s by JAX's device_kind. A device is a chip, except for TPU v2, v3 and 7x, where it is half a chip.
_BY_KIND = {
    "TPU v2": 46 / 2, "TPU v3": 123 / 2, "TPU v4 lite": 138, "TPU v4": 275, "TPU v5 lite": 197, "TPU v5e": 197,
    "TPU v5": 459, "TPU v5p": 459, "TPU v6 lite": 918, "TPU v6e": 918, "TPU7x": 2307 / 2,
    "NVIDIA GeForce RTX 3090": 71, "NVIDIA GeForce RTX 4090": 165.2, "NVIDIA GeForce RTX 5090": 209.5,
}  # fmt: skip

# TFLOP/s by words in device_kind, specific ones first. Data sheet numbers with sparsity are halved.
_BY_WORDS = {
    "GB300": 2500, "GB200": 2500, "B300": 2250, "B200": 2250, "GH200": 989.5,
    "H200 NVL": 835.5, "H200": 989.5, "H100 NVL": 835.5, "H100 PCIe": 756.5, "H100": 989.5, "H20": 148,
    "A100": 312, "A800": 312, "A40": 149.7, "A30": 165, "A10": 125, "L40S": 362, "L40": 181, "L4": 121,
    "MI325X": 1307.4, "MI300X": 1307.4, "MI210": 181,
}  # fmt: skip
_PART_OF_A_GPU = re.compile(r"MIG|GRID|\d+[ABCQ]")


def peak_flops(device: Device) -> float | None:
    """Return the peak FLOP/s of dense bfloat16 matmuls; None for CPUs, parts of a GPU and unknown devices.

    >>> from types import SimpleNamespace
    >>> peak_flops(SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3"))
    989500000000000.0
    """
    kind = device.device_kind
    if kind in _BY_KIND:
        return _BY_KIND[kind] * TERA
    words = re.split(r"[^A-Za-z0-9.]+", kind)
    if any(map(_PART_OF_A_GPU.fullmatch, words)):
        return None
    return next((peak * TERA for needed, peak in _BY_WORDS.items() if set(needed.split()) <= set(words)), None)
