"""What a ranker reads and says: the text around a query and a passage, and the two words it was trained to answer."""

import dataclasses
import string

from t5x.errors import UserError


@dataclasses.dataclass(frozen=True)
class Template:
    """Of pointwise ranking, as monoT5's.

    Attributes:
      text: with {query} and {document}.
      relevant, irrelevant: the words whose first-position logits are compared; each must be a single piece.
      max_length: tokens of an input, EOS included; longer ones lose the end of their passage.
    """

    text: str = "Query: {query} Document: {document} Relevant:"
    relevant: str = "true"
    irrelevant: str = "false"
    max_length: int = 512

    def __post_init__(self):
        _check_fields(self.text, ("query", "document"))

    def fill(self, query: str, document: str) -> str:
        """
        >>> Template().fill("who?", "He.")
        'Query: who? Document: He. Relevant:'
        """
        return self.text.format(query=query, document=document)


MONOT5 = Template()

PRESETS = {
    "monot5": MONOT5,
    "mt5": dataclasses.replace(MONOT5, relevant="yes", irrelevant="no"),
    "ptt5": dataclasses.replace(MONOT5, relevant="sim", irrelevant="não"),
}


def _check_fields(text: str, names: tuple[str, ...]) -> None:
    """UserError unless `text` has each of these fields once, and no other."""
    try:
        found = [field for _, field, _, _ in string.Formatter().parse(text) if field is not None]
    except ValueError as error:
        raise UserError(f"The template {text!r} cannot be read: {error}.") from error
    if sorted(found) != sorted(names):
        wanted = " and ".join(f"{{{name}}}" for name in names)
        raise UserError(f"The template {text!r} must have {wanted}, each once, and nothing else in braces.")
