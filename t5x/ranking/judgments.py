"""Judged passages, read from files and grouped by query."""

import dataclasses
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from t5x.data.file_tasks import source_of
from t5x.data.sources import TsvDataSource
from t5x.errors import UserError
from t5x.files import user_files
from t5x.ranking.record_lines import find_id, find_text
from t5x.ranking.rerank_inputs import PAIR_DOCUMENT_IDS, PAIR_QUERY_IDS, ListWork, RunWork, Work
from t5x.ranking.trec_files import read_qrels

logger = logging.getLogger(__name__)

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Record = tuple[str, Mapping[str, Any]]

# Names that a field may have unless the user passes one.
FIELDS = {
    "query_id": PAIR_QUERY_IDS,
    "query": ("query", "question"),
    "doc_id": PAIR_DOCUMENT_IDS,
    "passage": ("passage", "text", "document", "content"),
    "label": ("label", "grade", "relevance"),
}
_OPTIONAL = ("query_id", "doc_id")  # the text itself is used instead


@dataclasses.dataclass(frozen=True)
class Passage:
    """A passage of a query. `grade` is None if it is not judged."""

    doc_id: str
    text: str
    grade: int | None

    @property
    def gain(self) -> int:
        """Return the grade, or 0 if it is missing or negative."""
        return max(self.grade or 0, 0)


@dataclasses.dataclass
class Query:
    query_id: str
    text: str
    passages: dict[str, Passage] = dataclasses.field(default_factory=dict)


def read_judgments(
    judged: Paths | Mapping[str, str],
    *,
    fields: Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    qrels: str | os.PathLike[str] | None = None,
    candidates: Paths | Mapping[str, str] | None = None,
) -> dict[str, Query]:
    """Return {query id: passages} in the order of the files.

    Args:
      judged: files of (query, passage, label): .jsonl, .tsv or .csv with a header, or .parquet, possibly compressed.
        With `qrels`, everything that `candidates` accepts.
      fields: {one of FIELDS: its name in these files}, for unusual names. The text is the id of a query or passage
        without one.
      columns: column names of tab-separated files without a header.
      qrels: TREC judgments, used instead of labels.
      candidates: more passages of the same queries, without labels, such as BM25's hits: files as for `judged`, .json
        (or .json.gz) with [{"query": …, "hits": [{"qid", "docid", "content"}, …]}, …], or {"run": …, "collection": …,
        "topics": …} as in `t5x rerank`.
    """
    queries: dict[str, Query] = {}
    duplicates = 0
    for where, record in _records(judged, columns):
        duplicates += _add(queries, where, *_parse(where, record, fields or {}, labelled=qrels is None))
    if qrels is not None:
        _judge(queries, qrels, judged)
    if candidates is not None:
        _add_candidates(queries, candidates)
    if duplicates:
        logger.warning("%d pair(s) are in the data more than once; the highest label counts", duplicates)
    passages = [passage for query in queries.values() for passage in query.passages.values()]
    judged_count = sum(passage.grade is not None for passage in passages)
    logger.info("%d queries with %d passages, %d of them judged", len(queries), len(passages), judged_count)
    return queries


def _parse(
    where: str, record: Mapping[str, Any], fields: Mapping[str, str], *, labelled: bool
) -> tuple[str, str, Passage]:
    """Return (query id, query, passage) of a record."""
    names = field_names(where, record, fields, [name for name in FIELDS if labelled or name != "label"])
    query, text = (find_text(record, [names[name]], where, allow_blank=False) for name in ("query", "passage"))
    query_id, doc_id = (find_id(record, [names[name]] if name in names else [], where) for name in _OPTIONAL)
    grade = grade_of(where, names["label"], record[names["label"]]) if labelled else None
    return query_id or query, query, Passage(doc_id or text, text, grade)


def _add(queries: dict[str, Query], where: str, query_id: str, text: str, passage: Passage) -> bool:
    """Add a passage to its query. Return whether it was present already."""
    query = queries.setdefault(query_id, Query(query_id, text))
    if query.text != text:
        raise UserError(
            f"{where}: query {query_id!r} is {text[:60]!r} here, but {query.text[:60]!r} before. An id must belong to "
            "one query."
        )
    earlier = query.passages.setdefault(passage.doc_id, passage)
    if earlier is passage:
        return False
    grades = [grade for grade in (earlier.grade, passage.grade) if grade is not None]
    query.passages[passage.doc_id] = dataclasses.replace(earlier, grade=max(grades, default=None))
    return True


def field_names(
    where: str, record: Mapping[str, Any], fields: Mapping[str, str], requested: Sequence[str]
) -> dict[str, str]:
    """Return {one of `requested`: the record's field}. Missing ids are omitted.

    >>> field_names("a.jsonl:1", {"qid": "7", "query": "who?", "text": "He."}, {}, ["query_id", "query", "passage"])
    {'query_id': 'qid', 'query': 'query', 'passage': 'text'}
    """
    if unknown := [name for name in fields if name not in requested]:
        possible = ", ".join(map(repr, requested))
        raise UserError(f"fields contains {', '.join(map(repr, unknown))}; it can have {possible}.")
    names = {}
    for name in requested:
        usual = (fields[name],) if name in fields else FIELDS.get(name, (name,))
        if (field := next((field for field in usual if field in record), None)) is not None:
            names[name] = field
        elif name in fields or name not in _OPTIONAL:
            raise UserError(
                f"{where} has no field {' or '.join(map(repr, usual))} for the {name} (fields: "
                f"{', '.join(map(str, record))}). Set fields = {{{name!r}: …}}."
            )
    return names


def grade_of(where: str, field: str, value: Any) -> int:
    """Return a label as an integer."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not number.is_integer():
        raise UserError(
            f"{where}: the label {field!r} is {str(value)[:60]!r}; it must be an integer: 0 for an irrelevant passage, "
            "1 or more for a relevant one."
        )
    return int(number)


def _add_candidates(queries: dict[str, Query], candidates: Any) -> None:
    other_queries, added = set(), 0
    for where, record in _records(candidates, columns=None):
        query_id, _, passage = _parse(where, record, {}, labelled=False)
        if query_id in queries:
            added += not _add(queries, where, query_id, queries[query_id].text, passage)
        else:
            other_queries.add(query_id)
    if not added:
        if other_queries:
            content = f"queries {', '.join(sorted(other_queries)[:3])}, …. Check that both use the same ids."
        else:
            content = "only passages that are there already. Remove `candidates`, or pass a file with more passages."
        raise UserError(
            f"{candidates} adds no passage to the queries {', '.join(list(queries)[:3])}, …: it has {content}"
        )


def _judge(queries: dict[str, Query], qrels: str | os.PathLike[str], judged: Any) -> None:
    """Set the grades from TREC judgments."""
    grades = read_qrels(qrels)
    missing = []
    for query_id, of_query in grades.items():
        passages = queries[query_id].passages if query_id in queries else {}
        for doc_id, grade in of_query.items():
            if doc_id in passages:
                passages[doc_id] = dataclasses.replace(passages[doc_id], grade=grade)
            else:
                missing.append(f"{query_id} {doc_id}")
    total = sum(map(len, grades.values()))
    if len(missing) == total:
        raise UserError(
            f"None of the {total} judged pairs of {os.fspath(qrels)} ({', '.join(missing[:3])}, …) is in {judged}, "
            f"whose queries are {', '.join(list(queries)[:3])}, …. Check that both use the same ids."
        )
    if missing:
        logger.warning(
            "%s: %d of %d judged pairs have no text in %s and are skipped (%s%s)",
            os.fspath(qrels), len(missing), total, judged, ", ".join(missing[:3]), ", …" if len(missing) > 3 else "",
        )  # fmt: skip


def _records(source: Paths | Mapping[str, str], columns: Sequence[str] | None) -> Iterator[Record]:
    """Yield the position and the fields of each pair."""
    if isinstance(source, Mapping):
        yield from _ranked(_run_work(source), str(source.get("run")))
        return
    for pattern in as_list(source):
        for path in user_files.expand(pattern):
            is_list = path.lower().removesuffix(".gz").endswith(".json")
            yield from _ranked(ListWork(path, top=None), path) if is_list else _lines(path, columns)


def _ranked(work: Work, name: str) -> Iterator[Record]:
    for unit in work.units(0, len(work.sizes)):
        for doc_id, text in zip(unit.doc_ids, unit.texts, strict=True):
            record = {"query_id": unit.query_id, "query": unit.query, "doc_id": doc_id, "passage": text}
            yield f"{name}, query {unit.query_id!r}, document {doc_id!r}", record


def _run_work(paths: Mapping[str, str]) -> RunWork:
    if not {"run", "collection"} <= paths.keys() <= {"run", "collection", "topics"}:
        raise UserError(f"A run is given as {{'run': …, 'collection': …, 'topics': …}}, not as {dict(paths)}.")
    return RunWork(paths["run"], paths["collection"], paths.get("topics"), top=None, skip_unknown=False)


def _lines(path: str, columns: Sequence[str] | None) -> Iterator[Record]:
    source = source_of({"all": path}) if columns is None else TsvDataSource({"all": path}, columns)
    for index in range(source.num_examples("all")):
        yield source.location("all", index), source.example("all", index)


def as_list(paths: Any) -> list[Any]:
    """Return one path, several paths or the values of a mapping as a list."""
    if paths is None:
        return []
    if isinstance(paths, Mapping):
        return list(paths.values())
    return [paths] if isinstance(paths, str | os.PathLike) else list(paths)
