"""Templates: the text around a query and its documents, and the words that the ranker generates."""

import dataclasses
import string
from collections.abc import Mapping
from typing import Any, ClassVar

from t5x.data.vocabularies import Vocabulary
from t5x.errors import UserError, located

_SPACE = "▁"  # U+2581, which stands for the space before a word in SentencePiece's pieces


@dataclasses.dataclass(frozen=True)
class Template:
    """A pointwise template, as in monoT5.

    Attributes:
      text: format string with {query} and {document}.
      relevant, irrelevant: the words whose first-position logits are compared. Each must be a single piece and may be
        written as one ("▁true"). If `irrelevant` is None, the score is the logit of `relevant`, as in RankT5.
      max_length: tokens per input, EOS included; longer inputs lose the end of their passage.
    """

    DOCUMENTS: ClassVar[tuple[str, ...]] = ("document",)

    text: str = "Query: {query} Document: {document} Relevant:"
    relevant: str = "true"
    irrelevant: str | None = "false"
    max_length: int = 512

    def __post_init__(self):
        for name, value in (("text", self.text), ("relevant", self.relevant), ("irrelevant", self.irrelevant)):
            if not isinstance(value, str) and not (name == "irrelevant" and value is None):
                raise UserError(f"The template's {name} is {str(value)[:80]!r}, which is not a string.")
        _check_fields(self.text, ("query", *self.DOCUMENTS))
        if type(self.max_length) is not int or self.max_length < 1:
            raise UserError(f"The template's max_length is {str(self.max_length)[:80]!r}: it must be at least 1.")

    def fill(self, query: str, *documents: str) -> str:
        """
        >>> Template().fill("who?", "He.")
        'Query: who? Document: He. Relevant:'
        """
        return self.text.format(query=query, **dict(zip(self.DOCUMENTS, documents, strict=True)))

    def between(self, query: str) -> list[str]:
        """Return the text before the first document, between documents and after the last.

        >>> Template().between("who?")
        ['Query: who? Document: ', ' Relevant:']
        """
        parts = [""]
        for literal, field, _, _ in string.Formatter().parse(self.text):
            parts[-1] += literal
            if field == "query":
                parts[-1] += query
            elif field is not None:
                parts.append("")
        return parts


@dataclasses.dataclass(frozen=True)
class PairTemplate(Template):
    """A pairwise template, as in duoT5: `relevant` means that the first document is more relevant.

    Attributes:
      text: format string with {query}, {document0} and {document1}.
    """

    DOCUMENTS: ClassVar[tuple[str, ...]] = ("document0", "document1")

    text: str = "Query: {query} Document0: {document0} Document1: {document1} Relevant:"


def from_fields(fields: Any, where: str) -> Template:
    """Return the template with the fields stored in a checkpoint.

    Args:
      where: location of the fields, for error messages.
    """
    pairwise = isinstance(fields, Mapping) and "{document0}" in str(fields.get("text"))
    with located(where):
        try:
            return (PairTemplate if pairwise else Template)(**fields)
        except TypeError as error:
            raise UserError(f"this is not a ranker's template: {str(fields)[:200]}.") from error


def _check_fields(text: str, names: tuple[str, ...]) -> None:
    """Raise a UserError unless `text` contains each of these fields once, and no other."""
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise UserError(f"The template {text!r} cannot be read: {error}.") from error
    if sorted(fields) != sorted(names):
        required = ", ".join(f"{{{name}}}" for name in names)
        raise UserError(f"The template {text!r} must have {required}, each once, and nothing else in braces.")


MONOT5 = Template()
DUOT5 = PairTemplate()

PRESETS = {
    "monot5": MONOT5,
    "mt5": dataclasses.replace(MONOT5, relevant="yes", irrelevant="no"),
    "ptt5": dataclasses.replace(MONOT5, relevant="sim", irrelevant="não"),
    "monoptt5": Template("Pergunta: {query} Documento: {document} Relevante:", relevant="Sim", irrelevant="Não"),
}


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
        token = None if lookup is None else lookup(label)
        if token is None or token == vocabulary.unk_id:
            raise UserError(f"The vocabulary has no piece {label!r}. Pass other labels, such as --labels true,false.")
        return int(token)
    ids = vocabulary.encode(label)
    if len(ids) != 1 or ids[0] == vocabulary.unk_id:
        name = getattr(tokenizer, "id_to_piece", None) or getattr(tokenizer, "id_to_token", None)
        pieces = [vocabulary.decode([i]) if name is None else name(i) for i in ids]
        raise UserError(
            f"The label {label!r} is not a single piece of the vocabulary, but {len(ids)}: {pieces}. Pass words that "
            "are, or the pieces that the model was trained with: --labels true,false or --labels ▁true,▁"
        )
    return ids[0]
