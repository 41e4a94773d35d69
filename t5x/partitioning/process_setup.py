"""What every process sets up before it uses devices: the compilation cache, and its name in the log."""

import hashlib
import logging
import os
import platform

import jax

from t5x._runtime import startup
from t5x.files import cache_directory
from t5x.partitioning import distributed


def enable_compilation_cache() -> None:
    """Keep compiled programs between runs, unless the user set JAX_COMPILATION_CACHE_DIR.

    On GPUs a recompiled program may round differently, because matmul algorithms are autotuned.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        # A program compiled for one processor may not run on another that shares the home directory.
        machine = hashlib.sha256("".join(_describe_processor()).encode()).hexdigest()[:12]
        jax.config.update("jax_compilation_cache_dir", os.path.join(cache_directory.root(), "xla", machine))


def _describe_processor() -> list[str]:
    try:
        with open("/proc/cpuinfo") as file:
            lines = {line for line in file if line.startswith(("model name", "flags", "Features", "CPU part"))}
    except OSError:
        lines = set()
    return [platform.machine(), *sorted(lines)]


def name_process() -> None:
    """Make all processes but the first log only warnings and errors (or all, if debugging), with their index."""
    if distributed.is_leader():
        return
    logger = logging.getLogger("t5x")
    logger.setLevel(max(logger.level, logging.WARNING) if logger.level != logging.DEBUG else logging.DEBUG)
    for handler in logger.handlers:
        handler.setFormatter(startup.MessageFormatter(f"[process {distributed.process_index()}] "))
