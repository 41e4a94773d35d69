"""Judged passages, read from files and grouped by query."""

import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from t5x._runtime.errors import UserError
from t5x.apps.ranking.ranking_files import find_id, find_text, read_qrels
from t5x.apps.ranking.rerank_inputs import PAIR_DOCUMENT_IDS, PAIR_QUERY_IDS, ListWork, RunWork, Work
from t5x.data import content_hashes
from t5x.data.content_hashes import fingerprint
from t5x.data.file_tasks import source_of
from t5x.data.pipeline import derive_seed
from t5x.data.sources import DataSource, TsvDataSource
from t5x.data.sources.base import OpenedSplits
from t5x.files import local_copies, user_files
from t5x.telemetry import copy_progress

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


TRAIN, VALIDATION = "train", "validation"


class JudgedDataSource(OpenedSplits, DataSource):
    """Query-passage pairs, or relevant passages with the less relevant ones of their query.

    An example has `query_id`, `query`, `doc_id`, `passage` and `grade`. Splits in `drawn` have one example per relevant
    passage, with `others`: the query's passages of lower grade (unjudged counts as 0), from which a preprocessor
    samples. Other splits have one example per passage. Queries without a relevant passage are excluded and, in drawn
    splits, relevant passages without others. Everything is held in memory.

    Args:
      judged: {split: files}, see `read_judgments`.
      held_out: share or ids of the `train` queries that form `validation`, if `judged` has no such split; 0 for none. A
        share is selected by a hash of the ids, the same in every run.
      relevance_level: the lowest relevant grade.
      drawn: names of splits.
      irrelevant_only: restrict `others` to grades below the relevance level.
      reading: further arguments of `read_judgments`.
    """

    def __init__(
        self,
        judged: Mapping[str, Paths],
        *,
        held_out: float | Sequence[str] = 0.1,
        relevance_level: int = 1,
        drawn: Sequence[str] = (TRAIN,),
        irrelevant_only: bool = False,
        **reading: Any,
    ):
        super().__init__()
        if not isinstance(judged, Mapping) or not judged:
            raise UserError(f"judged is {judged!r}: it must be {{'train': FILES}}.")
        if relevance_level < 1:
            raise UserError(f"relevance_level is {relevance_level}: it must be at least 1, as grade 0 is irrelevant.")
        self._judged, self._held_out, self._level = dict(judged), held_out, relevance_level
        self._drawn, self._irrelevant_only, self._reading = tuple(drawn), irrelevant_only, reading
        self._divides = bool(held_out) and TRAIN in judged and VALIDATION not in judged
        if self._divides and isinstance(held_out, int | float) and not 0 < held_out < 1:
            raise UserError(f"held_out is {held_out}: it must be a share of the queries, below 1, or a list of ids.")

    @property
    def splits(self) -> tuple[str, ...]:
        return (*self._judged, VALIDATION) if self._divides else tuple(self._judged)

    def num_examples(self, split: str) -> int:
        return len(self.opened(split))

    def example(self, split: str, index: int) -> dict[str, Any]:
        return dict(self.opened(split)[index])

    def location(self, split: str, index: int) -> str:
        example = self.opened(split)[index]
        return f"passage {example['doc_id'][:60]!r} of query {example['query_id'][:60]!r}"

    def fingerprint(self, split: str) -> dict[str, Any]:
        self.check_split(split)
        names = [(os.path.basename(name), version) for name, version in local_copies.versions(self._files(split))]
        return {"class": type(self).__qualname__, "settings": fingerprint(self._settings(split)), "files": names}

    def content_fingerprint(self, split: str) -> Callable[[], dict[str, Any]]:
        described = {"class": type(self).__qualname__, "settings": fingerprint(self._settings(split), lasting=True)}

        def describe() -> dict[str, Any]:
            files = local_copies.stage(self._files(split), copy_progress)
            return described | {"files": content_hashes.hash_data_files(files)}

        return describe

    def _files(self, split: str) -> list[str]:
        others = [self._reading.get("candidates"), self._reading.get("qrels")]
        listed = [path for paths in (self._paths(split), *others) for path in as_list(paths)]
        # A collection may be a directory.
        patterns = [os.path.join(path, "*") if os.path.isdir(path) else path for path in listed]
        return [path for pattern in patterns for path in user_files.expand(pattern)]

    def _settings(self, split: str) -> tuple[Any, ...]:
        how = (self._held_out, self._level, self._irrelevant_only)
        return (split, split in self._drawn, *how, self._reading.get("fields"), self._reading.get("columns"))

    def _paths(self, split: str) -> Paths:
        return self._judged[TRAIN if self._divides and split == VALIDATION else split]

    def _open(self, split: str) -> list[dict[str, Any]]:
        queries = read_judgments(self._paths(split), **self._reading)
        if self._divides and split in (TRAIN, VALIDATION):
            held_out = self._held_out_of(queries)
            queries = {name: query for name, query in queries.items() if (name in held_out) == (split == VALIDATION)}
        usable = {name: query for name, query in queries.items() if self._has_relevant(query)}
        if not usable:
            raise UserError(
                f"Split {split!r}: none of its {len(queries)} queries has a passage of grade {self._level} or more. "
                "Lower relevance_level, or fix the labels."
            )
        _log_skipped(split, queries.keys() - usable.keys(), f"without a passage of grade {self._level} or more")
        if split not in self._drawn:
            return [_pair(query, passage) for query in usable.values() for passage in query.passages.values()]
        examples, skipped, num_skipped = [], set(), 0
        for name, query in usable.items():
            of_query = self._relevant_with_others(query)
            examples += of_query
            if of_query:
                num_skipped += sum(map(self._is_relevant, query.passages.values())) - len(of_query)
            else:
                skipped.add(name)
        if not examples:
            than = f"grade {self._level}" if self._irrelevant_only else "another"
            raise UserError(
                f"Split {split!r}: no query has a passage that is less relevant than {than}, so there is nothing to "
                "learn. Add irrelevant passages, or a file of candidates."
            )
        _log_skipped(split, skipped, f"whose passages are all {'' if self._irrelevant_only else 'equally '}relevant")
        if num_skipped:
            logger.warning(
                "split %r: skipping %d relevant passages whose query has no less relevant ones", split, num_skipped
            )
        return examples

    def _held_out_of(self, queries: Mapping[str, Query]) -> set[str]:
        """Return the ids of the queries to hold out."""
        if isinstance(self._held_out, int | float):
            names = sorted((name for name in queries if self._has_relevant(queries[name])), key=derive_seed)
            count = max(1, round(self._held_out * len(names)))
            if count >= len(names):
                raise UserError(
                    f"held_out={self._held_out} leaves none of the {len(names)} queries with a relevant passage to "
                    "train on."
                )
            return set(names[:count])
        held_out = {str(name) for name in self._held_out}
        if unknown := sorted(held_out - queries.keys()):
            raise UserError(
                f"held_out has {len(unknown)} query ids that are not in the data ({', '.join(unknown[:3])}); its ids "
                f"are {', '.join(list(queries)[:3])}, …."
            )
        return held_out

    def _has_relevant(self, query: Query) -> bool:
        return any(map(self._is_relevant, query.passages.values()))

    def _is_relevant(self, passage: Passage) -> bool:
        return passage.gain >= self._level

    def _relevant_with_others(self, query: Query) -> list[dict[str, Any]]:
        passages = query.passages.values()
        examples = []
        for passage in passages:
            limit = self._level if self._irrelevant_only else passage.gain
            others = tuple(other for other in passages if other.gain < limit)
            if self._is_relevant(passage) and others:
                examples.append(_pair(query, passage) | {"others": others})
        return examples


def _pair(query: Query, passage: Passage) -> dict[str, Any]:
    return {
        "query_id": query.query_id,
        "query": query.text,
        "doc_id": passage.doc_id,
        "passage": passage.text,
        "grade": passage.gain,
    }


def _log_skipped(split: str, names: set[str], why: str) -> None:
    if names:
        examples = ", ".join([name[:40] for name in sorted(names)[:3]] + ["…"] * (len(names) > 3))
        logger.warning("split %r: skipping %d queries %s (%s)", split, len(names), why, examples)
