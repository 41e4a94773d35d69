"""The input of reranking: a run with topics and collection, lists of candidates, or query-passage pairs.

Each is read as units that are ranked as a whole: the passages of a query or, if the output keeps the input order, one
pair.
"""

import hashlib
import itertools
import json
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from t5x._runtime.errors import UserError, located
from t5x.apps.ranking.ranking_files import (
    TEXTS,
    Collection,
    check_id,
    copying,
    fields_of,
    find_id,
    find_text,
    read_lines,
    read_run,
    read_topics,
    text_with_title,
)
from t5x.data.file_tasks import ENDINGS, ending_of, source_of
from t5x.data.sources import DataSource
from t5x.files.user_files import decoded, parsed
from t5x.metrics.ranking import Run, ranked

log = logging.getLogger(__name__)

PAIR_QUERY_IDS, PAIR_DOCUMENT_IDS = ("query_id", "qid"), ("doc_id", "docid", "pid")
_SHOWN_IDS = 5
_SPLIT = "pairs"
# A .tsv file is a table with a header if its first line has only such names.
_COLUMNS = {
    "query", *TEXTS, *PAIR_QUERY_IDS, *PAIR_DOCUMENT_IDS,
    "question", "passage", "document", "doc", "id", "title", "label", "relevance", "score", "rank",
}  # fmt: skip


class RankingUnit(NamedTuple):
    """Passages of a query.

    Attributes:
      doc_ids, texts: the passages to score.
      unscored: ids of further passages, which keep their order after these.
    """

    query_id: str
    query: str
    doc_ids: list[str]
    texts: list[str]
    unscored: list[str]


class _RankedWork:
    """Queries with ranked passages: a unit is a query.

    Args:
      before: the ranking of the input.
      queries: {query id: query}.
      top: number of passages to score per query, from the top of the ranking; None scores all.
      text: returns the text of (query id, document id).

    Attributes:
      sizes: number of passages to score per unit.
      num_queries: number of queries.
      query_ids: ids of the queries; for pairs in input order, those given in the input.
      digest: hash of everything that the results depend on.
      before: the ranking of the input; None if it has none.
      empty: number of passages without text.
    """

    def __init__(
        self, before: Run, queries: Mapping[str, str], top: int | None, text: Callable[[str, str], str], digest: str
    ):
        self.before = before
        self.queries = self.query_ids = queries
        self.num_queries = len(queries)
        self.sizes = [min(len(scores), top or len(scores)) for scores in before.values()]
        self.digest = digest
        self._top = top
        self._text = text

    def units(self, start: int, stop: int) -> Iterator[RankingUnit]:
        for query in list(self.before)[start:stop]:
            scores = self.before[query]
            unscored = ranked(scores)[self._top or len(scores) :]
            excluded = {*unscored}
            first = [doc for doc in scores if doc not in excluded]
            yield RankingUnit(query, self.queries[query], first, [self._text(query, doc) for doc in first], unscored)


class RunWork(_RankedWork):
    """The passages of a run.

    Args:
      run: a TREC or MS MARCO run file.
      topics, collection: see `t5x.apps.ranking.ranking_files`. `topics` may be omitted for a BEIR collection.
      top: number of passages to score per query, from the top of the run; None scores all.
      skip_unknown: skip and count queries and passages without a text instead of raising an error.
    """

    def __init__(self, run: str, collection: str, topics: str | None, top: int | None, *, skip_unknown: bool):
        if topics is None and not os.path.isdir(collection):
            raise UserError("--run needs --topics, a file of queries. (Only a BEIR directory contains its queries.)")
        scores = read_run(run)
        queries = read_topics(collection if topics is None else topics)
        unknown = [query for query in scores if query not in queries]
        _check_unknown(unknown, f"query id(s) of {run} are not in {topics or collection}", skip_unknown)
        before = {query: of_query for query, of_query in scores.items() if query in queries}
        passages = Collection(collection, {doc for of_query in before.values() for doc in of_query})
        _check_unknown(passages.missing, f"document id(s) of {run} are not in {collection}", skip_unknown)
        missing = set(passages.missing)
        before = {
            query: known
            for query, of_query in before.items()
            if (known := {doc: score for doc, score in of_query.items() if doc not in missing})
        }
        if not before:
            raise UserError(f"{run} has no passage to rerank.")
        ranking = [[query, queries[query], of_query] for query, of_query in before.items()]
        digest = _digest([passages.digest, top, *ranking])
        super().__init__(
            before, {query: queries[query] for query in before}, top, lambda query, doc: passages.text(doc), digest
        )
        self.empty = len(passages.empty)


class ListWork(_RankedWork):
    """Candidates of queries with their texts, as a JSON list or JSON lines.

        {"query": "…", "hits": [{"qid": 264014, "docid": "5611210", "content": "…", "rank": 1, "score": 15.8}, …]}
        {"query": {"text": "…", "qid": "264014"}, "candidates": [{"docid": "5611210", "doc": {…}, "score": 15.8}, …]}

    The query id may be beside the query, inside it or in its hits; queries without an id are numbered.

    Args:
      path: the file, which is held in memory.
      top: see `RunWork`.
    """

    def __init__(self, path: str, top: int | None):
        before: dict[str, dict[str, float]] = {}
        queries: dict[str, str] = {}
        texts: dict[str, dict[str, str]] = {}
        for number, entry in enumerate(_read_entries(path), start=1):
            where = f"{path}, entry {number}"
            hits = entry.get("hits", entry.get("candidates"))
            if not isinstance(hits, list) or not all(isinstance(hit, dict) for hit in hits):
                raise UserError(f'{where} has no list "hits" or "candidates" of objects.')
            if not hits:
                log.warning("skipping %s: it has no candidates", where)
                continue
            query = entry["query"] if isinstance(entry.get("query"), dict) else {"query": entry.get("query")}
            hits = [(f"{where}, candidate {rank}", hit) for rank, hit in enumerate(hits, start=1)]
            query_id = _find_query_id([(where, query), (where, entry), *hits]) or str(number)
            if query_id in queries:
                raise UserError(f"{where}: query {query_id!r} occurs a second time. Remove one of them.")
            queries[query_id] = find_text(query, ("query", "text"), where)
            before[query_id], texts[query_id] = _read_hits(query_id, hits)
        if not before:
            raise UserError(f"{path} has no candidates.")
        digest = _digest([top, queries, texts, before])
        super().__init__(before, queries, top, lambda query, doc: texts[query][doc], digest)
        self.empty = sum(not text.strip() for of_query in texts.values() for text in of_query.values())


class _Pair(NamedTuple):
    """A pair and its position. Missing ids are numbered."""

    where: str
    query_id: str
    query: str
    doc_id: str
    text: str


class PairWork:
    """Pairs in input order: JSON objects with `query`, `text` and optionally `query_id` and `doc_id`; a .tsv, .csv or
    .parquet file with these columns; lines `query<TAB>passage`; or `query_id<TAB>doc_id<TAB>query<TAB>passage`.

    Either all lines have ids or none. Without ids, queries are numbered in order and passages by their line.

    Args:
      path: the file, which is read twice; standard input (-) is copied to a temporary file first.
      by_query: a unit is all passages of a query, which must be consecutive; otherwise each pair is a unit.
      check: called with each query and its id; raises a UserError for a query that cannot be used.

    Attributes: see `_RankedWork`.
    """

    before = None

    def __init__(self, path: str, *, by_query: bool, check: Callable[[str, str], None] = lambda query_id, query: None):
        self._path = path
        self._name = "standard input" if path == "-" else path
        self._by_query = by_query
        self._table = _open_table(path)
        self._copy = None
        if path == "-":
            with copying(self._name):
                # Without a name: it is gone however this program ends.
                self._copy = tempfile.TemporaryFile()  # noqa: SIM115
                shutil.copyfileobj(sys.stdin.buffer, self._copy)
                self._copy.flush()
        self.sizes: list[int] = []
        self.empty = 0
        # A hash of the text of each query whose id is given: the texts may be more than memory holds.
        self.query_ids: dict[str, bytes] = {}
        self._has_ids = (False, False)  # of queries, and of passages
        self._numbered = 0
        digest = hashlib.sha256()
        for unit in self._units(self._check_pairs(check)):
            self.sizes.append(len(unit.doc_ids))
            self.empty += sum(not text.strip() for text in unit.texts)
            digest.update(json.dumps(unit).encode())
        if not self.sizes:
            raise UserError(f"{self._name} is empty: there are no pairs to score.")
        self.num_queries = len(self.query_ids) if self._has_ids[0] else self._numbered
        self.digest = digest.hexdigest()

    def units(self, start: int, stop: int) -> Iterator[RankingUnit]:
        return itertools.islice(self._units(self._pairs()), start, stop)

    def _units(self, pairs: Iterator[_Pair]) -> Iterator[RankingUnit]:
        if not self._by_query:
            for _, query_id, query, doc_id, text in pairs:
                yield RankingUnit(query_id, query, [doc_id], [text], [])
            return
        seen: set[str] = set()
        for query_id, of_query in itertools.groupby(pairs, key=lambda pair: pair.query_id):
            passages: dict[str, str] = {}
            for pair in of_query:
                where, doc_id = pair.where, pair.doc_id
                for identifier in (query_id, doc_id):
                    _check_id(identifier, where, " (--format jsonl accepts any id.)")
                if query_id in seen:
                    raise UserError(
                        f"{where}: query {query_id!r} occurred before, with others in between. To be ranked, the "
                        "passages of a query must be consecutive: sort the file, or pass --format jsonl."
                    )
                if doc_id in passages:
                    raise UserError(
                        f"{where}: document {doc_id!r} occurs a second time for query {query_id!r}. Remove one of them."
                    )
                passages[doc_id] = pair.text
            seen.add(query_id)
            yield RankingUnit(query_id, pair.query, [*passages], [*passages.values()], [])

    def _check_pairs(self, check: Callable[[str, str], None]) -> Iterator[_Pair]:
        """Yield the pairs. Check that an id belongs to one query, and count duplicates among adjacent pairs."""
        doc_ids: set[str] = set()
        last, duplicates = None, 0
        for pair in self._pairs():
            query = pair.query_id, pair.query
            if query != last:
                if not pair.query.strip():
                    raise UserError(f"{pair.where}: the query is empty.")
                check(*query)
                if self._has_ids[0] or self._by_query:
                    text_hash = hashlib.blake2b(pair.query.encode(), digest_size=8).digest()
                    if self.query_ids.setdefault(pair.query_id, text_hash) != text_hash:
                        raise UserError(
                            f"{pair.where}: query {pair.query_id!r} is {pair.query[:60]!r} here, but another text "
                            "before. An id must belong to one query."
                        )
                last, doc_ids = query, set()
                self._numbered += 1
            if self._has_ids[1] and not self._by_query:
                duplicates += pair.doc_id in doc_ids
                doc_ids.add(pair.doc_id)
            yield pair
        if duplicates:
            log.warning("%s: %d document(s) occur twice for a query; each is scored", self._name, duplicates)

    def _records(self) -> Iterator[tuple[str, int, dict[str, Any] | list[str]]]:
        """Yield the position, number and content of every row or line."""
        if self._table is not None:
            for index in range(self._table.num_examples(_SPLIT)):
                yield f"{self._path}, row {index + 1}", index + 1, self._table.example(_SPLIT, index)
            return
        path = self._path
        if self._copy is not None:
            self._copy.seek(0)  # where opening it again does not start at the beginning, as on macOS
            path = f"/dev/fd/{self._copy.fileno()}"
        for line in read_lines(path, self._name):
            yield line.where, line.number, fields_of(line)

    def _pairs(self) -> Iterator[_Pair]:
        has_ids: tuple[bool, bool] | None = None
        count, last, columns = 0, None, None
        for where, number, content in self._records():
            if isinstance(content, dict):
                query, text = find_text(content, ("query",), where), find_text(content, TEXTS, where)
                ids = find_id(content, PAIR_QUERY_IDS, where), find_id(content, PAIR_DOCUMENT_IDS, where)
            else:
                if len(content) not in (2, 4) or columns not in (None, len(content)):
                    raise UserError(
                        f"{where} has {len(content)} column(s). It must be `query<TAB>passage` or `query_id<TAB>doc_id"
                        "<TAB>query<TAB>passage`, the same in all lines."
                    )
                columns = len(content)
                ids = (content[0], content[1]) if columns == 4 else (None, None)
                query, text = content[-2:]
            for name, value, is_needed in zip(("query_id", "doc_id"), ids, has_ids or (None, None), strict=True):
                if value == "":
                    raise UserError(f"{where}: the {name} is empty.")
                if is_needed not in (None, value is not None):
                    raise UserError(
                        f"{where} has {'no' if is_needed else 'a'} {name}, unlike the lines before it. Give it in all "
                        "lines or in none; without it, they are numbered."
                    )
            has_ids = self._has_ids = ids[0] is not None, ids[1] is not None
            if query != last:
                count, last = count + 1, query
            yield _Pair(where, ids[0] or str(count), query, ids[1] or str(number), text)


Work = RunWork | ListWork | PairWork  # all units of an input


def _open_table(path: str) -> DataSource | None:
    """Return the rows of a .csv or .parquet file, or of a .tsv file with a header; None for other files."""
    ending = ending_of(path)
    if ending not in ENDINGS - {".jsonl"}:
        return None
    if ending == ".tsv":
        first = next(read_lines(path), None)
        cells = [] if first is None else first.text().split("\t")
        if not {cell.lower() for cell in cells} <= _COLUMNS or not cells:
            return None
    source = source_of({_SPLIT: path})
    fields = source.example(_SPLIT, 0)
    if "query" not in fields or not any(name in fields for name in TEXTS):
        raise UserError(
            f"{path} has the columns {', '.join(map(str, fields))}, but needs query and text (and optionally query_id "
            "and doc_id). Rename them in its first line."
        )
    return source


def _find_query_id(records: Sequence[tuple[str, dict[str, Any]]]) -> str | None:
    """Return the id of a query, which must be the same in all (position, object) that contain one."""
    query_id = None
    for where, record in records:
        identifier = find_id(record, PAIR_QUERY_IDS, where)
        if identifier is not None and identifier != (query_id := query_id or _check_id(identifier, where)):
            raise UserError(
                f"{where}: the query id is {identifier!r} here, {query_id!r} before. An entry is for one query."
            )
    return query_id


def _read_hits(query_id: str, hits: Sequence[tuple[str, dict[str, Any]]]) -> tuple[dict[str, float], dict[str, str]]:
    """Return {document id: score} and {document id: text} of a query's (position, candidate)."""
    scores, texts = {}, {}
    for rank, (where, hit) in enumerate(hits, start=1):
        doc_id = _check_id(find_id(hit, PAIR_DOCUMENT_IDS, where) or str(rank), where)
        if doc_id in texts:
            raise UserError(f"{where}: document {doc_id!r} occurs a second time for query {query_id!r}.")
        doc = hit.get("doc", hit)
        if not isinstance(doc, str | dict):
            raise UserError(f'{where}: "doc" is {str(doc)[:60]!r}; it must be a string, or an object with a text.')
        texts[doc_id] = find_text(hit, ("doc",), where) if isinstance(doc, str) else text_with_title(doc, where)
        by_score = "score" in hit
        scores[doc_id] = _number(hit, "score", where) if by_score else -_number({"rank": rank, **hit}, "rank", where)
    return scores, texts


def _number(hit: dict[str, Any], name: str, where: str) -> float:
    value = hit[name]
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: the {name} is {str(value)[:60]!r}; it must be a number.")
    return number


def _check_id(identifier: str, where: str, hint: str = "") -> str:
    with located(where):
        return check_id(identifier, hint)


def _check_unknown(ids: Sequence[str], what: str, skip: bool) -> None:
    if ids:
        message = f"{len(ids)} {what}: {', '.join(ids[:_SHOWN_IDS])}{', …' if len(ids) > _SHOWN_IDS else ''}"
        if not skip:
            raise UserError(f"{message}. Pass --skip_unknown to skip them.")
        log.warning("skipping %s", message)


def _read_entries(path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON list or of JSON lines."""
    lines = list(read_lines(path))
    if lines and lines[0].content.lstrip().startswith(b"["):
        entries = parsed(decoded(b"\n".join(line.content for line in lines), path), path)
    else:
        entries = (parsed(line.text(), line.where) for line in lines)
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict):
            raise UserError(f"{path}, entry {number} is not a JSON object.")
        yield entry


def _digest(values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    for value in values:
        digest.update(json.dumps(value).encode())
    return digest.hexdigest()
