"""`t5x convert`: converts any checkpoint format to ours, native T5X or Hugging Face, one array at a time."""

import contextlib
import dataclasses
import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import families, layout, paths, transfer, tree
from t5x.checkpoints.formats import LazyArray, Source, is_own_checkpoint, open_checkpoint
from t5x.checkpoints.formats.own_checkpoint import (
    HUGGINGFACE_FILES,
    check_name,
    description_files,
    write_own_checkpoint,
)
from t5x.checkpoints.model_description import describe_network
from t5x.checkpoints.remote_reading import is_checkpoint
from t5x.files import atomic
from t5x.files.disk_space import free_bytes
from t5x.files.lease import Lease
from t5x.files.local import Publication
from t5x.files.remote import RemotePath, is_remote
from t5x.files.remote_directory import RemoteDirectory, upload_directory
from t5x.network.config import FIXED_IN_T5X
from t5x.telemetry import Progress

log = logging.getLogger(__name__)

FORMATS = ("t5x", "native", "hf")
LAYERS = ("unrolled", "scanned")
DTYPES = ("float32", "bfloat16")

# Activations that readers assume if the checkpoint does not state them; shapes do not show them.
_USUAL_ACTIVATIONS = (("relu",), ("gelu", "linear"))


def convert(
    source: str | Source,
    destination: str,
    *,
    to: str,
    layers: str = "unrolled",
    dtype: str | None = None,
    overwrite: bool = False,
) -> None:
    """Convert a checkpoint.

    Args:
      source: the name of a checkpoint of any format that `t5x inspect` reads, or an opened one.
      destination: the directory to create, local or remote.
      to: `t5x` (ours), `native` (T5X version 3) or `hf` (Hugging Face).
      layers: `unrolled`; or `scanned`: stacked as in our scanned network, or for `native` as in T5X's scalable_t5.
      dtype: `float32` or `bfloat16` for the parameters; None keeps theirs.
      overwrite: replace an existing destination; it is removed only when the new one is complete.
    """
    for flag, value, choices in (("to", to, FORMATS), ("layers", layers, LAYERS), ("dtype", dtype, (None, *DTYPES))):
        if value not in choices:
            raise UserError(f"--{flag} is {value!r}; it must be one of {', '.join(filter(None, choices))}.")
    if to == "hf" and layers == "scanned":
        raise UserError("--layers scanned: Hugging Face stores one tensor per layer. Omit it, or choose another --to.")
    if is_remote(destination):
        with uploading(destination, overwrite=overwrite) as local:
            return convert(source, str(local), to=to, layers=layers, dtype=dtype)
    final = _check_destination(destination, overwrite=overwrite)
    source = source if isinstance(source, Source) else open_checkpoint(source)
    _check_apart(source, final)
    if to == "t5x":
        check_name(final, source.step or 0)
    arrays = transfer.canonical_arrays(source)
    config = transfer.config_of(source)
    _check_complete(source, config, arrays, to)
    log.info(
        "%s: %s, step %s, %s", source.path, source.format, source.step, families.name_of(config, source.model_type)
    )
    if to == "native":
        _warn_of_losses(source, config)
    arrays = _select(arrays, config, to=to, layers=layers)
    if dtype is not None:
        arrays = {name: _cast(name, array, dtype) for name, array in arrays.items()}
    _check_room(final.parent, arrays)
    target = epath.Path(atomic.unique_name(final, "new")) if final.exists() else final
    try:
        with Progress(len(arrays), unit="array", description="convert") as progress:
            arrays = {
                name: _with_progress(array, number, progress)
                for number, (name, array) in enumerate(arrays.items(), start=1)
            }
            _write(target, source, config | {"scan_layers": layers == "scanned"}, arrays, to)
        if target != final:
            _replace(final, target)
    finally:
        if target != final:
            atomic.remove_tree(target)
    log.info("wrote %s (%s, %s layers)", final, to, layers)
    return None


# --- The destination --------------------------------------------------------------------------------------------------


def _check_destination(path: str, *, overwrite: bool) -> epath.Path:
    """Return the directory to create; raise a UserError early if it cannot be created."""
    final = paths.local_path(path)
    _warn_of_leftovers(final)
    if os.path.lexists(final):
        if not overwrite:
            raise UserError(f"{final} exists already. Choose another destination, or pass --overwrite to replace it.")
        if os.path.islink(final) or not final.is_dir():
            raise UserError(f"{final} is not a directory, so --overwrite does not replace it. Remove it yourself.")
        if os.listdir(final) and not is_own_checkpoint(final):
            raise UserError(
                f"{final} is a directory, but not a checkpoint (ours, native T5X or Hugging Face), so --overwrite does "
                "not replace it. Remove it yourself, or choose another destination."
            )
    parent = _existing_parent(final)
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(
            f"{final} cannot be created: {parent} is not a directory that you may write to. Choose another destination."
        )
    return final


def _existing_parent(path: epath.Path) -> str:
    parent = os.path.dirname(path)
    while not os.path.lexists(parent):
        parent = os.path.dirname(parent)
    return parent


def _warn_of_leftovers(final: epath.Path) -> None:
    pattern = re.compile(re.escape(final.name) + r"\.(tmp|new|old)-[0-9].*")
    parent = os.path.dirname(final)
    for name in sorted(os.listdir(parent)) if os.path.isdir(parent) else ():
        if match := pattern.fullmatch(name):
            log.warning(
                "%s was left by a conversion that was killed (%s). Delete it, unless another conversion to %s is "
                "running.",
                os.path.join(parent, name),
                "the former destination" if match[1] == "old" else "incomplete",
                final.name,
            )


def _check_apart(source: Source, final: epath.Path) -> None:
    """Raise a UserError if source and destination are the same, or one contains the other."""
    start, end = os.path.join(os.path.realpath(source.path), ""), os.path.join(os.path.realpath(final), "")
    if start.startswith(end) or end.startswith(start):
        relation = "is" if start == end else "lies inside" if end.startswith(start) else "contains"
        raise UserError(f"{final} {relation} the source, {source.path}. Choose another destination.")


def _check_room(parent: epath.Path, arrays: Mapping[str, LazyArray]) -> None:
    needed = sum(array.nbytes for array in arrays.values())
    free = free_bytes(_existing_parent(parent / "x"))
    if free is not None and free < needed:
        raise UserError(
            f"There is not enough space in {parent}: the conversion needs about {paths.human_size(needed)}, "
            f"{paths.human_size(free)} are free. Free space on that disk, or choose a destination on another."
        )


def _replace(final: epath.Path, new: epath.Path) -> None:
    """Move `new` to `final` and remove the old one; if that fails, the old one stays."""
    old = atomic.unique_name(final, "old")
    try:
        os.rename(final, old)
        os.rename(new, final)
    except BaseException as error:
        if os.path.lexists(old) and not os.path.lexists(final):
            os.rename(old, final)
        if isinstance(error, OSError):
            raise UserError(f"{final} could not be replaced: {error.strerror}. It is unchanged.") from error
        raise
    atomic.sync(final.parent)
    atomic.remove_tree(old)


# --- A remote destination ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def uploading(url: str, *, overwrite: bool) -> Iterator[epath.Path]:
    """Yield a local path for a checkpoint that is uploaded to `url` if the block succeeds.

        with uploading("gs://bucket/flan", overwrite=False) as path:
            write_huggingface(path, …)

    The local path does not exist yet. See `_publish` for what is replaced, and when. Meanwhile a file UNFINISHED in the
    destination is the lease of this program. A directory with that file and without the one that identifies a
    checkpoint was left by a program that was killed: the next one removes its files.
    """
    destination = RemotePath.parse(url)
    exists = _check_remote_destination(destination, overwrite)
    with upload_directory() as directory, Lease.acquire(f"{destination.url}/{paths.UNFINISHED}", url) as lease:
        publication = dataclasses.replace(paths.CHECKPOINTS, check=lease.check)
        if not exists:
            RemoteDirectory(destination).clear(publication)  # what a killed program left
        path = epath.Path(directory) / destination.name
        yield path
        lease.check()
        _publish(path, destination, publication, overwrite=overwrite)


def _publish(path: epath.PathLike, destination: RemotePath, publication: Publication, *, overwrite: bool) -> None:
    """Copy a local checkpoint to a remote path.

    The file that makes it valid is copied last, after the sizes of all others are verified. On failure, the copied
    files are removed. An existing checkpoint is removed only when the new one is complete beside it.
    """
    exists = _check_remote_destination(destination, overwrite)
    sizes = [status.st_size for _, status in paths.walk(path)]
    final = RemoteDirectory(destination)
    target = RemoteDirectory(destination.parent) / f"{destination.name}.{paths.UNFINISHED}" if exists else final
    log.info("copying %d file(s), %s, to %s", len(sizes), paths.human_size(sum(sizes)), final)
    try:
        if exists:
            target.clear(publication)  # what a killed program left
        target.upload(path, publication)
    except BaseException:
        _try_to_clear(target, publication)
        raise
    if exists:
        try:
            publication.check()
            final.clear(publication)
            final.copy_from(target, publication)
        except UserError as error:
            raise UserError(f"{error} The new checkpoint is complete at {target}: move it.") from error
        _try_to_clear(target, publication)
    log.info("wrote %s", final)


def _check_remote_destination(path: RemotePath, overwrite: bool) -> bool:
    """Return whether a checkpoint is to be replaced; raise a UserError if something may not be replaced."""
    if "/" not in path.path.strip("/"):
        raise UserError(f"{path.url} is an entire bucket. Name a directory in it: {path.url}/NAME.")
    path.fs.invalidate_cache()
    info = path.info()
    if info is not None and info["type"] == "file":
        raise UserError(f"{path.url} is a file; choose another destination.")
    names = path.children()
    if not path.descendants() or (paths.UNFINISHED in names and not is_checkpoint(names)):
        return False
    if not overwrite:
        raise UserError(f"{path.url} exists already; choose another destination, or pass --overwrite to replace it.")
    if not is_checkpoint(names):
        raise UserError(f"{path.url} is not a checkpoint, so it is not replaced. Choose another destination.")
    return True


def _try_to_clear(directory: RemoteDirectory, publication: Publication) -> None:
    try:
        publication.check()
        directory.clear(publication)
    except UserError as error:
        log.warning("%s could not be removed; remove it by hand: %s", directory, error)


# --- Arrays -----------------------------------------------------------------------------------------------------------


def _check_complete(source: Source, config: Mapping[str, Any], arrays: Mapping[str, LazyArray], to: str) -> None:
    """Raise a UserError with a table unless the parameters are exactly those of the model.

    Additional ones are allowed if `to` is `native`, because such a checkpoint does not describe its model.
    """
    expected = families.parameters_of(config)
    selected = {n: a for n, a in arrays.items() if n.startswith(layout.PARAMS) and (n in expected or to != "native")}
    if table := tree.difference_by_name(expected, selected):
        raise UserError(
            f"{source.path} does not have the parameters of the model that it describes (expected: that model, found: "
            f"the checkpoint): {table}\nDownload it again, or use another checkpoint."
        )


def _warn_of_losses(source: Source, config: Mapping[str, Any]) -> None:
    """Warn about what a native checkpoint cannot store."""
    lost = []
    if (activations := tuple(config["mlp_activations"])) not in _USUAL_ACTIVATIONS:
        lost.append(f"mlp_activations {activations}")
    stated = {name: config.get(name, usual) for name, usual in FIXED_IN_T5X.items()}
    lost += [f"{name} {value}" for name, value in stated.items() if value not in (FIXED_IN_T5X[name], [])]
    lost += [f"the vocabulary of {feature}" for feature in sorted(source.vocabulary_files)]
    if source.inputs_bidirectional_attention:
        lost.append("inputs_bidirectional_attention (it is a prefix LM)")
    if source.template is not None:
        lost.append(f"the template of a ranker ({source.template.get('text')})")
    if source.data is not None:
        lost.append("how its data file was read")
    if lost:
        log.warning(
            "A native T5X checkpoint cannot store: %s. Keep the source, or set them in the gin file that uses the "
            "result.",
            "; ".join(lost),
        )


def _select(
    arrays: Mapping[str, LazyArray], config: Mapping[str, Any], *, to: str, layers: str
) -> dict[str, LazyArray]:
    """Return the arrays that the destination stores, in its layout."""
    selected = {n: a for n, a in arrays.items() if n.startswith((layout.PARAMS, layout.STATES, "flax_mutables/"))}
    if to == "hf":
        params = {n: a for n, a in selected.items() if n.startswith(layout.PARAMS)}
        if len(params) < len(selected):
            log.info("Omitting the optimizer state: a Hugging Face checkpoint stores only parameters")
        return params
    if layers == "unrolled":
        return selected
    if to == "t5x":
        return layout.stacked(selected)
    if not config.get("per_layer_relative_position_bias"):
        raise UserError(
            "--layers scanned --to native: T5X's network with scanned layers, scalable_t5, needs a relative position "
            "bias in every layer, as in umT5; the layers of this model share one. Omit --layers, or use --to t5x, "
            "whose scanned network can share it."
        )
    return layout.stacked(selected, heads=config["num_heads"])


def _cast(name: str, array: LazyArray, dtype: str) -> LazyArray:
    if not name.startswith(layout.PARAMS) or not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    return array.astype(jnp.dtype(dtype))


def _with_progress(array: LazyArray, number: int, progress: Progress) -> LazyArray:
    """Return the array such that reading it advances the progress bar to `number`."""

    def read() -> np.ndarray:
        value = array.read()
        progress.update(number)
        return value

    return LazyArray(array.shape, array.dtype, read)


def _write(
    target: epath.Path, source: Source, config: dict[str, Any], arrays: Mapping[str, LazyArray], to: str
) -> None:
    if to == "hf":
        from t5x.checkpoints.formats.huggingface import write_huggingface

        return write_huggingface(
            target, config, arrays, vocabulary_files=source.vocabulary_files, template=source.template,
            data=source.data, kept_files=source.huggingface_files,
        )  # fmt: skip
    step = source.step or 0
    tensors = ((name, array.read()) for name, array in arrays.items())
    if to == "native":
        from t5x.checkpoints.formats.native_t5x import write_native

        return write_native(target, step, tensors)
    try:
        description = describe_network(
            config, inputs_bidirectional_attention=source.inputs_bidirectional_attention, template=source.template,
            data=source.data,
        )  # fmt: skip
    except TypeError as error:
        raise UserError(f"{source.path} does not describe a network of this version: {error}.") from error
    if unknown := sorted(config.keys() - description["config"].keys()):
        raise UserError(
            f"{source.path} has network settings that this version does not support: {', '.join(unknown)}. Use the "
            "version that wrote it, or convert --to native, which stores no settings."
        )
    sidecars = description_files(description, source.vocabulary_files)
    sidecars |= {HUGGINGFACE_FILES + name: content for name, content in source.huggingface_files.items()}
    return write_own_checkpoint(target, step, tensors, sidecars=sidecars)
