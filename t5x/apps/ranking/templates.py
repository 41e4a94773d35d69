"""Templates: the text around a query and its documents, and the words that the ranker generates."""

import dataclasses
import os
import re
import string
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from t5x._runtime.errors import UserError, located
from t5x.checkpoints.formats import Source
from t5x.data.vocabularies import Vocabulary
from t5x.files.untrusted import MAX_JSON_BYTES, open_regular, parse_json

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


# The published mT5 of 3B and 13B parameters learned `false`, which is two pieces in mT5, by its first one.
_MT5_LARGE = dataclasses.replace(MONOT5, relevant="▁true", irrelevant="▁")
_PUBLIC: tuple[tuple[str, Template, str], ...] = (
    (r"duot5", DUOT5, "duoT5's"),
    (r"monot5", MONOT5, "monoT5's"),
    (r"monoptt5", PRESETS["monoptt5"], "monoPTT5's"),
    (r"ptt5.*(msmarco|mmarco)", PRESETS["ptt5"], "PTT5's"),
    (r"mt5-(3b|13b)-.*mmarco", _MT5_LARGE, "the large mT5's"),
    (r"mt5.*(msmarco|mmarco)", PRESETS["mt5"], "mT5's"),
)


def template_of(source: Source, model: Any, *, pairwise: bool = False, has_text: bool = False) -> tuple[Template, str]:
    """Return the template of a checkpoint and the reason for the choice.

    Args:
      model: the checkpoint's model; our ranking models have a `template`.
      pairwise: return a template for two documents, as in duoT5.
      has_text: the user passes a template text, so only labels and length are taken from the checkpoint's template.
    """
    kind = PairTemplate if pairwise else Template
    wrong = UserError(
        f"{source.path} is a pairwise ranker. Pass it as --pairwise, together with a pointwise --model."
        if not pairwise
        else f"--pairwise {source.path} is a pointwise ranker. Pass one that compares two passages, such as duoT5."
    )
    own = getattr(model, "template", None)
    if source.template is not None:
        own = from_fields(source.template, source.path)
    candidates = [(own, "the checkpoint's own")] if isinstance(own, Template) else _by_name(source.path)
    for template, why in candidates:
        if type(template) is kind:
            return template, why
        if not has_text:
            raise wrong
    if pairwise:
        return DUOT5, "duoT5's, the default"
    return MONOT5, "monoT5's, the default"


def with_changes(
    template: Template, why: str, *, text: str | None, labels: str | None, max_length: int | None
) -> tuple[Template, str]:
    """Return the template with the user's settings applied, and the reasons."""
    changes: dict[str, Any] = {}
    if text is not None:
        if (preset := PRESETS.get(text)) is not None:
            template, why = preset, f"--template {text}"
        else:
            changes["text"], why = text, f"--template; the rest {why}"
    if labels is not None:
        words = labels.split(",")
        if not 1 <= len(words) <= 2 or not all(words):
            raise UserError(
                f"--labels is {labels!r}: it must be two words, such as true,false, or one whose logit is the score."
            )
        changes |= {"relevant": words[0], "irrelevant": words[1] if len(words) > 1 else None}
        why += "; --labels"
    if max_length is not None:
        changes["max_length"] = max_length
        why += "; --max_length"
    return dataclasses.replace(template, **changes), why


def _by_name(path: str) -> Iterator[tuple[Template, str]]:
    for name in _names(path):
        for pattern, template, whose in _PUBLIC:
            if re.search(pattern, name.lower()):
                yield template, f"{whose}, as the checkpoint is {name}"


def _names(path: str) -> Iterator[str]:
    """Yield the names of a Hugging Face directory: in its config.json, on disk, and in the Hugging Face cache."""
    try:
        with open_regular(os.path.join(path, "config.json")) as file:
            stated = parse_json(file.read(MAX_JSON_BYTES + 1)).get("_name_or_path")
    except (OSError, ValueError, AttributeError):
        stated = None
    if isinstance(stated, str):
        yield stated
    parts = os.path.abspath(path).split(os.sep)
    yield parts[-1]
    for part in parts:
        if part.startswith("models--"):
            yield part.removeprefix("models--").replace("--", "/")
