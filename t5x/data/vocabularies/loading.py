"""Load vocabularies from the files stored with a checkpoint."""

import functools
import os
from collections.abc import Callable

from t5x.data.vocabularies import huggingface, sentence_piece
from t5x.data.vocabularies.base import DESCRIPTION_FILE, Vocabulary
from t5x.data.vocabularies.huggingface import HuggingFaceVocabulary
from t5x.data.vocabularies.ids import ByteVocabulary, PassThroughVocabulary
from t5x.data.vocabularies.sentence_piece import SentencePieceVocabulary
from t5x.errors import UserError
from t5x.files import user_files
from t5x.files.remote import is_remote
from t5x.files.untrusted import open_inside, parse_json

# {class: (parameter for the path of its file, file name)}
_KINDS: dict[type[Vocabulary], tuple[str, str] | None] = {
    PassThroughVocabulary: None,
    ByteVocabulary: None,
    SentencePieceVocabulary: ("sentencepiece_model_file", sentence_piece.MODEL_FILE),
    HuggingFaceVocabulary: ("tokenizer_file", huggingface.TOKENIZER_FILE),
}


def load_vocabulary(directory: str | os.PathLike[str]) -> Vocabulary:
    """Rebuild the vocabulary whose `to_files()` were written to `directory`. Symbolic links are not followed."""
    directory = os.fspath(directory)
    return rebuild(functools.partial(_read, directory), directory)


def rebuild(read: Callable[[str], bytes], where: str) -> Vocabulary:
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
    for kind, stored in _KINDS.items():
        if kind.__name__ == name:
            try:
                if stored is None:
                    return kind(**description)
                parameter, file = stored
                return kind(**description, **{parameter: f"{where}/{file}"}).with_content(read(file))
            except TypeError as error:
                raise UserError(f"{path} does not describe a {name}: {error}. It is damaged.") from error
            except KeyError as error:
                raise UserError(f"{where} lacks {error}, the file of its {name}. It is damaged.") from error
    raise UserError(
        f"{path} names the vocabulary class {str(name)[:80]!r}; known are {', '.join(k.__name__ for k in _KINDS)}."
    )


def _read(directory: str, name: str) -> bytes:
    path = f"{directory}/{name}"
    if is_remote(directory):
        return user_files.read_bytes(path)
    try:
        with open_inside(os.path.expanduser(directory), name) as file:
            return file.read()
    except OSError as error:
        raise UserError(user_files.local_problem(path, error)) from error
