"""Judged passages as a data source, with queries held out for validation."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x.data import file_digests
from t5x.data.code_hashes import fingerprint
from t5x.data.pipeline import derive_seed
from t5x.data.sources import DataSource
from t5x.data.sources.base import OpenedSplits
from t5x.errors import UserError
from t5x.files import local_copies, user_files
from t5x.ranking.judgments import Passage, Paths, Query, as_list, read_judgments
from t5x.telemetry import copy_progress

logger = logging.getLogger(__name__)

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
            return described | {"files": file_digests.hash_data_files(files)}

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
