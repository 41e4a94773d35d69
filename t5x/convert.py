"""`t5x convert`: from any checkpoint format to ours, native T5X or Hugging Face, one array at a time."""

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping

import numpy as np

from t5x.checkpoints import families, layout, paths, transfer
from t5x.checkpoints.contents import MODEL_FILE, describe_network
from t5x.checkpoints.formats import LazyArray, open_checkpoint
from t5x.errors import UserError
from t5x.telemetry import Progress

log = logging.getLogger(__name__)

FORMATS = ("t5x", "native", "hf")


def convert(source_path: str, destination: str, *, to: str, dtype: str | None = None, overwrite: bool = False) -> None:
    """Converts a checkpoint.

    Args:
      source_path: of any format that `t5x inspect` knows.
      destination: the directory to make.
      to: `t5x` (ours), `native` (T5X version 3) or `hf` (Hugging Face).
      dtype: `float32` or `bfloat16` of the parameters; None keeps what they have.
      overwrite: replace the destination where it exists; it is removed only when the new one is whole.
    """
    if to not in FORMATS:
        raise UserError(f"--to is {to!r}: it must be one of {', '.join(FORMATS)}.")
    final = paths.local_path(destination)
    if os.path.lexists(final) and not overwrite:
        raise UserError(f"{final} exists already; choose another destination, or give --overwrite to replace it.")
    source = open_checkpoint(source_path)
    step = source.step or 0
    roots = (layout.PARAMS,) if to == "hf" else (layout.PARAMS, layout.STATES)
    arrays = {n: a for n, a in transfer.canonical_arrays(source).items() if n.startswith(roots)}
    params = {n: a for n, a in arrays.items() if n.startswith(layout.PARAMS)}
    config = transfer.config_of(source)
    log.info("%s: %s, step %s, %s", source.path, source.format, source.step, families.name_of(config))
    if to == "hf" and len(arrays) < len(source.arrays):
        log.info("Hugging Face has no place for optimizer state; it is left out")
    target = final.parent / f"{final.name}.new-{os.getpid()}" if os.path.lexists(final) else final
    if to == "hf":
        from t5x.checkpoints.formats.huggingface import write_huggingface

        with Progress(len(params), unit="array", description="convert") as progress:
            write_huggingface(
                target, config, _watched(params, progress), vocabulary_files=source.vocabulary_files, dtype=dtype
            )
    elif to == "native":
        from t5x.checkpoints.formats.native import write_native

        write_native(target, step, _read_all(arrays), dtype=dtype)
    else:
        from t5x.checkpoints.streaming import write_checkpoint

        sidecars = {MODEL_FILE: (json.dumps(describe_network(config), indent=1) + "\n").encode()}
        for feature, files in source.vocabulary_files.items():
            sidecars |= {f"vocabulary/{feature}/{name}": content for name, content in files.items()}
        write_checkpoint(target, step, _cast(_read_all(arrays), dtype), sidecars=sidecars)
    if target != final:
        old = final.parent / f"{final.name}.old-{os.getpid()}"
        os.rename(final, old)
        os.rename(target, final)
        shutil.rmtree(old)
    log.info("wrote %s (%s)", final, to)


def _read_all(arrays: Mapping[str, LazyArray]) -> Iterator[tuple[str, np.ndarray]]:
    with Progress(len(arrays), unit="array", description="convert") as progress:
        for number, (name, array) in enumerate(arrays.items(), start=1):
            yield name, array.read()
            progress.update(number)


def _cast(tensors: Iterator[tuple[str, np.ndarray]], dtype: str | None) -> Iterator[tuple[str, np.ndarray]]:
    import jax.numpy as jnp

    if dtype not in (None, "float32", "bfloat16"):
        raise UserError(f"--dtype is {dtype!r}: it must be float32 or bfloat16.")
    for name, array in tensors:
        floats = name.startswith(layout.PARAMS) and dtype is not None and jnp.issubdtype(array.dtype, jnp.floating)
        yield name, array.astype(jnp.dtype(dtype)) if floats else array


def _watched(arrays: Mapping[str, LazyArray], progress: Progress) -> dict[str, LazyArray]:
    """The same arrays; reading one moves the bar."""
    done = iter(range(1, len(arrays) + 1))

    def watch(array: LazyArray) -> LazyArray:
        def read() -> np.ndarray:
            progress.update(next(done, len(arrays)))
            return array.read()

        return LazyArray(array.shape, array.dtype, read)

    return {name: watch(array) for name, array in arrays.items()}
