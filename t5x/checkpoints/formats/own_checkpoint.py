"""Our own checkpoints as a `Source`, and written array by array from any other.

`CheckpointStore.save` writes the same format, but needs the whole tree at once.
"""

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import array_reader, array_writer, manifest, paths
from t5x.checkpoints.formats.native_t5x import check_step
from t5x.checkpoints.formats.source import KEPT_FILES, Source
from t5x.configuration.names import current_name
from t5x.files.untrusted import parse_json

MODEL_FILE = "model.json"
HUGGINGFACE_FILES = "huggingface/"  # see `Source.huggingface_files`
_OPTIONAL = {"inputs_bidirectional_attention": bool, "template": dict, "data": dict}
_FIELDS = {"model": str, "network": str, "config": dict} | _OPTIONAL


def read_own_checkpoint(path: epath.PathLike) -> Source:
    """Open a checkpoint that this program wrote. It must have been verified."""
    path = paths.location(path)
    content = manifest.read(path)
    description = read_description(path) if MODEL_FILE in content.files else {}
    return Source(
        format="t5x",
        path=path,
        step=check_step(path, content.step),
        arrays=array_reader.StoredArrays(f"{path}/{paths.STATE}").lazy_arrays(),
        network=description.get("network"),
        config=description.get("config"),
        vocabulary_files=read_vocabulary_files(path),
        inputs_bidirectional_attention=bool(description.get("inputs_bidirectional_attention")),
        template=description.get("template") or None,
        data=description.get("data") or None,
        huggingface_files={
            name: manifest.read_file(path, stored)
            for name in KEPT_FILES
            if (stored := HUGGINGFACE_FILES + name) in content.files
        },
    )


def read_vocabulary_files(path: epath.PathLike) -> dict[str, dict[str, bytes]]:
    """Read the vocabularies of a checkpoint: {feature: {file name: content}}.

    Only files that the manifest lists are read: others in the same directory may be links to anywhere.
    """
    vocabularies: dict[str, dict[str, bytes]] = {}
    for name in manifest.read(path).files:
        match name.split("/"):
            case ["vocabulary", feature, file]:
                vocabularies.setdefault(feature, {})[file] = manifest.read_file(path, name)
    return vocabularies


def read_description(path: epath.PathLike) -> dict[str, Any]:
    """Read model.json: `model`, `network` (today's names of classes), `config` and optional fields; see `describe`."""
    try:
        description = parse_json(manifest.read_file(path, MODEL_FILE))
        if not isinstance(description, dict):
            raise ValueError("it is not a JSON object")
        for field, kind in _FIELDS.items():
            value = description.get(field)
            if value is None and field not in _OPTIONAL:
                raise ValueError(f"it has no field {field!r}")
            if value is not None and not isinstance(value, kind):
                raise ValueError(f"its field {field!r} is {str(value)[:80]!r} instead of a {kind.__name__}")
        if (axis := description["config"].get("param_scan_axis", 1)) not in (0, 1):
            raise ValueError(f"its param_scan_axis is {str(axis)[:80]!r}, which is neither 0 nor 1")
    except ValueError as error:
        raise manifest.DamagedCheckpoint(path, f"{MODEL_FILE} does not describe a network: {error}") from error
    return description | {field: current_name(description[field]) for field in ("model", "network")}


def description_files(
    description: Mapping[str, Any], vocabulary_files: Mapping[str, Mapping[str, bytes]]
) -> dict[str, bytes]:
    """Return model.json and the vocabularies (see `read_vocabulary_files`), by their path in a checkpoint."""
    files = {MODEL_FILE: (json.dumps(description, indent=1) + "\n").encode()}
    for feature, contents in vocabulary_files.items():
        files |= {f"vocabulary/{feature}/{name}": content for name, content in contents.items()}
    return files


def write_own_checkpoint(
    path: epath.PathLike, step: int, tensors: Iterable[tuple[str, np.ndarray]], *, sidecars: Mapping[str, bytes]
) -> None:
    """Write the complete directory `path`, or nothing.

    Args:
      path: a checkpoint directory that does not exist yet. If its name is checkpoint_<number>, that must be the step.
      step: the training step.
      tensors: (name, array), one at a time: `target/…` and optionally `state/param_states/…`.
      sidecars: {name: content} of the files beside the arrays.
    """
    check_name(paths.local_path(path), step)
    with paths.new_checkpoint(path) as directory:
        (directory / paths.STATE).mkdir()
        array_writer.write_one_by_one(
            directory / paths.STATE, itertools.chain(tensors, [("state/step", np.asarray(step, np.int32))])
        )
        for name, content in sidecars.items():
            paths.write_file(directory / name, content)
        manifest.write(directory, step)


def check_name(path: epath.Path, step: int) -> None:
    """Raise a UserError if `path` is checkpoint_<number> with a number that is not `step`."""
    if paths.step_of(path) not in (None, step):
        right = path.parent / paths.checkpoint_name(step)
        raise UserError(
            f"{path} cannot be written: the number in such a name is the step, and the step is {step}. Name it "
            f"{right}, or anything that is not checkpoint_<number>."
        )
