"""Measurement tools: step times, compilation, memory, and matmul speed of the devices."""

import contextlib
import dataclasses
import itertools
import resource
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x._runtime.errors import UserError
from t5x.apps.doctor.checks import processor
from t5x.kernels.ops import Ops
from t5x.partitioning.devices import available_memory
from t5x.telemetry.devices import TERA

SECONDS, FEWEST, MOST = 10.0, 3, 200
_GIGA = 1e9


def steps_for(seconds_each: float, requested: int | None) -> int:
    """Return the number of steps to measure: the requested one, or about ten seconds' worth.

    >>> steps_for(1.0, None), steps_for(60.0, None), steps_for(0.001, None), steps_for(60.0, 7)
    (10, 3, 200, 7)
    """
    return requested or min(MOST, max(FEWEST, int(SECONDS / max(seconds_each, 1e-9))))


def step_times(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, the minimum, and the width of the central 80 % of the step times, in milliseconds."""
    low, high = np.quantile(seconds, [0.1, 0.9])
    return {
        "steps": len(seconds),
        "step_ms": 1e3 * statistics.median(seconds),
        "step_ms_min": 1e3 * min(seconds),
        "step_ms_spread": 1e3 * float(high - low),
    }


def intervals(stamps: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(stamps)]


@dataclasses.dataclass
class Compilation:
    """Observations during a compilation.

    Attributes:
      attention: the attention backends that were traced.
      cached: number of programs that came from the compilation cache.
    """

    attention: set[str] = dataclasses.field(default_factory=set)
    cached: int = 0


@contextlib.contextmanager
def watch_compilation() -> Iterator[Compilation]:
    """Record which attention backends the network calls, and whether programs came from the compilation cache."""
    seen = Compilation()

    attend = Ops.attend

    def recording_attend(self: Ops, backend: str, *args: Any) -> jax.Array:
        seen.attention.add(backend)
        return attend(self, backend, *args)

    def listen(event: str, **_: Any) -> None:
        seen.cached += event == "/jax/compilation_cache/cache_hits"

    Ops.attend = recording_attend  # type: ignore[method-assign]
    jax.monitoring.register_event_listener(listen)
    try:
        yield seen
    finally:
        Ops.attend = attend  # type: ignore[method-assign]
        jax.monitoring.unregister_event_listener(listen)


def matmul_flops(dtype: str) -> float:
    """Return the FLOP/s of all devices in a large square matmul: the best round on one, times the number of devices.

    On a CPU it is not multiplied, because one matmul already uses all cores.
    """
    on_cpu = jax.default_backend() == "cpu"
    size, rounds, repeats = (1024, 3, 2) if on_cpu else (8192, 5, 10)
    left, right = (
        jax.random.normal(jax.random.key(seed), (size, size), jnp.dtype(dtype)) for seed in range(2)
    )  # fmt: skip
    multiply = jax.jit(lambda a, b: a @ b)
    multiply(left, right).block_until_ready()
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(repeats):
            product = multiply(left, right)
        product.block_until_ready()
        best = min(best, (time.perf_counter() - began) / repeats)
    return 2 * size**3 / best * (1 if on_cpu else jax.device_count())


def peak_memory() -> dict[str, Any]:
    """Return the peak memory of a device so far; if it is not reported, that of this process."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    if known := [peak for peak in peaks if peak is not None]:
        return {"peak_memory_gb": max(known) / _GIGA, "peak_memory_of": "device"}
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"peak_memory_gb": most / _GIGA, "peak_memory_of": "process"}


def machine() -> dict[str, Any]:
    device = jax.devices()[0]
    kind = processor() if device.platform == "cpu" else device.device_kind
    return {"device": kind, "devices": jax.device_count(), "jax": jax.__version__}


def rates(flops: float, seconds: float, dtype: str) -> dict[str, float]:
    """Return the FLOP/s of a step, and its share of those of a large matmul in the same run."""
    matmul = matmul_flops(dtype)
    return {
        "step_tflop": flops / TERA,
        "tflop_per_s": flops / seconds / TERA,
        "matmul_tflop_per_s": matmul / TERA,
        "matmul_share": flops / seconds / matmul,
    }


def check_memory(needed: float, what: str) -> None:
    """Raise a UserError if less memory is free than the minimum."""
    free = available_memory()
    if free is not None and needed > free:
        raise UserError(
            f"{what} needs at least {needed / _GIGA:.1f} GB of memory, but {free / _GIGA:.1f} GB are free. Choose a "
            "smaller --size."
        )


@contextlib.contextmanager
def explain_out_of_memory(options: str) -> Iterator[None]:
    """Convert an out-of-memory error to a one-line UserError that names the options to lower."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        text = str(error)
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in text and "ut of memory" not in text:
            raise
        free = available_memory()
        known = "" if free is None else f" ({free / _GIGA:.1f} GB are free now)"
        raise UserError(f"There is too little memory{known}. Lower {options}.") from error
