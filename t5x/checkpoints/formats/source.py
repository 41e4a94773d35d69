"""`Source`, the common form of all checkpoint formats: lazily read arrays under T5X's names."""

import asyncio
import dataclasses
import glob
import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from t5x.checkpoints import paths
from t5x.files.untrusted import open_inside
from t5x.partitioning.consistency import sampled_digest

SLOTS = ("m", "v", "v_row", "v_col")  # Adafactor's state of a parameter, in `state/param_states`


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array of a checkpoint that is read on demand."""

    shape: tuple[int, ...]
    dtype: np.dtype
    get_fn: Callable[[], np.ndarray]

    @classmethod
    def from_array(cls, array: Any, dtype: Any = None) -> Self:
        """Return an array that is already in memory."""
        kind = np.dtype(dtype or array.dtype)
        return cls(tuple(array.shape), kind, lambda: np.asarray(array).astype(kind))

    def read(self) -> np.ndarray:
        """Read the array."""
        return self.get_fn()

    get = read  # T5X's name

    async def get_async(self) -> np.ndarray:
        """Read the array in a thread."""
        return await asyncio.to_thread(self.read)

    def astype(self, dtype: Any) -> "LazyArray":
        """Return the array with another dtype, still unread."""
        kind = np.dtype(dtype)
        return dataclasses.replace(self, dtype=kind, get_fn=lambda: np.asarray(self.read()).astype(kind, copy=False))

    def reshape(self, shape: tuple[int, ...]) -> "LazyArray":
        """Return the array with another shape, still unread."""
        return LazyArray(shape, self.dtype, lambda: self.read().reshape(shape))

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def T(self) -> "LazyArray":
        return LazyArray(self.shape[::-1], self.dtype, lambda: self.read().T)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Read the array, for `np.asarray(array)`."""
        return np.asarray(self.read(), dtype)


class LazyThreadPoolArray(LazyArray):
    """T5X's name of a `LazyArray` that is read in a thread."""


class LazyAwaitableArray(LazyArray):
    """T5X's name of a `LazyArray` of TensorStore, or around an array."""

    @classmethod
    def from_tensor_store_spec(cls, ts_spec: Any, get_fn: Callable[[], Any], dtype: Any = None) -> Self:
        """Return an array with the shape of a TensorStore spec, which `get_fn` reads."""
        kind = np.dtype(dtype or ts_spec.dtype.numpy_dtype)
        return cls(tuple(ts_spec.shape), kind, lambda: np.asarray(get_fn()).astype(kind))

    @classmethod
    def from_tensor_store_spec_or_array(cls, maybe_ts_spec: Any, get_fn: Callable[[], Any], dtype: Any = None) -> Self:
        """Return the array of either."""
        if isinstance(maybe_ts_spec, np.ndarray) or hasattr(maybe_ts_spec, "__array__"):
            return cls.from_array(maybe_ts_spec, dtype)
        return cls.from_tensor_store_spec(maybe_ts_spec, get_fn, dtype)


# Of config.json only some fields; tokenizer.json if there is a SentencePiece model beside it.
KEPT_FILES = ("config.json", "generation_config.json", "tokenizer.json")


@dataclasses.dataclass(frozen=True)
class Source:
    """A checkpoint opened for reading.

    Attributes:
      format: readable name of the format: `native T5X (version 3)`.
      path: path of the checkpoint.
      step: the training step; None if the format has none.
      arrays: {T5X's name: array}, scanned or unrolled as stored: `target/encoder/layers_0/…/kernel`,
        `state/param_states/encoder/…/kernel/v_row`.
      network: name of the network's class, in our checkpoints.
      config: fields of the network's configuration (T5Config) that the checkpoint states; None if it states none.
      vocabulary_files: {feature: {file name: content}} of the included vocabularies.
      inputs_bidirectional_attention: whether a decoder-only model is a prefix LM.
      template: fields of a ranker's template as stored, if there is one; `t5x.apps.ranking` reads them.
      data: how the run that wrote it read its data file, as stored; `t5x.data.data_description` reads it.
      model_type: `t5`, `mt5` or `umt5`, if the checkpoint states it, as Hugging Face's do.
      huggingface_files: {name: content} of the `KEPT_FILES` of a Hugging Face directory, for conversion back to one.
    """

    format: str
    path: str
    step: int | None
    arrays: Mapping[str, LazyArray]
    network: str | None = None
    config: Mapping[str, Any] | None = None
    vocabulary_files: Mapping[str, Mapping[str, bytes]] = dataclasses.field(default_factory=dict)
    inputs_bidirectional_attention: bool = False
    template: Mapping[str, Any] | None = None
    data: Mapping[str, Any] | None = None
    model_type: str | None = None
    huggingface_files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


_HUGGINGFACE = ("config.json", ".safetensors")  # suffixes of the files that are read; others may change


def fingerprint(source: Source, *, content: bool = False) -> str:
    """Return a hash that changes if another checkpoint replaces this one.

    For our checkpoints, it is based on the manifest, which has a hash of every file; for others, on the names, sizes
    and times of their files. Vocabularies are hashed by content.

    Args:
      content: use samples of the files' content instead of their times, to compare copies on several machines.
    """
    directory = os.path.dirname(source.path) if os.path.isfile(source.path) else source.path
    if os.path.isfile(os.path.join(directory, paths.MANIFEST)):
        with open_inside(directory, paths.MANIFEST) as file:
            files: str | list[tuple[str, int, str | int]] = hashlib.sha256(file.read()).hexdigest()
    else:
        root = directory if os.path.isdir(directory) else os.path.dirname(directory)
        files = [
            (name, status.st_size, _sampled(os.path.join(root, name), status) if content else status.st_mtime_ns)
            for name, status in _files(source, directory)
        ]
    vocabularies = {
        feature: {name: hashlib.sha256(content).hexdigest() for name, content in sorted(of_feature.items())}
        for feature, of_feature in sorted(source.vocabulary_files.items())
    }
    return hashlib.sha256(json.dumps([files, vocabularies]).encode()).hexdigest()[:16]


def _sampled(path: str, status: os.stat_result) -> str:
    return sampled_digest(path, blocks=16, block=1 << 12) if stat.S_ISREG(status.st_mode) else ""


def _files(source: Source, directory: str) -> list[tuple[str, os.stat_result]]:
    if not os.path.isdir(directory):  # the prefix of a TensorFlow checkpoint
        return [(os.path.basename(path), os.stat(path)) for path in sorted(glob.glob(f"{glob.escape(directory)}.*"))]
    if source.format.startswith("Hugging Face"):
        names = sorted(name for name in os.listdir(directory) if name.endswith(_HUGGINGFACE))
        return [(name, os.stat(os.path.join(directory, name))) for name in names]  # follows links
    return sorted(paths.walk(directory))
