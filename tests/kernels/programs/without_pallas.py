"""Train, score and decode in a JAX that lacks a module: `without_pallas.py [MODULE]`.

First a tiny T5 on the CPU. Then, only traced, a layer of a larger one for a simulated H200, whose kernels are counted.
Prints JSON.
"""

# ruff: noqa: E402

import dataclasses
import importlib.abc
import json
import logging
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Blocker(importlib.abc.MetaPathFinder):
    """Makes a module and its submodules unavailable, as in a JAX that has removed them."""

    def __init__(self, name: str):
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name == self.name or name.startswith(f"{self.name}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if len(sys.argv) > 1:
    sys.meta_path.insert(0, Blocker(sys.argv[1]))

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.bench.workload import SIZES, Workload
from t5x.kernels.gpu_ops import GpuOps
from t5x.partitioning import devices
from t5x.partitioning.multiprocess import enable_compilation_cache

H200 = SimpleNamespace(
    platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0", client=SimpleNamespace(platform_version="cuda")
)
messages: list[str] = []


class Recorder(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            messages.append(record.getMessage())


def programs(work: Workload) -> dict[str, Callable[[Any], Any]]:
    """Return a function of the parameters for each kind of work."""
    model, batch = work.model, next(work.batches())
    return {
        "train": jax.grad(lambda params: model.loss_fn(params, batch)[0]),
        "score": lambda params: model.score_batch(params, batch),
        "decode": lambda params: model.predict_batch(params, batch),
    }


def is_finite(result: Any) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(result))


def count_kernels(function: Callable[[Any], Any], params: Any) -> int:
    return str(jax.make_jaxpr(function)(params)).count("pallas_call[")


def main() -> None:
    logging.getLogger().addHandler(Recorder())
    enable_compilation_cache()
    tiny = Workload(size="tiny", batch=2, inputs=16, targets=4)
    params = jax.tree.map(lambda leaf: np.full(leaf.shape, 0.01, leaf.dtype), tiny.layout.abstract.params)
    finite = {name: is_finite(jax.jit(function)(params)) for name, function in programs(tiny).items()}
    on_cpu = list(messages)
    SIZES["layer"] = dataclasses.replace(SIZES["small"], num_encoder_layers=1, num_decoder_layers=1)
    large = Workload(size="layer", batch=16, inputs=128, targets=128, dtype="bfloat16")
    params = large.layout.abstract.params
    devices.device = lambda: H200
    GpuOps.attend_cudnn = GpuOps.attend_xla  # JAX traces cuDNN's only where cuDNN is
    kernels = {name: count_kernels(function, params) for name, function in programs(large).items()}
    print(json.dumps({"finite": finite, "on_cpu": on_cpu, "kernels": kernels, "messages": messages}))


if __name__ == "__main__":
    main()
