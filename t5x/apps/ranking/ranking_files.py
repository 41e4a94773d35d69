"""Files of passages, queries, judgments (qrels) and runs.

Only the positions of passages are kept in memory, so collections may be large. Judgments and runs are in the formats of
TREC, MS MARCO and BEIR. Their fields are separated by whitespace; the first line decides the format of a run:

    qrels             query  0|Q0  document  grade             TREC and MS MARCO
    qrels, BEIR       query  document  grade                   after the header: query-id  corpus-id  score
    run, TREC         query  Q0  document  rank  score  tag
    run, MS MARCO     query  document  rank

Files may be remote, and compressed.
"""

import contextlib
import dataclasses
import hashlib
import logging
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from t5x._runtime.errors import UserError
from t5x.files import user_files
from t5x.files.remote import is_remote
from t5x.files.user_files import TextLine, can_seek, expand, open_binary
from t5x.metrics.ranking import PerQuery, Qrels, Run, compare, per_query, ranked, table
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)

DOCUMENT_IDS = ("_id", "id", "pid", "docid", "doc_id")
QUERY_IDS = ("_id", "id", "qid", "query_id", "topic_id")
TEXTS = ("contents", "passage", "text", "segment", "body", "content")
QUERIES = ("text", "query", "title")
_UNTITLED = ("contents", "passage", "content")  # layouts whose text holds the title already
_SUFFIXES = (".jsonl", ".json", ".tsv", ".txt")
# The id where a line begins with it, which saves decoding the passages that are not requested.
_FIRST_ID = re.compile(rb'\s*\{\s*"(_id|id|pid)"\s*:\s*(?:"([^"\\]+)"|(\d+))\s*[,}]')
_BEFORE = {b"_id": (), b"id": (b'"_id"',), b"pid": (b'"_id"', b'"id"')}  # fields that would be the id instead


def read_lines(path: str, name: str | None = None) -> Iterator[TextLine]:
    """Yield the non-blank lines of a file.

    Args:
      name: name of the file in messages; None is the path.
    """
    return (line for line in user_files.read_lines(path, name) if line is not None and line.content.strip())


def fields_of(line: TextLine) -> dict[str, Any] | list[str]:
    """Return the JSON object of the line or, if it does not begin with {, its tab-separated fields."""
    text = line.text()
    return user_files.parsed(text, line.where) if text.lstrip().startswith("{") else text.split("\t")


def find_id(record: Mapping[str, Any], names: Sequence[str], where: str) -> str | None:
    """Return the first of these fields that is present, as an id: a string or an integer."""
    for name in names:
        if (value := record.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                raise UserError(f'{where}: "{name}" is {value!r}; an id must be a string or an integer.')
            user_files.check_unicode(str(value), f'{where}: "{name}"')
            return str(value)
    return None


def find_text(record: Mapping[str, Any], names: Sequence[str], where: str, *, allow_blank: bool = True) -> str:
    """Return the first of these fields that is present, which must be a string."""
    for name in names:
        if (value := record.get(name)) is not None:
            if not isinstance(value, str):
                raise UserError(f'{where}: "{name}" is {str(value)[:60]!r}; it must be a string.')
            if not allow_blank and not value.strip():
                raise UserError(f'{where}: "{name}" is empty.')
            user_files.check_unicode(value, f'{where}: "{name}"')
            return value
    raise UserError(f"{where} has no {' or '.join(names[:2])} (fields: {', '.join(list(record)[:8]) or 'none'}).")


@contextlib.contextmanager
def copying(name: str) -> Iterator[None]:
    """Report a full disk while a temporary copy of a file is written."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"A copy of {name} cannot be written to {tempfile.gettempdir()}: {error.strerror or error}. Free disk "
            "space there, or set TMPDIR to another directory."
        ) from error


class Collection:
    """Passages by id.

    A line is `id<TAB>text`, MS MARCO's `id<TAB>url<TAB>title<TAB>body`, or a JSON object: Anserini (`id`, `contents`),
    BEIR (`_id`, `title`, `text`) or MS MARCO v2 (`pid`, `passage`; `docid`, `title`, `body`). A title is put before its
    text.

    Args:
      path: a file, a glob pattern, or a directory of files. In a BEIR directory, `corpus.jsonl` is read.
      ids: ids of the passages to find. Compressed and remote files are read once, and the matching lines are copied to
        a temporary file.

    Attributes:
      missing: the ids that were not found.
      empty: the ids whose text is empty.
      digest: hash of the lines that were found.
    """

    def __init__(self, path: str, ids: Iterable[str]):
        self.path = path
        self._requested_ids = {identifier.encode() for identifier in ids}
        self._offsets: dict[str, tuple[BinaryIO, int]] = {}  # file and offset of a passage's line
        self.empty: list[str] = []
        digest = hashlib.sha256()
        for name in files_of(path, "corpus"):
            self._index(name, digest)
        self.digest = digest.hexdigest()
        self.missing = sorted(i.decode() for i in self._requested_ids if i.decode() not in self._offsets)
        del self._requested_ids

    def text(self, identifier: str) -> str:
        """Return the text of a passage."""
        file, offset = self._offsets[identifier]
        file.seek(offset)
        where = f"{self.path}: passage {identifier!r}"
        current, text = _parse_document(TextLine(where, 0, file.readline(), offset))
        if current != identifier:
            raise UserError(f"{where} has moved: the file has changed during the run. Run the command again.")
        return text

    def _index(self, name: str, digest: Any) -> None:
        size = f", {os.path.getsize(name) / 1e9:.1f} GB" if not is_remote(name) else ""
        log.info("searching for %d passage(s) in %s%s", len(self._requested_ids), name, size)
        in_place = can_seek(name)
        file = open_binary(name) if in_place else tempfile.TemporaryFile()  # noqa: SIM115
        for line in read_lines(name):
            content = line.content
            quick = _quick_id(content)
            if quick is not None and quick not in self._requested_ids:
                continue
            identifier, text = _parse_document(line)
            if identifier.encode() not in self._requested_ids:
                continue
            if identifier in self._offsets:
                raise UserError(f"{line.where}: passage {identifier!r} occurs a second time. Remove one of them.")
            offset = line.offset
            if not in_place:
                offset = file.tell()
                with copying(name):
                    file.write(content + b"\n")
            self._offsets[identifier] = file, offset
            digest.update(content + b"\n")
            if not text.strip():
                self.empty.append(identifier)
        with copying(name):
            file.flush()


def read_topics(path: str) -> dict[str, str]:
    """Return {query id: query} from lines `id<TAB>query` or JSON objects with an id and a text.

    Args:
      path: a file, or a BEIR directory, where `queries.jsonl` is read.
    """
    topics: dict[str, str] = {}
    for name in files_of(path, "queries"):
        for line in read_lines(name):
            content = fields_of(line)
            if isinstance(content, dict):
                identifier, text = _needed_id(content, QUERY_IDS, line.where), find_text(content, QUERIES, line.where)
            else:
                identifier, text = content[0], "\t".join(content[1:])
                if len(content) == 1:
                    raise UserError(f"{line.where} is not `id<TAB>query`: {identifier[:60]!r}")
            if identifier in topics:
                raise UserError(f"{line.where}: query {identifier!r} occurs a second time. Remove one of them.")
            topics[identifier] = text
    if not topics:
        raise UserError(f"{path} has no query.")
    return topics


def _parse_document(line: TextLine) -> tuple[str, str]:
    """Return (id, text) of a line of a collection."""
    content = fields_of(line)
    if isinstance(content, dict):
        return _needed_id(content, DOCUMENT_IDS, line.where), text_with_title(content, line.where)
    identifier, *fields = content
    if not fields:
        raise UserError(f"{line.where} is neither `id<TAB>text` nor a JSON object: {identifier[:60]!r}")
    if len(fields) == 3 and re.match(r"https?://", fields[0]):
        return identifier, " ".join(field for field in fields[1:] if field)
    return identifier, "\t".join(fields)


def text_with_title(record: dict[str, Any], where: str) -> str:
    """Return the text of a passage, after its title if that is a separate field."""
    text = find_text(record, TEXTS, where)
    if any(record.get(name) is not None for name in _UNTITLED) or not record.get("title"):
        return text
    return f"{find_text(record, ('title',), where)} {text}".strip()


def files_of(path: str, beir: str) -> list[str]:
    """Return the files that a path stands for.

    Args:
      beir: name of the file to read in a BEIR directory.
    """
    if is_remote(path) or not os.path.isdir(path):
        return expand(path)
    names = sorted(os.listdir(path))
    if named := [name for name in names if name in (f"{beir}.jsonl", f"{beir}.jsonl.gz")]:
        return [os.path.join(path, named[0])]
    named = [name for name in names if name.removesuffix(".gz").endswith(_SUFFIXES)]
    if not named or beir != "corpus":
        raise UserError(f"{path} is a directory without {beir}.jsonl; it has {', '.join(names[:8]) or 'no files'}.")
    return [os.path.join(path, name) for name in named]


def _quick_id(raw: bytes) -> bytes | None:
    """Return the id of a line if it can be found without decoding the line."""
    if raw.lstrip()[:1] != b"{":
        return raw.partition(b"\t")[0]
    match = _FIRST_ID.match(raw)
    if match is None or any(name in raw for name in _BEFORE[match[1]]):
        return None
    return match[2] or match[3]


def _needed_id(record: dict[str, Any], names: Sequence[str], where: str) -> str:
    if (identifier := find_id(record, names, where)) is None:
        raise UserError(f"{where} has no id: one of {', '.join(names)} (fields: {', '.join(list(record)[:8])}).")
    return identifier


# --- Judgments and runs -----------------------------------------------------------------------------------------------

Path = str | os.PathLike[str]
_TREC_RUN = ("query", "Q0", "document", "rank", "score", "tag")
_MSMARCO_RUN = ("query", "document", "rank")
_QRELS = ("query", "iteration", "document", "grade")
_BEIR_QRELS = ("query", "document", "grade")
_BEIR_HEADER = ["query-id", "corpus-id", "score"]


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Read a file of judgments as {query: {document: grade}}.

    Raises:
      UserError: if the file cannot be read or a line is invalid.
    """
    qrels: dict[str, dict[str, int]] = {}
    for where, fields in _read_fields(path, "judgments", [_QRELS]):
        _add(qrels, where, fields, _number(where, fields, "grade", int))
    return qrels


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """Read a run as {query: {document: score}}; if the file has only ranks, the score is minus the rank.

    Raises:
      UserError: if the file cannot be read or a line is invalid.
    """
    run: dict[str, dict[str, float]] = {}
    for where, fields in _read_fields(path, "a run", [_TREC_RUN, _MSMARCO_RUN]):
        if "score" in fields:
            _add(run, where, fields, _number(where, fields, "score", float))
        else:
            _add(run, where, fields, -float(_number(where, fields, "rank", int)))
    return run


def ranking_lines(
    form: str, query: str, scores: Mapping[str, float], logits: Mapping[str, Sequence[float]]
) -> Iterator[bytes]:
    """Yield the output lines of a query, ranked; in the formats of TREC and jsonl, scores are written without loss.

    Args:
      form: `trec`, `msmarco` or `jsonl`.
      scores: scores of the documents in input order.
      logits: label logits of the scored documents; jsonl writes only these documents, in input order.

    Raises:
      UserError: if an id cannot be written.
    """
    if form == "jsonl":
        for document, of_labels in logits.items():
            named = dict(zip(("true_logit", "false_logit"), map(float, of_labels), strict=False))
            yield jsonl.encode({"query_id": query, "doc_id": document, "score": float(scores[document]), **named})
        return
    for rank, document in enumerate(ranked(scores, query), start=1):
        if form == "trec":
            line = f"{check_id(query)} Q0 {check_id(document)} {rank} {float(scores[document])!r} t5x\n"
        else:
            line = f"{check_id(query)}\t{check_id(document)}\t{rank}\n"
        yield line.encode()


def check_id(text: str, hint: str = "") -> str:
    """Return `text` if it can be an id in a run, or raise a UserError, whose message ends with `hint`."""
    if not isinstance(text, str) or not re.fullmatch(r"\S+", text, re.ASCII):
        raise UserError(f"{text!r} cannot be written as an id: ids must be non-empty strings without whitespace.{hint}")
    return text


def _read_fields(path: Path, what: str, kinds: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the position (file:line) and the named fields of every line that is not blank.

    Args:
      what: content of the file, for messages.
      kinds: names of the fields of a line. The first line decides between them; BEIR's is a header.
    """
    count = 0
    for count, line in enumerate(read_lines(os.fspath(path)), start=1):
        line.text()  # checks that it is UTF-8
        values = [value.decode() for value in line.content.split()]  # ids may contain non-ASCII whitespace
        if count == 1 and kinds == [_QRELS] and values == _BEIR_HEADER:
            kinds = [_BEIR_QRELS]
            continue
        matching = [kind for kind in kinds if len(kind) == len(values)]
        if not matching:
            needed = " or ".join(f"{len(kind)} ({' '.join(kind)})" for kind in kinds)
            content = f"{len(values)} fields, but a line of {what} has {needed}: {' '.join(values)[:80]!r}"
            raise UserError(f"{line.where}: {content}")
        kinds = matching
        yield line.where, dict(zip(kinds[0], values, strict=True))
    if not count:
        raise UserError(f"{os.fspath(path)} is empty.")


def _add(values: dict[str, dict], where: str, fields: Mapping[str, str], value: float) -> None:
    query, document = fields["query"], fields["document"]
    if document in values.setdefault(query, {}):
        raise UserError(f"{where}: document {document!r} occurs a second time for query {query!r}. Remove one.")
    values[query][document] = value


def _number(where: str, fields: Mapping[str, str], name: str, kind: Callable[[str], float]) -> float:
    try:
        value = kind(fields[name])
    except ValueError:
        value = math.nan
    if math.isnan(value):
        needed = "an integer" if kind is int else "a number"
        raise UserError(f"{where}: the {name} must be {needed}, not {fields[name]!r}.")
    return value


def evaluation_report(
    qrels: Qrels,
    runs: Mapping[str, Run],
    measures: Sequence[str],
    *,
    relevance_level: int = 1,
    missing_as_zero: bool = False,
    per_query_path: str | None = None,
    as_json: bool = False,
) -> str:
    """Return a table of the runs' measures, followed by how each run differs from the first.

    Args:
      runs: {name: run}; the first is the baseline.
      measures, relevance_level, missing_as_zero: see `t5x.metrics.ranking.per_query`.
      per_query_path: file for the values of every query, as JSON lines.
      as_json: return a JSON object with `runs` and `differences` instead.
    """
    values: dict[str, PerQuery] = {}
    for name, run in runs.items():
        if unjudged := sum(query not in qrels for query in run):
            log.warning("%s: %d of %d queries have no judgments and are ignored", name, unjudged, len(run))
        values[name] = per_query(qrels, run, measures, relevance_level=relevance_level, missing_as_zero=missing_as_zero)
    if per_query_path is not None:
        jsonl.replace(per_query_path, map(jsonl.encode, _by_query(values)))
    as_table = table(values)  # which checks that the runs can be compared
    (_, base), *others = values.items()
    differences = [
        {"run": name, "measure": measure, **dataclasses.asdict(compare(base[measure], of_queries))}
        for name, of_run in others
        for measure, of_queries in of_run.items()
        if len(of_queries) > 1
    ]
    if as_json:
        means = {name: {m: sum(v.values()) / len(v) for m, v in of_run.items()} for name, of_run in values.items()}
        return jsonl.encode({"runs": means, "differences": differences}).decode().rstrip()
    lines = [
        f"{row['run']}, {row['measure']}: {row['difference']:+.4f}, p = {row['t_test']:.2g} (t-test), "
        f"{row['randomization']:.2g} (randomization)"
        for row in differences
    ]
    return "\n".join([as_table, *lines])


def _by_query(values: Mapping[str, PerQuery]) -> list[dict]:
    return [
        {"run": name, "query_id": query, **{measure: of_queries[query] for measure, of_queries in of_run.items()}}
        for name, of_run in values.items()
        for query in next(iter(of_run.values()))
    ]
