"""Check disks, remote directories and the compilation cache."""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator

from t5x._runtime.errors import UserError
from t5x.apps.doctor import Finding, error, ok, warning
from t5x.files.directory import open_directory
from t5x.files.disk_space import free_bytes, human_size
from t5x.files.remote import is_remote

_BYTES = 2**27
_MIN_SPEED = 50e6  # bytes/s
_MIN_FREE = 20e9  # bytes: a few checkpoints of a large model
_PROBE = ".t5x-doctor"


def check(args: argparse.Namespace) -> Iterator[Finding]:
    """Report space and speed of `--path`, where runs will be written, and the compilation cache."""
    yield from remote_findings(args.path) if is_remote(args.path) else disk_findings(args.path)
    yield from cache_findings()


def disk_findings(directory: str, size: int = _BYTES) -> Iterator[Finding]:
    """Write, flush and remove a file."""
    name = os.path.abspath(directory)
    try:
        free = free_bytes(name)
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=name) as file:
            file.write(os.urandom(2**20) * (size // 2**20))
            file.flush()
            os.fsync(file.fileno())
            speed = size / (time.perf_counter() - began)
    except OSError as problem:
        yield error(f"{name} cannot be written: {problem.strerror}.", "Choose another directory with --path.")
        return
    text = f"{name}: {'' if free is None else human_size(free) + ' free, '}{human_size(speed)}/s written and flushed"
    if free is not None and free < _MIN_FREE:
        yield warning(f"{text}: little space.", "Free some, or keep fewer checkpoints (SaveCheckpointConfig.keep).")
    elif speed < _MIN_SPEED:
        yield warning(f"{text}: checkpoints of large models take long.", "Use a local SSD, or gs:// or s3://.")
    else:
        yield ok(text)


def remote_findings(url: str) -> Iterator[Finding]:
    """Write, read and remove an object."""
    content = os.urandom(2**20)
    began = time.perf_counter()
    try:
        directory = open_directory(url)
        directory.check_writable()
        directory.write_bytes(_PROBE, content)
        same = directory.read_bytes(_PROBE) == content
        directory.remove(_PROBE)
    except (UserError, OSError) as problem:
        yield error(f"{url} cannot be used: {problem}", "Check the name, the credentials and the network.")
        return
    seconds = time.perf_counter() - began
    if same:
        yield ok(f"{url}: 1 MB written, read and removed in {seconds:.2g} s")
    else:
        yield error(f"{url} returned other bytes than were written.", "Do not store checkpoints there.")


def cache_findings() -> Iterator[Finding]:
    """Report where compiled programs are kept."""
    import jax

    from t5x.partitioning import multiprocess

    multiprocess.enable_compilation_cache()
    directory = jax.config.values["jax_compilation_cache_dir"]
    if not jax.config.values["jax_enable_compilation_cache"]:
        yield warning("The compilation cache is disabled.", "Unset JAX_ENABLE_COMPILATION_CACHE.")
    elif is_remote(directory):
        yield ok(f"compilation cache: {directory}")
    else:
        try:
            os.makedirs(directory, exist_ok=True)
            sizes = [entry.stat().st_size for entry in os.scandir(directory) if entry.is_file()]
            with tempfile.TemporaryFile(dir=directory):
                yield ok(f"compilation cache: {directory}, {len(sizes)} files, {human_size(sum(sizes))}")
        except OSError as problem:
            yield warning(
                f"The compilation cache {directory} cannot be written ({problem.strerror}): programs compile again.",
                "Set JAX_COMPILATION_CACHE_DIR to a writable directory.",
            )
