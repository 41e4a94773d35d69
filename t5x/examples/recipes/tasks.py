"""Tasks of well-known datasets, read from the published files."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x import metrics
from t5x._runtime.errors import UserError
from t5x.data import DataSource, JsonLinesDataSource, Task, TextLineDataSource, Vocabulary
from t5x.data.file_tasks import COMPRESSED, text_task
from t5x.data.preprocessors import glue, summarize, translate
from t5x.data.sources import TsvDataSource
from t5x.data.sources.files import FilesDataSource
from t5x.files import user_files as data_files

_MRPC_LABELS = ("not_equivalent", "equivalent")


def sst2(directory: str, vocabulary: Vocabulary) -> Task:
    """Return SST-2, sentiment of sentences, from `train.tsv`, `dev.tsv` and `test.tsv` (label and sentence per line).

    The splits are `train`, `validation` and `test`; the targets are `negative` and `positive`.
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
    """Return MRPC, paraphrase pairs, from `msr-para-train.tsv`, `msr-para-val.tsv` and `msr-para-test.tsv`.

    The splits are `train`, `validation` and `test`; the targets are `not_equivalent` and `equivalent`.
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
        functools.partial(label_index, labels=_MRPC_LABELS),
    )  # fmt: skip


def aeslc(directory: str, vocabulary: Vocabulary) -> Task:
    """Return AESLC, subjects of e-mails, from `train.jsonl`, `dev.jsonl` and `test.jsonl` (`body`, `subject`).

    The files may be compressed (.gz, .bz2, .xz). The splits are `train`, `validation` and `test`.
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
    """Return Multi30k, captions in two languages, from `train.en`, `train.de`, `val.…` and `test_2016_flickr.…`.

    The files may be compressed (.gz, .bz2, .xz). The splits are `train`, `validation` and `test`.

    Args:
      source, target: language codes.
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


class _PerhapsCompressed(FilesDataSource):
    """A source whose files may be compressed."""

    def _paths(self, split: str) -> list[str]:
        path = os.path.expanduser(str(self._patterns[split]))
        existing = [name for name in (path, *(path + ending for ending in COMPRESSED)) if data_files.exists(name)]
        if len(existing) > 1:
            raise UserError(f"Split {split!r} has several files: {', '.join(existing)}. Keep one of them.")
        return data_files.expand(*existing or [path])


class _JsonLines(_PerhapsCompressed, JsonLinesDataSource):
    pass


class _TextLines(_PerhapsCompressed, TextLineDataSource):
    pass


class ParallelLinesDataSource(DataSource):
    """Parallel text files, one per language: examples {language: line}.

    Args:
      files: {language: {split: path}}; a file may also be compressed, with .gz, .bz2 or .xz added to its name.
    """

    def __init__(self, files: Mapping[str, Mapping[str, str]]):
        self._sources = {language: _TextLines(of_language) for language, of_language in files.items()}

    @property
    def splits(self) -> tuple[str, ...]:
        return next(iter(self._sources.values())).splits

    def num_examples(self, split: str) -> int:
        sizes = {language: source.num_examples(split) for language, source in self._sources.items()}
        if len({*sizes.values()}) > 1:
            counts = ", ".join(f"{number} in {language}" for language, number in sizes.items())
            raise UserError(f"The files of split {split!r} have different numbers of lines: {counts}.")
        return next(iter(sizes.values()))

    def example(self, split: str, index: int) -> dict[str, Any]:
        return {language: source.example(split, index)["text"] for language, source in self._sources.items()}

    def location(self, split: str, index: int) -> str:
        return " and ".join(source.location(split, index) for source in self._sources.values())

    def fingerprint(self, split: str) -> dict[str, Any]:
        return {language: source.fingerprint(split) for language, source in self._sources.items()}

    def content_fingerprint(self, split: str) -> Callable[[], dict[str, Any]]:
        parts = [source.content_fingerprint(split) for source in self._sources.values()]

        def compute() -> dict[str, Any]:
            vocabularies = [part() for part in parts]
            settings = [list(self._sources), *(one["settings"] for one in vocabularies)]
            return {
                "class": type(self).__qualname__,
                "settings": settings,
                "files": [file for one in vocabularies for file in one["files"]],
            }

        return compute


def _in(directory: str, **names: str) -> dict[str, str]:
    return {split: os.path.join(directory, name) for split, name in names.items()}


def _with_number(example: dict[str, str], field: str) -> dict[str, str | int]:
    return example | {field: int(example[field])}


def label_index(decoded: str, labels: Sequence[str], **_: Any) -> int:
    """Return the index of the label; -1 if the prediction is not a label."""
    return labels.index(decoded) if decoded in labels else -1
