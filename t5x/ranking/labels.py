"""Token ids of the words that a ranker generates."""

from t5x.data.vocabularies import Vocabulary
from t5x.errors import UserError
from t5x.ranking.templates import Template

_SPACE = "▁"  # U+2581, which stands for the space before a word in SentencePiece's pieces


def label_ids(vocabulary: Vocabulary, template: Template) -> list[int]:
    """Return the ids of the template's `relevant` and, if set, `irrelevant` words."""
    words = [word for word in (template.relevant, template.irrelevant) if word is not None]
    ids = [label_id(vocabulary, word) for word in words]
    if len(set(ids)) < len(ids):
        raise UserError(f"The labels {words[0]!r} and {words[1]!r} are the same token, {ids[0]}. Pass other --labels.")
    return ids


def label_id(vocabulary: Vocabulary, label: str) -> int:
    """Return the id of a label: a word that is a single piece, or a piece such as "▁true"."""
    tokenizer = getattr(vocabulary, "tokenizer", None)
    if label.startswith(_SPACE):
        lookup = getattr(tokenizer, "piece_to_id", None) or getattr(tokenizer, "token_to_id", None)
        found = None if lookup is None else lookup(label)
        if found is None or found == vocabulary.unk_id:
            raise UserError(f"The vocabulary has no piece {label!r}. Pass other labels, such as --labels true,false.")
        return int(found)
    ids = vocabulary.encode(label)
    if len(ids) != 1 or ids[0] == vocabulary.unk_id:
        name = getattr(tokenizer, "id_to_piece", None) or getattr(tokenizer, "id_to_token", None)
        pieces = [vocabulary.decode([i]) if name is None else name(i) for i in ids]
        raise UserError(
            f"The label {label!r} is not a single piece of the vocabulary, but {len(ids)}: {pieces}. Pass words that "
            "are, or the pieces that the model was trained with: --labels true,false or --labels ▁true,▁"
        )
    return ids[0]
