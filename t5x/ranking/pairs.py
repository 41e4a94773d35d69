"""The input of reranking: a run with topics and collection, lists of candidates, or query-passage pairs.

Each is read as units that are ranked as a whole: the passages of a query or, if the output keeps the input order, one
pair.
"""

import hashlib
import json
import logging
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from t5x.errors import UserError
from t5x.files.text_lines import decoded, parsed
from t5x.metrics.ranking import Run, ranked
from t5x.ranking import records
from t5x.ranking.collections import TEXTS, Collection, read_topics, text_with_title
from t5x.ranking.trec_files import check_id, read_run

log = logging.getLogger(__name__)

_QUERY_IDS, _DOCUMENT_IDS = ("query_id", "qid"), ("doc_id", "docid", "pid")
_SHOWN = 5


class Unit(NamedTuple):
    """Passages of a query.

    Attributes:
      doc_ids, texts: the passages to score.
      rest: ids of further passages, which keep their order after these.
    """

    query_id: str
    query: str
    doc_ids: list[str]
    texts: list[str]
    rest: list[str]


class Work(Protocol):
    """All units of an input.

    Attributes:
      sizes: number of passages to score per unit.
      num_queries: number of queries.
      query_ids: ids of the queries; for pairs in input order, those given in the input.
      digest: hash of everything that the results depend on.
      before: the ranking of the input; None if it has none.
      empty: number of passages without text.
    """

    sizes: list[int]
    num_queries: int
    query_ids: Iterable[str]
    digest: str
    before: Run | None
    empty: int

    def units(self, start: int, stop: int) -> Iterator[Unit]: ...


class RunWork:
    """The passages of a run.

    Args:
      run: a TREC or MS MARCO run file.
      topics, collection: see `t5x.ranking.collections`. `topics` may be omitted for a BEIR collection.
      top: number of passages to score per query, from the top of the run; None scores all.
      skip_unknown: skip and count queries and passages without a text instead of raising an error.
    """

    def __init__(self, run: str, collection: str, topics: str | None, top: int | None, *, skip_unknown: bool):
        if topics is None and not os.path.isdir(collection):
            raise UserError("--run needs --topics: a file of queries. (Only a BEIR directory has them itself.)")
        read = read_run(run)
        queries = read_topics(collection if topics is None else topics)
        unknown = [query for query in read if query not in queries]
        _unknown(unknown, f"query id(s) of {run} are not in {topics or collection}", skip_unknown)
        self.before = {query: scores for query, scores in read.items() if query in queries}
        self.collection = Collection(collection, {doc for scores in self.before.values() for doc in scores})
        missing = self.collection.missing
        _unknown(missing, f"document id(s) of {run} are not in {collection}", skip_unknown)
        if missing:
            gone = set(missing)
            self.before = {
                query: left
                for query, scores in self.before.items()
                if (left := {doc: score for doc, score in scores.items() if doc not in gone})
            }
        if not self.before:
            raise UserError(f"Nothing of {run} is left to rerank.")
        self._top = top
        self.queries = {query: queries[query] for query in self.before}
        self.query_ids, self.num_queries = self.queries.keys(), len(self.queries)
        self.empty = len(self.collection.empty)
        self.sizes = [min(len(scores), top or len(scores)) for scores in self.before.values()]
        given = [[query, queries[query], scores] for query, scores in self.before.items()]
        self.digest = _digest([self.collection.digest, top, *given])

    def units(self, start: int, stop: int) -> Iterator[Unit]:
        for query in list(self.before)[start:stop]:
            first, rest = _first(self.before[query], self._top)
            yield Unit(query, self.queries[query], first, [self.collection.text(doc) for doc in first], rest)


class ListWork:
    """Candidates of queries with their texts, as a JSON list or JSON lines.

        {"query": "…", "hits": [{"qid": 264014, "docid": "5611210", "content": "…", "rank": 1, "score": 15.8}, …]}
        {"query": {"text": "…", "qid": "264014"}, "candidates": [{"docid": "5611210", "doc": {…}, "score": 15.8}, …]}

    The query id may be beside the query, inside it or in its hits; queries without an id are numbered.

    Args:
      path: the file, which is held in memory.
      top: see `RunWork`.
    """

    def __init__(self, path: str, top: int | None):
        self.before: dict[str, dict[str, float]] = {}
        self.queries: dict[str, str] = {}
        self._texts: dict[str, dict[str, str]] = {}
        self._top = top
        for number, entry in enumerate(_entries(path), start=1):
            self._add(entry, number, f"{path}, entry {number}")
        if not self.before:
            raise UserError(f"{path} has no candidates.")
        self.query_ids, self.num_queries = self.queries.keys(), len(self.queries)
        self.empty = sum(not text.strip() for texts in self._texts.values() for text in texts.values())
        self.sizes = [min(len(scores), top or len(scores)) for scores in self.before.values()]
        self.digest = _digest([top, self.queries, self._texts, self.before])

    def units(self, start: int, stop: int) -> Iterator[Unit]:
        for query in list(self.before)[start:stop]:
            first, rest = _first(self.before[query], self._top)
            yield Unit(query, self.queries[query], first, [self._texts[query][doc] for doc in first], rest)

    def _add(self, entry: dict[str, Any], number: int, where: str) -> None:
        query = entry.get("query")
        asked = query if isinstance(query, dict) else {"query": query}
        hits = entry.get("hits", entry.get("candidates"))
        if not isinstance(hits, list) or not all(isinstance(hit, dict) for hit in hits):
            raise UserError(f'{where} has no list "hits" or "candidates" of objects.')
        if not hits:
            log.warning("%s has no candidates; it is left out", where)
            return
        hits = [(f"{where}, candidate {place}", hit) for place, hit in enumerate(hits, start=1)]
        query_id = _query_id([(where, asked), (where, entry), *hits]) or str(number)
        if query_id in self.before:
            raise UserError(f"{where}: query {query_id!r} is there a second time. Keep one of them.")
        self.queries[query_id] = records.text_in(asked, ("query", "text"), where)
        scores, texts = self.before.setdefault(query_id, {}), self._texts.setdefault(query_id, {})
        for place, (where_hit, hit) in enumerate(hits, start=1):
            doc_id = _check_id(records.id_in(hit, _DOCUMENT_IDS, where_hit) or str(place), where_hit)
            if doc_id in texts:
                raise UserError(f"{where_hit}: document {doc_id!r} is there a second time for query {query_id!r}.")
            texts[doc_id] = _text_of(hit, where_hit)
            if "score" in hit:
                scores[doc_id] = _number(hit["score"], "score", where_hit)
            else:
                scores[doc_id] = -_number(hit.get("rank", place), "rank", where_hit)


class _Line(NamedTuple):
    """A pair and its position. Missing ids are numbered."""

    where: str
    query_id: str
    query: str
    doc_id: str
    text: str


class PairWork:
    """Pairs in input order: JSON objects with `query`, `text` and optionally `query_id` and `doc_id`; lines
    `query<TAB>passage`; or `query_id<TAB>doc_id<TAB>query<TAB>passage`.

    Either all lines have ids or none. Without ids, queries are numbered in order and passages by their line.

    Args:
      path: the file, which is read twice; standard input (-) is copied to a temporary file first.
      by_query: a unit is all passages of a query, which must be consecutive; otherwise each pair is a unit.
      check: called with each query and its id; raises a UserError for a query that cannot be used.
    """

    def __init__(self, path: str, *, by_query: bool, check: Callable[[str, str], None] = lambda query_id, query: None):
        self._path = path
        self._name = "standard input" if path == "-" else path
        self._by_query = by_query
        self._copy = None
        if path == "-":
            with records.copying(self._name):
                # Without a name: it is gone however this program ends.
                self._copy = tempfile.TemporaryFile()  # noqa: SIM115
                shutil.copyfileobj(sys.stdin.buffer, self._copy)
                self._copy.flush()
        self.before = None
        self.sizes: list[int] = []
        self.empty = 0
        # A hash of the text of each query whose id is given: the texts may be more than memory holds.
        self.query_ids: dict[str, bytes] = {}
        self._has_ids = (False, False)  # of queries, and of passages
        self._numbered = 0
        digest = hashlib.sha256()
        for unit in self._units(self._checked(check)):
            self.sizes.append(len(unit.doc_ids))
            self.empty += sum(not text.strip() for text in unit.texts)
            digest.update(json.dumps(unit).encode())
        if not self.sizes:
            raise UserError(f"{self._name} is empty: there is no pair to score.")
        self.num_queries = len(self.query_ids) if self._has_ids[0] else self._numbered
        self.digest = digest.hexdigest()

    def units(self, start: int, stop: int) -> Iterator[Unit]:
        for number, unit in enumerate(self._units(self._lines())):
            if number >= stop:
                return
            if number >= start:
                yield unit

    def _units(self, pairs: Iterator[_Line]) -> Iterator[Unit]:
        unit: Unit | None = None
        seen: set[str] = set()
        for where, query_id, query, doc_id, text in pairs:
            if not self._by_query:
                yield Unit(query_id, query, [doc_id], [text], [])
                continue
            for identifier in (query_id, doc_id):
                _check_id(identifier, where, " (--format jsonl takes any.)")
            if unit is None or query_id != unit.query_id:
                if unit is not None:
                    yield unit
                if query_id in seen:
                    raise UserError(
                        f"{where}: query {query_id!r} was there before, with others between. To be ranked, the "
                        "passages of a query must stand together: sort the file, or give --format jsonl."
                    )
                seen.add(query_id)
                unit, there = Unit(query_id, query, [], [], []), set()
            if doc_id in there:
                raise UserError(
                    f"{where}: document {doc_id!r} is there a second time for query {query_id!r}. Keep one of them."
                )
            there.add(doc_id)
            unit.doc_ids.append(doc_id)
            unit.texts.append(text)
        if unit is not None:
            yield unit

    def _checked(self, check: Callable[[str, str], None]) -> Iterator[_Line]:
        """Yield the pairs. Check that an id belongs to one query, and count duplicates among adjacent pairs."""
        last, there, again = None, set(), 0
        for pair in self._lines():
            query = pair.query_id, pair.query
            if query != last:
                if not pair.query.strip():
                    raise UserError(f"{pair.where}: the query is empty.")
                check(*query)
                if self._has_ids[0] or self._by_query:
                    made = hashlib.blake2b(pair.query.encode(), digest_size=8).digest()
                    if self.query_ids.setdefault(pair.query_id, made) != made:
                        raise UserError(
                            f"{pair.where}: query {pair.query_id!r} is {pair.query[:60]!r} here, and another text "
                            "before. Ids must be of one query each."
                        )
                last, there = query, set()
                self._numbered += 1
            if self._has_ids[1] and not self._by_query:
                again += pair.doc_id in there
                there.add(pair.doc_id)
            yield pair
        if again:
            log.warning("%s: %d document(s) are there a second time for their query; each is scored", self._name, again)

    def _lines(self) -> Iterator[_Line]:
        count, last = 0, None
        columns: int | None = None
        path = self._path
        if self._copy is not None:
            self._copy.seek(0)  # where opening it again is not a new beginning, as on macOS
            path = f"/dev/fd/{self._copy.fileno()}"
        for number, line in enumerate(records.lines(path)):
            where = f"{self._name}:{line.number}"
            if line.raw.lstrip().startswith(b"{"):
                record = records.object_of(line.raw, where)
                query, text = records.text_in(record, ("query",), where), records.text_in(record, TEXTS, where)
                query_id = records.id_in(record, _QUERY_IDS, where)
                doc_id = records.id_in(record, _DOCUMENT_IDS, where)
            else:
                fields = decoded(line.raw, where).split("\t")
                if len(fields) not in (2, 4) or columns not in (None, len(fields)):
                    raise UserError(
                        f"{where} has {len(fields)} column(s), where `query<TAB>passage` or `query_id<TAB>doc_id<TAB>"
                        f"query<TAB>passage` is needed{', the same in all lines' if columns else ''}."
                    )
                columns = len(fields)
                query_id, doc_id = fields[:2] if columns == 4 else (None, None)
                query, text = fields[-2:]
            if "" in (query_id, doc_id):
                raise UserError(f"{where}: the {'doc_id' if query_id else 'query_id'} is empty.")
            has_ids = (query_id is not None, doc_id is not None)
            if number == 0:
                self._has_ids = has_ids
            elif has_ids != self._has_ids:
                odd = 0 if has_ids[0] != self._has_ids[0] else 1
                raise UserError(
                    f"{where} has {'a' if has_ids[odd] else 'no'} {('query_id', 'doc_id')[odd]}, unlike the lines "
                    "before it. Give it in all lines, or in none: then they are numbered."
                )
            if query != last:
                count, last = count + 1, query
            yield _Line(where, query_id or str(count), query, doc_id or str(line.number), text)


def _query_id(places: Sequence[tuple[str, dict[str, Any]]]) -> str | None:
    """Return the id of a query, which must be the same in all places (where, object) that contain one."""
    found = None
    for where, record in places:
        told = records.id_in(record, _QUERY_IDS, where)
        if told is not None and told != (found := found or _check_id(told, where)):
            raise UserError(f"{where}: the query id is {told!r} here, and {found!r} before: an entry is of one query.")
    return found


def _text_of(hit: dict[str, Any], where: str) -> str:
    """Return the text of a candidate, whose `doc` may be an object or a string."""
    doc = hit.get("doc", hit)
    if isinstance(doc, str):
        return records.text_in(hit, ("doc",), where)
    if not isinstance(doc, dict):
        raise UserError(f'{where}: "doc" is {str(doc)[:60]!r}, where a text is needed, or an object that has one.')
    return text_with_title(doc, where)


def _number(value: Any, name: str, where: str) -> float:
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: the {name} is {str(value)[:60]!r}, where a number is needed.")
    return number


def _check_id(identifier: str, where: str, hint: str = "") -> str:
    try:
        return check_id(identifier)
    except UserError as error:
        raise UserError(f"{where}: {error}{hint}") from error


def _first(scores: dict[str, float], top: int | None) -> tuple[list[str], list[str]]:
    """Return the first `top` documents in input order, and the others in ranked order."""
    order = ranked(scores)
    rest = order[top or len(order) :]
    behind = set(rest)
    return [doc for doc in scores if doc not in behind], rest


def _unknown(ids: Sequence[str], what: str, skip: bool) -> None:
    if not ids:
        return
    shown = ", ".join(ids[:_SHOWN]) + (", …" if len(ids) > _SHOWN else "")
    if not skip:
        raise UserError(f"{len(ids)} {what}: {shown}. --skip_unknown leaves them out.")
    log.warning("%d %s: %s; they are left out", len(ids), what, shown)


def _entries(path: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON list or of JSON lines."""
    lines = list(records.lines(path))
    if lines and lines[0].raw.lstrip().startswith(b"["):
        found = parsed(decoded(b"\n".join(line.raw for line in lines), path), path)
    else:
        found = [records.object_of(line.raw, f"{path}:{line.number}") for line in lines]
    for number, entry in enumerate(found, start=1):
        if not isinstance(entry, dict):
            raise UserError(f"{path}, entry {number} is not an object.")
        yield entry


def _digest(values: Iterable[Any]) -> str:
    made = hashlib.sha256()
    for value in values:
        made.update(json.dumps(value).encode())
    return made.hexdigest()
