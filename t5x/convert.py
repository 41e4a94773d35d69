"""`t5x convert`: converts any checkpoint format to ours, native T5X or Hugging Face, one array at a time."""

import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from etils import epath

from t5x.checkpoints import families, layout, paths, remote_writing, streaming, transfer, tree
from t5x.checkpoints.formats import LazyArray, Source, is_own_checkpoint, open_checkpoint
from t5x.checkpoints.model_description import MODEL_FILE, describe_network
from t5x.errors import UserError
from t5x.files import atomic, remote
from t5x.files.disk_space import free_bytes
from t5x.telemetry import Progress

log = logging.getLogger(__name__)

FORMATS = ("t5x", "native", "hf")
LAYERS = ("unrolled", "scanned")
DTYPES = ("float32", "bfloat16")

# Activations that readers assume if the checkpoint does not state them; shapes do not show them.
_USUAL_ACTIVATIONS = (("relu",), ("gelu", "linear"))


def convert(
    source_path: str,
    destination: str,
    *,
    to: str,
    layers: str = "unrolled",
    dtype: str | None = None,
    overwrite: bool = False,
) -> None:
    """Convert a checkpoint.

    Args:
      source_path: a checkpoint of any format that `t5x inspect` reads.
      destination: the directory to create, local or remote.
      to: `t5x` (ours), `native` (T5X version 3) or `hf` (Hugging Face).
      layers: `unrolled`; or `scanned`: stacked as in our scanned network, or for `native` as in T5X's scalable_t5.
      dtype: `float32` or `bfloat16` for the parameters; None keeps theirs.
      overwrite: replace an existing destination; it is removed only when the new one is complete.
    """
    _check_choice("--to", to, FORMATS)
    _check_choice("--layers", layers, LAYERS)
    if dtype is not None:
        _check_choice("--dtype", dtype, DTYPES)
    if to == "hf" and layers == "scanned":
        raise UserError(
            "--layers scanned: Hugging Face has one tensor a layer; leave the flag out, or choose another --to."
        )
    if remote.is_remote(destination):
        with remote_writing.writing(destination, overwrite=overwrite) as local:
            return convert(source_path, str(local), to=to, layers=layers, dtype=dtype)
    final = _destination(destination, overwrite=overwrite)
    source = open_checkpoint(source_path)
    _check_apart(source, final)
    if to == "t5x":
        streaming.check_name(final, source.step or 0)
    arrays = transfer.canonical_arrays(source)
    config = _config(source)
    _check_whole(source, config, arrays, to)
    name = families.name_of(config, source.model_type)
    log.info("%s: %s, step %s, %s", source.path, source.format, source.step, name)
    if to == "native":
        _mention_losses(source, config)
    arrays = _arranged(arrays, config, to=to, layers=layers)
    _check_room(final.parent, arrays, dtype)
    target = epath.Path(atomic.unique_name(final, "new")) if final.exists() else final
    try:
        with Progress(len(arrays), unit="array", description="convert") as progress:
            _write(target, source, config | {"scan_layers": layers == "scanned"}, _watched(arrays, progress), to, dtype)
        if target != final:
            _replace(final, target)
    finally:
        if target != final:
            atomic.remove_tree(target)
    log.info("wrote %s (%s, %s layers)", final, to, layers)
    return None


def _check_choice(flag: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(f"{flag} is {value!r}: it must be one of {', '.join(known)}.")


# --- The destination --------------------------------------------------------------------------------------------------


def _destination(path: str, *, overwrite: bool) -> epath.Path:
    """Return the directory to create; raise a UserError early if it cannot be created."""
    final = paths.local_path(path)
    _mention_leftovers(final)
    if os.path.lexists(final):
        if not overwrite:
            raise UserError(f"{final} exists already; choose another destination, or give --overwrite to replace it.")
        if os.path.islink(final) or not final.is_dir():
            raise UserError(f"{final} is not a directory, so --overwrite does not replace it. Remove it yourself.")
        if os.listdir(final) and not is_own_checkpoint(final):
            raise UserError(
                f"{final} is a directory, but not of a checkpoint (ours, native T5X or Hugging Face), so --overwrite "
                "does not replace it. Remove it yourself, or choose another destination."
            )
    above = _existing_parent(final)
    if not os.path.isdir(above) or not os.access(above, os.W_OK | os.X_OK):
        raise UserError(f"{final} cannot be made: {above} is not a directory that you may write to. Choose another.")
    return final


def _existing_parent(path: epath.Path) -> str:
    above = os.path.dirname(path)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    return above


def _mention_leftovers(final: epath.Path) -> None:
    pattern = re.compile(re.escape(final.name) + r"\.(tmp|new|old)-[0-9].*")
    parent = os.path.dirname(final)
    for name in sorted(os.listdir(parent)) if os.path.isdir(parent) else ():
        if match := pattern.fullmatch(name):
            what = "the former destination" if match[1] == "old" else "unfinished"
            log.warning(
                "%s was left by a conversion that was killed (%s). Delete it, unless another one to %s is running.",
                os.path.join(parent, name),
                what,
                final.name,
            )


def _check_apart(source: Source, final: epath.Path) -> None:
    """Raise a UserError if source and destination are the same, or one contains the other."""
    start, end = os.path.realpath(source.path), os.path.realpath(final)
    if start == end:
        raise UserError(f"{final} is the source itself. Choose another destination.")
    if end.startswith(os.path.join(start, "")):
        raise UserError(f"{final} lies inside the source, {source.path}. Choose a destination outside of it.")
    if start.startswith(os.path.join(end, "")):
        raise UserError(
            f"{final} holds the source, {source.path}, so it cannot be replaced. Choose another destination."
        )


def _check_room(parent: epath.Path, arrays: Mapping[str, LazyArray], dtype: str | None) -> None:
    width = {"float32": 4, "bfloat16": 2}.get(dtype)
    sizes = (a.size * (width if width and n.startswith(layout.PARAMS) else a.dtype.itemsize) for n, a in arrays.items())
    needed = sum(sizes)
    free = free_bytes(_existing_parent(parent / "x"))
    if free is not None and free < needed:
        raise UserError(
            f"There is no room for the conversion in {parent}: it needs about {paths.human_size(needed)}, "
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
            raise UserError(f"{final} could not be replaced: {error.strerror}. It is as it was.") from error
        raise
    atomic.sync(final.parent)
    atomic.remove_tree(old)


# --- Writing ----------------------------------------------------------------------------------------------------------


def _config(source: Source) -> dict[str, Any]:
    """Return the network's configuration; raise a UserError if the stated sizes contradict the arrays."""
    try:
        return transfer.config_of(source)
    except UserError as error:
        raise UserError(f"{source.path} cannot be converted. {error}") from error


def _check_whole(source: Source, config: Mapping[str, Any], arrays: Mapping[str, LazyArray], to: str) -> None:
    """Raise a UserError with a table unless the parameters are exactly those of the model.

    Additional ones are allowed if `to` is `native`, because such a checkpoint does not describe its model.
    """
    expected = families.parameters_of(config)
    found = {n: a for n, a in arrays.items() if n.startswith(layout.PARAMS) and (n in expected or to != "native")}
    if table := tree.difference(tree.nest(expected), tree.nest(found)):
        raise UserError(
            f"{source.path} does not hold the parameters of the model that it describes (expected: that model, found: "
            f"the checkpoint): {table}\nFetch it again, or take another checkpoint."
        )


def _mention_losses(source: Source, config: Mapping[str, Any]) -> None:
    """Warn about what a native checkpoint cannot store."""
    lost = []
    if (activations := tuple(config["mlp_activations"])) not in _USUAL_ACTIVATIONS:
        lost.append(f"mlp_activations {activations}")
    lost += [f"the vocabulary of {feature}" for feature in sorted(source.vocabulary_files)]
    if source.inputs_bidirectional_attention:
        lost.append("inputs_bidirectional_attention (it is a prefix LM)")
    if source.template is not None:
        lost.append(f"the template of a ranker ({source.template.get('text')})")
    if lost:
        log.warning(
            "A native T5X checkpoint has no place for: %s. Keep the source, or state them where the result is used (in "
            "a gin file).",
            "; ".join(lost),
        )


def _arranged(
    arrays: Mapping[str, LazyArray], config: Mapping[str, Any], *, to: str, layers: str
) -> dict[str, LazyArray]:
    """Return the arrays that the destination stores, in its layout."""
    kept = {n: a for n, a in arrays.items() if n.startswith((layout.PARAMS, layout.STATES, "flax_mutables/"))}
    if to == "hf":
        params = {n: a for n, a in kept.items() if n.startswith(layout.PARAMS)}
        if len(params) < len(kept):
            log.info("Hugging Face has a place for parameters only; optimizer state and the like are left out")
        return params
    if layers == "unrolled":
        return kept
    if to == "t5x":
        return layout.stacked(kept)
    if not config.get("per_layer_relative_position_bias"):
        raise UserError(
            "--layers scanned --to native: T5X's network with scanned layers, scalable_t5, needs a table of relative "
            "positions in every layer, as umT5 has; the layers of this model share one. Leave --layers out, or write "
            "ours (--to t5x), whose scanned network can share it."
        )
    return layout.stacked(kept, heads=config["num_heads"])


def _write(
    target: epath.Path, source: Source, config: dict[str, Any], arrays: dict[str, LazyArray], to: str, dtype: str | None
) -> None:
    step = source.step or 0
    if to == "hf":
        from t5x.checkpoints.formats.huggingface import write_huggingface

        return write_huggingface(
            target, config, arrays, vocabulary_files=source.vocabulary_files, template=source.template, dtype=dtype
        )
    tensors = ((name, array.read()) for name, array in arrays.items())
    if to == "native":
        from t5x.checkpoints.formats.native_t5x import write_native

        return write_native(target, step, tensors, dtype=dtype)
    try:
        described = describe_network(
            config, inputs_bidirectional_attention=source.inputs_bidirectional_attention, template=source.template
        )
    except TypeError as error:
        raise UserError(f"{source.path} does not describe a network of this version: {error}.") from error
    if unknown := sorted(config.keys() - described["config"].keys()):
        raise UserError(
            f"{source.path} has settings of a network that this version does not know: {', '.join(unknown)}. Use the "
            "version that wrote it, or convert --to native, which keeps no settings."
        )
    sidecars = {MODEL_FILE: (json.dumps(described, indent=1) + "\n").encode()}
    for feature, files in source.vocabulary_files.items():
        sidecars |= {f"vocabulary/{feature}/{name}": content for name, content in files.items()}
    return streaming.write_checkpoint(target, step, _cast(tensors, dtype), sidecars=sidecars)


def _cast(tensors: Iterator[tuple[str, np.ndarray]], dtype: str | None) -> Iterator[tuple[str, np.ndarray]]:
    import jax.numpy as jnp

    for name, array in tensors:
        floats = name.startswith(layout.PARAMS) and dtype is not None and jnp.issubdtype(array.dtype, jnp.floating)
        yield name, array.astype(jnp.dtype(dtype), copy=False) if floats else array
        del array


def _watched(arrays: Mapping[str, LazyArray], progress: Progress) -> dict[str, LazyArray]:
    """Return the arrays wrapped such that reading one advances the progress bar."""
    done = iter(range(1, len(arrays) + 1))

    def watch(array: LazyArray) -> LazyArray:
        def read() -> np.ndarray:
            value = array.read()
            progress.update(next(done, len(arrays)))
            return value

        return LazyArray(array.shape, array.dtype, read)

    return {name: watch(array) for name, array in arrays.items()}
