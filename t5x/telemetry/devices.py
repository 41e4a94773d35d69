"""How fast a device could be: dense bfloat16 products, by the makers' data sheets."""

import re
from typing import Protocol

TERA = 1e12


class Device(Protocol):
    """What is needed of a `jax.Device`."""

    device_kind: str


# By JAX's device_kind, TFLOP/s of one JAX device. That is a chip, but half a chip of TPU v2, v3 and 7x.
_EXACT = {
    "TPU v2": 46 / 2,
    "TPU v3": 123 / 2,
    "TPU v4 lite": 138,
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5e": 197,
    "TPU v5": 459,
    "TPU v5p": 459,
    "TPU v6 lite": 918,
    "TPU v6e": 918,
    "TPU7x": 2307 / 2,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA GeForce RTX 4090": 165.2,
    "NVIDIA GeForce RTX 5090": 209.5,
}

# By words of device_kind, the more special first; data sheets that give the rate with sparsity are halved.
_BY_WORDS = [
    (("GB300",), 2500),
    (("GB200",), 2500),
    (("B300",), 2250),
    (("B200",), 2250),
    (("GH200",), 989.5),
    (("H200", "NVL"), 835.5),
    (("H200",), 989.5),
    (("H100", "NVL"), 835.5),
    (("H100", "PCIe"), 756.5),
    (("H100",), 989.5),
    (("H20",), 148),
    (("A100",), 312),
    (("A800",), 312),
    (("A40",), 149.7),
    (("A30",), 165),
    (("A10",), 125),
    (("L40S",), 362),
    (("L40",), 181),
    (("L4",), 121),
    (("MI325X",), 1307.4),
    (("MI300X",), 1307.4),
    (("MI210",), 181),
]
_PART_OF_A_GPU = re.compile(r"MIG|GRID|\d+[ABCQ]")


def peak_flops(device: Device) -> float | None:
    """FLOP/s of dense bfloat16 products at best; None for CPUs, parts of a GPU and devices that are not in the table.

    >>> from types import SimpleNamespace
    >>> peak_flops(SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3"))
    989500000000000.0
    """
    kind = device.device_kind
    if kind in _EXACT:
        return _EXACT[kind] * TERA
    words = re.split(r"[^A-Za-z0-9.]+", kind)
    if any(_PART_OF_A_GPU.fullmatch(word) for word in words):
        return None
    return next((peak * TERA for needed, peak in _BY_WORDS if set(needed) <= set(words)), None)
