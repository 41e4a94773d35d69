"""Tasks of well-known data sets, from the files that they are published as."""

import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from t5x import metrics
from t5x.data import DataSource, JsonLinesDataSource, Task, TextLineDataSource, Vocabulary
from t5x.data import files as data_files
from t5x.data.file_tasks import text_task
from t5x.data.preprocessors import glue, summarize, translate
from t5x.data.sources import TsvDataSource
from t5x.errors import UserError

_COMPRESSED = (".gz", ".bz2", ".xz")
_MRPC_LABELS = ("not_equivalent", "equivalent")


def sst2(directory: str, vocabulary: Vocabulary) -> Task:
    """SST-2, sentences with their sentiment: `train.tsv`, `dev.tsv` and `test.tsv` with a label and a sentence a line.

    The splits are `train`, `validation` and `test`; the targets `negative` and `positive`.
    """
    files = _in(directory, train="train.tsv", validation="dev.tsv", test="test.tsv")
    return text_task(
        "sst2",
        {"directory": directory, "vocabulary": vocabulary},
        lambda: TsvDataSource(files, ("label", "sentence")),
        [
            functools.partial(_with_number, field="label"),
            functools.partial(glue, benchmark_name="sst2", label_names=("negative", "positive"), id_key=None),
        ],
        [metrics.accuracy],
    )


def mrpc(directory: str, vocabulary: Vocabulary) -> Task:
    """MRPC, pairs of sentences that mean the same or not: `msr-para-train.tsv`, `-val.tsv` and `-test.tsv`.

    The splits are `train`, `validation` and `test`; the targets `not_equivalent` and `equivalent`.
    """
    files = _in(directory, train="msr-para-train.tsv", validation="msr-para-val.tsv", test="msr-para-test.tsv")
    columns = ("label", "id1", "id2", "sentence1", "sentence2")
    names = ("sentence1", "sentence2")
    return text_task(
        "mrpc",
        {"directory": directory, "vocabulary": vocabulary},
        lambda: TsvDataSource(files, columns, skip_header_lines=1),
        [
            functools.partial(_with_number, field="label"),
            functools.partial(
                glue, benchmark_name="mrpc", label_names=_MRPC_LABELS, feature_names=names, id_key=None
            ),
        ],
        [metrics.accuracy, metrics.f1_score_with_invalid],
        functools.partial(_number_of, labels=_MRPC_LABELS),
    )  # fmt: skip


def aeslc(directory: str, vocabulary: Vocabulary) -> Task:
    """AESLC, e-mails and their subjects: `train.jsonl`, `dev.jsonl` and `test.jsonl` (or .jsonl.gz), `body`, `subject`.

    The splits are `train`, `validation` and `test`.
    """
    files = _in(directory, train="train.jsonl", validation="dev.jsonl", test="test.jsonl")
    return text_task(
        "aeslc",
        {"directory": directory, "vocabulary": vocabulary},
        lambda: _JsonLines(files),
        [functools.partial(summarize, article_key="body", summary_key="subject")],
        [metrics.rouge],
    )


def multi30k(directory: str, vocabulary: Vocabulary, source: str = "en", target: str = "de") -> Task:
    """Multi30k, captions in two languages: `train.en`, `train.de`, `val.…`, `test_2016_flickr.…` (also .gz).

    The splits are `train`, `validation` and `test`.

    Args:
      source, target: languages, by their codes.
    """
    stems = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
    files = {
        language: _in(directory, **{split: f"{stem}.{language}" for split, stem in stems.items()})
        for language in (source, target)
    }
    return text_task(
        "multi30k",
        {"directory": directory, "vocabulary": vocabulary, "source": source, "target": target},
        lambda: ParallelLinesDataSource(files),
        [functools.partial(translate, source_language=source, target_language=target)],
        [metrics.bleu],
    )


class _PerhapsCompressed:
    """A source of files that are there as they are named, or compressed."""

    def _paths(self, split: str) -> list[str]:
        path = os.path.expanduser(self._patterns[split])
        found = [name for name in (path, *(path + ending for ending in _COMPRESSED)) if data_files.exists(name)]
        if len(found) > 1:
            raise UserError(f"Split {split!r} is there more than once: {', '.join(found)}. Leave one of them.")
        return data_files.expand(*found or [path])


class _JsonLines(_PerhapsCompressed, JsonLinesDataSource):
    pass


class _TextLines(_PerhapsCompressed, TextLineDataSource):
    pass


class ParallelLinesDataSource(DataSource):
    """Files of lines that belong together, one of each language: examples {language: line}.

    Args:
      files: {language: {split: path}}, where each file is, as it is named or compressed (.gz, .bz2, .xz).
    """

    def __init__(self, files: Mapping[str, Mapping[str, str]]):
        self._sources = {language: _TextLines(of_language) for language, of_language in files.items()}

    @property
    def splits(self) -> tuple[str, ...]:
        return next(iter(self._sources.values())).splits

    def num_examples(self, split: str) -> int:
        found = {language: source.num_examples(split) for language, source in self._sources.items()}
        if len({*found.values()}) > 1:
            told = ", ".join(f"{number} in {language}" for language, number in found.items())
            raise UserError(f"The files of split {split!r} do not have the same number of lines: {told}.")
        return next(iter(found.values()))

    def example(self, split: str, index: int) -> dict[str, Any]:
        return {language: source.example(split, index)["text"] for language, source in self._sources.items()}

    def location(self, split: str, index: int) -> str:
        return " and ".join(source.location(split, index) for source in self._sources.values())

    def fingerprint(self, split: str) -> dict[str, Any]:
        return {language: source.fingerprint(split) for language, source in self._sources.items()}


def _in(directory: str, **names: str) -> dict[str, str]:
    return {split: os.path.join(directory, name) for split, name in names.items()}


def _with_number(example: dict[str, str], field: str) -> dict[str, str | int]:
    return example | {field: int(example[field])}


def _number_of(decoded: str, labels: Sequence[str], **_: Any) -> int:
    """Of the label; -1 where the text is none."""
    return labels.index(decoded) if decoded in labels else -1
