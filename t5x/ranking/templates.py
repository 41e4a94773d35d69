"""What a ranker reads and says: the text around a query and its documents, and the words it was trained to answer."""

import dataclasses
import string
from collections.abc import Mapping
from typing import Any, ClassVar

from t5x.errors import UserError


@dataclasses.dataclass(frozen=True)
class Template:
    """Of pointwise ranking, as monoT5's.

    Attributes:
      text: with {query} and {document}.
      relevant, irrelevant: the words whose first-position logits are compared; each must be a single piece, and may be
        written as one ("▁true"). Where `irrelevant` is None the logit of `relevant` is the score, as RankT5's.
      max_length: tokens of an input, EOS included; longer ones lose the end of their passage.
    """

    DOCUMENTS: ClassVar[tuple[str, ...]] = ("document",)

    text: str = "Query: {query} Document: {document} Relevant:"
    relevant: str = "true"
    irrelevant: str | None = "false"
    max_length: int = 512

    def __post_init__(self):
        _check_fields(self.text, ("query", *self.DOCUMENTS))
        if self.max_length < 1:
            raise UserError(f"The template's max_length is {self.max_length}: it must be at least 1.")

    def fill(self, query: str, *documents: str) -> str:
        """
        >>> Template().fill("who?", "He.")
        'Query: who? Document: He. Relevant:'
        """
        return self.text.format(query=query, **dict(zip(self.DOCUMENTS, documents, strict=True)))

    def between(self, query: str) -> list[str]:
        """The text before the first document, between documents, and behind the last.

        >>> Template().between("who?")
        ['Query: who? Document: ', ' Relevant:']
        """
        found = [""]
        for literal, field, _, _ in string.Formatter().parse(self.text):
            found[-1] += literal
            if field == "query":
                found[-1] += query
            elif field is not None:
                found.append("")
        return found


@dataclasses.dataclass(frozen=True)
class PairTemplate(Template):
    """Of pairwise ranking, as duoT5's: `relevant` says that the first of two documents is the more relevant one.

    Attributes:
      text: with {query}, {document0} and {document1}.
    """

    DOCUMENTS: ClassVar[tuple[str, ...]] = ("document0", "document1")

    text: str = "Query: {query} Document0: {document0} Document1: {document1} Relevant:"


def from_fields(fields: Any, where: str) -> Template:
    """The template whose fields a checkpoint states.

    Args:
      where: they stand, for the message.
    """
    pairwise = isinstance(fields, Mapping) and "{document0}" in str(fields.get("text"))
    try:
        return (PairTemplate if pairwise else Template)(**fields)
    except TypeError as error:
        raise UserError(f"{where}: this is no template of a ranker: {str(fields)[:200]}.") from error


def _check_fields(text: str, names: tuple[str, ...]) -> None:
    """UserError unless `text` has each of these fields once, and no other."""
    try:
        found = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise UserError(f"The template {text!r} cannot be read: {error}.") from error
    if sorted(found) != sorted(names):
        wanted = ", ".join(f"{{{name}}}" for name in names)
        raise UserError(f"The template {text!r} must have {wanted}, each once, and nothing else in braces.")


MONOT5 = Template()
DUOT5 = PairTemplate()

PRESETS = {
    "monot5": MONOT5,
    "mt5": dataclasses.replace(MONOT5, relevant="yes", irrelevant="no"),
    "ptt5": dataclasses.replace(MONOT5, relevant="sim", irrelevant="não"),
    "monoptt5": Template("Pergunta: {query} Documento: {document} Relevante:", relevant="Sim", irrelevant="Não"),
}
