"""Vocabularies: convert text to token ids and back, with seqio's names and semantics.

    >>> ByteVocabulary().encode("Hé")
    [75, 198, 172]
    >>> ByteVocabulary().decode([75, 198, 172, 1, 75])
    'Hé'

Id 0 is always padding. Two vocabularies are equal if their content is equal, wherever their files are.

Encoding returns the same ids as seqio. Characters that a SentencePiece model's normaliser removes (control and
zero-width characters, and leading, trailing and repeated spaces if the model is configured so) are therefore lost;
`ByteVocabulary` keeps every byte. Text that is not valid Unicode (half a surrogate pair) is an error.
"""

# ruff: noqa: F401

from t5x.data.vocabularies.base import DESCRIPTION_FILE, PAD_ID, ByteVocabulary, PassThroughVocabulary, Vocabulary
from t5x.data.vocabularies.huggingface import HuggingFaceVocabulary
from t5x.data.vocabularies.loading import WrappedVocabulary, as_vocabulary, load_vocabulary
from t5x.data.vocabularies.sentence_piece import SentencePieceVocabulary
