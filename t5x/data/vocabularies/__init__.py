"""Vocabularies: text to token ids and back, with seqio's names and semantics.

    >>> ByteVocabulary().encode("Hé")
    [75, 198, 172]
    >>> ByteVocabulary().decode([75, 198, 172, 1, 75])
    'Hé'

Id 0 is padding in all of them. Two vocabularies are equal when their content is equal, wherever their files lie.

Encoding gives the ids that seqio gives. What a SentencePiece model's own normaliser takes away (control characters,
zero-width characters, spaces at the ends and repeated ones, where the model says so) is therefore not in the ids;
`ByteVocabulary` keeps every byte. Text that is no valid Unicode (half a surrogate pair) is an error.
"""

from t5x.data.vocabularies.base import DESCRIPTION_FILE, PAD_ID, Vocabulary
from t5x.data.vocabularies.foreign import WrappedVocabulary, as_vocabulary
from t5x.data.vocabularies.huggingface import HuggingFaceVocabulary
from t5x.data.vocabularies.ids import ByteVocabulary, PassThroughVocabulary
from t5x.data.vocabularies.loading import load_vocabulary
from t5x.data.vocabularies.sentence_piece import SentencePieceVocabulary

__all__ = [
    "DESCRIPTION_FILE",
    "PAD_ID",
    "ByteVocabulary",
    "HuggingFaceVocabulary",
    "PassThroughVocabulary",
    "SentencePieceVocabulary",
    "Vocabulary",
    "WrappedVocabulary",
    "as_vocabulary",
    "load_vocabulary",
]
