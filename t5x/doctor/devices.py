"""Checks of the devices: found, free, fast, and how they multiply."""

import argparse
import os
import time
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from t5x.bench.measures import matmul_flops, processor
from t5x.doctor.device_files import GPU_FILES, TPU_FILES, device_files, holders
from t5x.doctor.findings import Finding, error, ok, warning
from t5x.files.disk_space import human_size
from t5x.kernels.attention_inputs import Mask
from t5x.kernels.ops import ops
from t5x.network import attend, default_dtype
from t5x.partitioning.memory import host_memory
from t5x.telemetry.devices import TERA, chip_of

_SHARE = 0.5  # of the data sheet, below which a device is reported as slow
_LIMITS = ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES", "JAX_PLATFORMS", "JAX_LOCAL_DEVICE_IDS")


def check(args: argparse.Namespace) -> Iterator[Finding]:
    """Report everything about the devices of this machine."""
    yield from holder_findings(holders(TPU_FILES), "TPU chip")
    yield from holder_findings(holders(GPU_FILES), "GPU")
    try:
        devices = jax.local_devices()
    except RuntimeError as problem:
        yield error(
            f"JAX cannot start its devices: {str(problem).splitlines()[0]}",
            "If a process above holds them, end it. Otherwise check the driver, or set JAX_PLATFORMS=cpu.",
        )
        return
    present = len(device_files(GPU_FILES)) or len(device_files(TPU_FILES))
    yield from count_findings([device.device_kind for device in devices], present, os.environ)
    yield from memory_findings(devices)
    yield from speed_findings(devices[0])
    yield from precision_findings()
    yield from attention_findings()


def holder_findings(found: Mapping[int, str], what: str) -> Iterator[Finding]:
    """Report processes that hold devices: nobody else can use a TPU chip, and a GPU has less memory."""
    for pid, command in found.items():
        message = f"Process {pid} ({command}) holds a {what}"
        fix = f"If it is left over from an earlier run, end it: kill {pid} (after 10 seconds: kill -9 {pid})."
        if what == "TPU chip":
            yield error(f"{message}: no other process can use it.", fix)
        else:
            yield warning(f"{message} and may use its memory.", fix)


def count_findings(kinds: list[str], present: int, environment: Mapping[str, str]) -> Iterator[Finding]:
    """Report the devices, and those of the machine that JAX does not use.

    Args:
      kinds: of JAX's devices in this process.
      present: number of accelerators that the operating system shows.
    """
    limits = ", ".join(f"{name}={environment[name]}" for name in _LIMITS if environment.get(name))
    if kinds[0].lower() == "cpu":
        yield ok(f"{len(kinds)} x {processor()}")
        if present:
            why = f" ({limits})" if limits else ""
            yield error(
                f"The machine has {present} GPU or TPU device(s), but JAX uses the CPU{why}.",
                "Run `pip install -e '.[gpu]'` (or '.[tpu]') in the checkout of t5x, and unset JAX_PLATFORMS.",
            )
        cores = os.cpu_count() or 1
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
        if allowed < cores:
            yield warning(
                f"This process may use {allowed} of {cores} cores.",
                "Check taskset, --cpus-per-task of SLURM and the limits of the container.",
            )
        return
    yield ok(f"{len(kinds)} x {kinds[0]}")
    if len(kinds) < present:
        why = f"because of {limits}" if limits else "and no environment variable says why"
        yield warning(f"JAX uses {len(kinds)} of {present} devices, {why}.", "Unset the variable, to use all of them.")


def memory_findings(devices: list[jax.Device]) -> Iterator[Finding]:
    stats = devices[0].memory_stats() or {}
    host = host_memory()
    known = [] if host is None else [f"{human_size(host)} of the host"]
    if "bytes_limit" in stats:
        known.insert(0, f"{human_size(stats['bytes_limit'] - stats.get('bytes_in_use', 0))} of each device")
    yield ok(f"free memory: {', '.join(known) or 'unknown'}")


def speed_findings(device: jax.Device) -> Iterator[Finding]:
    """Measure a large matmul and a copy, and compare them with the data sheet."""
    dtype = default_dtype()
    rate = matmul_flops(dtype) / jax.device_count() if device.platform != "cpu" else matmul_flops(dtype)
    size = 2**26 if device.platform == "cpu" else 2**30
    values = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    copy(values).block_until_ready()
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        copy(values).block_until_ready()
        seconds.append(time.perf_counter() - began)
    bandwidth = 2 * size / min(seconds)
    text = f"{rate / TERA:.3g} TFLOP/s in a {dtype} matmul, {bandwidth / 1e9:.4g} GB/s of memory bandwidth"
    chip = chip_of(device.device_kind)
    if chip is None:
        yield ok(text)
        return
    sheet = f"data sheet: {chip.tflops:g} TFLOP/s, {chip.bandwidth:g} GB/s"
    if rate < _SHARE * chip.tflops * TERA or bandwidth < _SHARE * chip.bandwidth * 1e9:
        yield warning(
            f"{text}: less than half of what it can do ({sheet}).",
            "Check other programs on the device, its power limit and temperature (nvidia-smi -q -d PERFORMANCE).",
        )
    else:
        yield ok(f"{text} ({sheet})")


def precision_findings() -> Iterator[Finding]:
    """Compare a float32 matmul with float64."""
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((256, 256)).astype(np.float32) for _ in range(2))
    exact = left.astype(np.float64) @ right.astype(np.float64)
    error_of = lambda made: float(np.linalg.norm(np.asarray(made, np.float64) - exact) / np.linalg.norm(exact))
    default = error_of(jnp.dot(left, right))
    highest = error_of(jnp.dot(left, right, precision="highest"))
    if default < 1e-5:
        yield ok(f"float32 matmuls are float32 (relative error {default:.1g})")
    elif highest < 1e-5:
        yield ok(
            f"float32 matmuls round their factors to fewer bits, as TPUs (bfloat16) and GPUs (TF32) do by default: "
            f"relative error {default:.1g}. That is enough for training. For float32 ({highest:.1g}), several times "
            "slower, set JAX_DEFAULT_MATMUL_PRECISION=highest"
        )
    else:
        yield warning(
            f"float32 matmuls have a relative error of {highest:.1g} even with the highest precision.",
            "Unset XLA_FLAGS; if that does not help, report it to JAX.",
        )


def attention_findings() -> Iterator[Finding]:
    """Report which attention training would use, and compare it, and on TPUs our kernel too, with the reference."""
    dtype = default_dtype()
    query, key, value = (
        jax.random.normal(jax.random.key(seed), (2, 128, 4, 64)).astype(dtype) for seed in range(3)
    )  # fmt: skip
    mask = Mask()
    fastest = ops().fastest(query, key, mask)
    expected = ops().attend_xla(
        query.astype(jnp.float32), key.astype(jnp.float32), value.astype(jnp.float32), mask, None
    )
    for name in (fastest, "pallas") if ops().hardware.platform == "tpu" else (fastest,):
        made = attend(query, key, value, mask=mask, backend=name).astype(jnp.float32)
        distance = float(jnp.linalg.norm(made - expected) / jnp.linalg.norm(expected))
        if distance > 0.02:
            yield error(
                f"Attention ({name}, {dtype}) differs from the reference by {100 * distance:.2g} %.",
                "Set network.T5Config.attention_backend = 'xla', and report it.",
            )
        elif ops().hardware.platform == "gpu" and name == "xla":
            reason = ops().refuses("pallas", query, key, mask)
            yield warning(
                f"Attention is not fused, which is several times slower: {reason}.",
                "Use bfloat16 on an NVIDIA GPU with compute capability 8.0 or higher.",
            )
        else:
            kind = {"pallas": "t5x's fused kernel", "cudnn": "cuDNN's fused kernel", "xla": "XLA"}[name]
            kind += "" if name == fastest else " on request"
            yield ok(f"attention: {kind}, within {100 * distance:.1g} % of the reference in {dtype}")
