"""Templates: the text around a query and its documents, its token ids, and the words that the ranker generates."""

import dataclasses
import functools
import os
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from t5x._runtime.errors import UserError, located, shorten
from t5x.checkpoints.formats import Source
from t5x.data.vocabularies import Vocabulary
from t5x.files.untrusted import MAX_JSON_BYTES, open_regular, parse_json

LONG_QUERY = ("error", "truncate")
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


# --- Token ids of filled templates ------------------------------------------------------------------------------------


class EncodedInput(NamedTuple):
    """The token ids of an input.

    Attributes:
      ids: token ids with EOS, up to the template's `max_length`.
      is_cut: whether a document was truncated.
      query_is_cut: whether the query was truncated.
    """

    ids: list[int]
    is_cut: bool
    query_is_cut: bool


class InputEncoder:
    """Encodes queries and documents with a template. Inputs that are too long lose the end of their documents.

        InputEncoder(vocabulary, MONOT5).encode("what is a quark?", "A quark is a particle.").ids

    An input that fits is tokenised as a whole, as Hugging Face's tokenizers do. Otherwise the text around the documents
    is kept, and the documents share the remaining room; a short document leaves its unused share to the other.

    Args:
      long_query: `error` refuses a query that leaves no room for a token of every document; `truncate` shortens it so
        that half of the input is left for documents.
    """

    def __init__(self, vocabulary: Vocabulary, template: Template, long_query: str = "error"):
        if long_query not in LONG_QUERY:
            raise UserError(f"long_query is {long_query!r}: it must be {' or '.join(LONG_QUERY)}.")
        self.template = template
        self._vocabulary = vocabulary
        self._long_query = long_query
        self._end = [] if vocabulary.eos_id is None else [vocabulary.eos_id]
        self.separator = _separator(vocabulary)
        self._around = functools.lru_cache(maxsize=256)(self._around_documents)

    def encode(self, query: str, *documents: str) -> EncodedInput:
        """Return the ids of a query with the template's number of documents."""
        around = self._around(query)
        encode, limit = self._vocabulary.encode, self.template.max_length
        ids = encode(self.template.fill(around.query, *documents))
        if len(ids) + len(self._end) <= limit:
            return EncodedInput([*ids, *self._end], False, around.query != query)
        encoded = [encode(document.strip()) for document in documents]
        room = limit - len(self._end) - sum(map(len, around.ids))
        shares = _shares(room, [len(document) for document in encoded])
        joined = list(around.ids[0])
        for document, share, suffix in zip(encoded, shares, around.ids[1:], strict=True):
            joined += [*document[:share], *suffix]
        is_cut = any(len(document) > share for document, share in zip(encoded, shares, strict=True))
        return EncodedInput([*joined, *self._end], is_cut, around.query != query)

    def check(self, query: str) -> None:
        """Raise a UserError if a query is empty or too long."""
        self._around(query)

    def _around_documents(self, query: str) -> "_QueryPieces":
        if not query.strip():
            raise UserError("The query is empty.")
        pieces = self._pieces(query)
        if self._fits(pieces, self.template.max_length):
            return _QueryPieces(query, pieces)
        length = sum(map(len, pieces)) + len(self._end)
        if self._long_query == "error":
            raise UserError(
                f"The query {shorten(query, 60)} leaves no room for a passage: with the template it takes {length} of "
                f"{self.template.max_length} tokens. Shorten it, raise --max_length, or pass --long_query truncate."
            )
        half = self.template.max_length // 2
        low, high = 0, len(query)  # the longest known to fit, and the shortest known not to
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(self._pieces(query[:middle]), half) else (low, middle)
        cut = query[:low].rstrip()
        if not cut:
            raise UserError(
                f"--max_length {self.template.max_length} is too short for the template {self.template.text!r}."
            )
        return _QueryPieces(cut, self._pieces(cut))

    def _pieces(self, query: str) -> list[list[int]]:
        """Return the ids before, between and after the documents, separators included."""
        texts = self.template.between(query)
        pieces = []
        for i, text in enumerate(texts):
            ids = self._vocabulary.encode(text.strip())
            before = self.separator if i > 0 and text != text.lstrip() else []
            after = self.separator if i < len(texts) - 1 and text != text.rstrip() and ids else []
            pieces.append([*before, *ids, *after])
        return pieces

    def _fits(self, pieces: Sequence[Sequence[int]], limit: int) -> bool:
        return sum(map(len, pieces)) + len(self._end) + len(self.template.DOCUMENTS) <= limit


class _QueryPieces(NamedTuple):
    """A query, truncated if needed, and the ids around its documents."""

    query: str
    ids: list[list[int]]


def _separator(vocabulary: Vocabulary) -> list[int]:
    """Return the ids to put between two separately encoded words: [] if tokens include the space before a word."""
    first, second, both = (vocabulary.encode(text) for text in ("a", "b", "a b"))
    if both[: len(first)] == first and both[len(both) - len(second) :] == second:
        return both[len(first) : len(both) - len(second)]
    return []


def _shares(room: int, sizes: Sequence[int]) -> list[int]:
    """Divide `room` tokens evenly among documents; short ones leave what they do not need to long ones.

    >>> _shares(10, [2, 30]), _shares(10, [30, 30]), _shares(10, [3, 4])
    ([2, 8], [5, 5], [3, 4])
    """
    shares = [0] * len(sizes)
    for rank, i in enumerate(sorted(range(len(sizes)), key=lambda i: sizes[i])):
        shares[i] = min(sizes[i], room // (len(sizes) - rank))
        room -= shares[i]
    return shares
