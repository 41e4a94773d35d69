"""Vocabularies from elsewhere: files of a checkpoint, names on the command line, objects of other libraries."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from t5x._runtime.errors import UserError
from t5x.data.vocabularies.base import (
    DESCRIPTION_FILE,
    ByteVocabulary,
    FileVocabulary,
    PassThroughVocabulary,
    Vocabulary,
)
from t5x.data.vocabularies.huggingface import HuggingFaceVocabulary
from t5x.data.vocabularies.sentence_piece import SentencePieceVocabulary
from t5x.files import user_files
from t5x.files.remote import is_remote
from t5x.files.untrusted import open_inside, parse_json

_CLASSES: dict[str, type[Vocabulary]] = {
    kind.__name__: kind
    for kind in (PassThroughVocabulary, ByteVocabulary, SentencePieceVocabulary, HuggingFaceVocabulary)
}


def load_vocabulary(directory: str | os.PathLike[str]) -> Vocabulary:
    """Rebuild the vocabulary whose `to_files()` were written to `directory`. Symbolic links are not followed."""
    directory = os.fspath(directory)
    return rebuild_vocabulary(functools.partial(_read, directory), directory)


def rebuild_vocabulary(read: Callable[[str], bytes], where: str) -> Vocabulary:
    """Rebuild a vocabulary from what `read` returns for the names of its files.

    Args:
      read: raises KeyError for a name that it does not know.
      where: location of the files, for messages.
    """
    path = f"{where}/{DESCRIPTION_FILE}"
    try:
        description = parse_json(read(DESCRIPTION_FILE))
        name = description.pop("class")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path} does not describe a vocabulary: {error!r}. It is damaged.") from error
    if not isinstance(name, str) or name not in _CLASSES:
        raise UserError(f"{path}: the class {str(name)[:80]!r} is not one of {', '.join(_CLASSES)}.")
    kind = _CLASSES[name]
    try:
        if not issubclass(kind, FileVocabulary):
            return kind(**description)
        of_file: Callable[..., FileVocabulary] = kind
        return of_file(f"{where}/{kind.stored_name}", **description).with_content(read(kind.stored_name))
    except TypeError as error:
        raise UserError(f"{path} does not describe a {name}: {error}. It is damaged.") from error
    except KeyError as error:
        raise UserError(f"{where} lacks {error}, the file of its {name}. It is damaged.") from error


def _read(directory: str, name: str) -> bytes:
    path = f"{directory}/{name}"
    if is_remote(directory):
        return user_files.read_bytes(path)
    try:
        with open_inside(os.path.expanduser(directory), name) as file:
            return file.read()
    except OSError as error:
        raise UserError(user_files.local_problem(path, error)) from error


# --- Vocabularies named on the command line ---------------------------------------------------------------------------


class NamedVocabulary(NamedTuple):
    """A vocabulary in a form that gin can express: a class or function of `t5x.data.vocabularies` and its arguments."""

    function: str
    arguments: Mapping[str, Any]

    def load(self) -> Vocabulary:
        function = load_vocabulary if self.function == "load_vocabulary" else _CLASSES[self.function]
        return function(**self.arguments)

    def bindings(self) -> list[str]:
        name = f"vocabularies.{self.function}"
        arguments = [f"{name}.{argument} = {value!r}" for argument, value in self.arguments.items()]
        return ["from t5x.data import vocabularies", f"VOCABULARY = @{name}()", *arguments]


def vocabulary_named(name: str, rows: int | None = None, pad_id: int = 0) -> NamedVocabulary:
    """Return the vocabulary that --vocabulary names.

    Args:
      name: a SentencePiece model (.model), a Hugging Face tokenizer.json, or `bytes`.
      rows: number of rows of the model's embedding, which limits the size of the vocabulary.
      pad_id: the padding token of the network.
    """
    path = user_files.absolute_path(name)
    pad = {"pad_id": pad_id} if pad_id else {}
    if name == "bytes":
        vocabulary = NamedVocabulary("ByteVocabulary", {})
    elif name.endswith(".json"):
        vocabulary = NamedVocabulary("HuggingFaceVocabulary", {"tokenizer_file": path} | pad)
    elif name.endswith(".model"):
        extra_ids = SentencePieceVocabulary(path).missing_sentinels(rows)
        arguments = {"sentencepiece_model_file": path} | ({"extra_ids": extra_ids} if extra_ids else {}) | pad
        vocabulary = NamedVocabulary("SentencePieceVocabulary", arguments)
    else:
        raise UserError(f"--vocabulary {name}: pass a SentencePiece model (*.model), a tokenizer.json, or bytes.")
    size = vocabulary.load().vocab_size
    if rows is not None and size > rows:
        raise UserError(f"--vocabulary {name} has {size:,} ids, but the model only {rows:,}. Pass the model's own.")
    return vocabulary


# --- Vocabularies of the real seqio, and others with its methods; seqio is not imported -------------------------------


def as_vocabulary(vocabulary: Any) -> Vocabulary:
    """Return our equivalent of an external vocabulary, with the same ids.

    SentencePiece, byte and pass-through vocabularies of seqio become ours. All others, and all subclasses (they may
    encode differently), are wrapped; a wrapped vocabulary is not stored with checkpoints.

    Args:
      vocabulary: a seqio.Vocabulary; one of ours is returned unchanged.
    """
    if isinstance(vocabulary, Vocabulary):
        return vocabulary
    kind = type(vocabulary)
    name = kind.__name__ if kind.__module__.partition(".")[0] == "seqio" else None
    if name == "SentencePieceVocabulary":
        return SentencePieceVocabulary(
            vocabulary.sentencepiece_model_file,
            extra_ids=vocabulary.extra_ids,
            normalizer_spec_overrides=vocabulary._normalizer_spec_overrides,
            reverse_extra_ids=vocabulary._reverse_extra_ids,
        )
    if name == "ByteVocabulary":
        return ByteVocabulary(extra_ids=vocabulary.extra_ids)
    if name == "PassThroughVocabulary":
        return PassThroughVocabulary(vocabulary.vocab_size, eos_id=vocabulary.eos_id)
    return WrappedVocabulary(vocabulary)


class WrappedVocabulary(Vocabulary):
    """An external vocabulary with our interface.

    Args:
      wrapped: an object with seqio's methods (`encode`, `decode`) and properties (`vocab_size`, `eos_id`, `unk_id`, …).
    """

    def __init__(self, wrapped: Any):
        self.wrapped = wrapped
        self.extra_ids = wrapped.extra_ids or 0

    eos_id = property(lambda self: self._special("eos_id"))
    bos_id = property(lambda self: self._special("bos_id"))
    unk_id = property(lambda self: self._special("unk_id"))

    def _special(self, name: str) -> int | None:
        try:
            value = getattr(self.wrapped, name)
        except NotImplementedError:
            return None
        return None if value is None or value < 0 else int(value)

    @property
    def vocab_size(self) -> int:
        return self.wrapped.vocab_size

    def encode(self, text: str) -> list[int]:
        return [int(i) for i in self.wrapped.encode(text)]

    def _decode(self, ids: list[int]) -> str:
        return self.wrapped.decode(ids)

    def description(self) -> dict[str, Any]:
        kind = type(self.wrapped)
        return {
            "class": "WrappedVocabulary",
            "wrapped": f"{kind.__module__}.{kind.__qualname__}",
            "vocab_size": self.vocab_size,
            "extra_ids": self.extra_ids,
        }

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WrappedVocabulary):
            return NotImplemented
        return self.fingerprint == other.fingerprint and self.wrapped == other.wrapped

    __hash__ = Vocabulary.__hash__

    def __repr__(self) -> str:
        kind = type(self.wrapped)
        return f"WrappedVocabulary({kind.__module__}.{kind.__qualname__}, vocab_size={self.vocab_size})"
