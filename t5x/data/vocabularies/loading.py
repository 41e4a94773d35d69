"""Vocabularies from the files that travel with a checkpoint."""

import json
import os

from t5x.data import files
from t5x.data.vocabularies import huggingface, sentence_piece
from t5x.data.vocabularies.base import DESCRIPTION_FILE, Vocabulary
from t5x.data.vocabularies.huggingface import HuggingFaceVocabulary
from t5x.data.vocabularies.ids import ByteVocabulary, PassThroughVocabulary
from t5x.data.vocabularies.sentence_piece import SentencePieceVocabulary
from t5x.errors import UserError

# {class: the parameter that takes the path of its file, the file}
_KINDS: dict[type[Vocabulary], dict[str, str]] = {
    PassThroughVocabulary: {},
    ByteVocabulary: {},
    SentencePieceVocabulary: {"sentencepiece_model_file": sentence_piece.MODEL_FILE},
    HuggingFaceVocabulary: {"tokenizer_file": huggingface.TOKENIZER_FILE},
}


def load_vocabulary(directory: str | os.PathLike[str]) -> Vocabulary:
    """Rebuilds the vocabulary whose `to_files()` were written into `directory`."""
    directory = os.fspath(directory)
    path = f"{directory}/{DESCRIPTION_FILE}"
    try:
        description = json.loads(files.read_bytes(path))
        name = description.pop("class")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{path} does not describe a vocabulary: {error!r}. It is damaged.") from error
    for kind, parameters in _KINDS.items():
        if kind.__name__ == name:
            try:
                return kind(**description, **{key: f"{directory}/{file}" for key, file in parameters.items()})
            except TypeError as error:
                raise UserError(f"{path} does not describe a {name}: {error}. It is damaged.") from error
    raise UserError(
        f"{path} names the vocabulary class {name!r}; known are {', '.join(kind.__name__ for kind in _KINDS)}."
    )
