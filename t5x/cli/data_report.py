"""The report of `t5x data`: examples after each preprocessor, a row of a batch, lengths and padding."""

import collections
import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.cli.text_page import TextPage
from t5x.data.feature_converters import DecoderFeatureConverter, EncDecFeatureConverter, FeatureConverter
from t5x.data.lanes import BadExamples, Order, Stream
from t5x.data.loader import measure_lengths
from t5x.data.pipeline import Example, Pipeline, generator
from t5x.data.sources import BadExample
from t5x.data.tasks import Mixture, Task, check_split, get_subtasks, task_rates
from t5x.data.vocabularies import Vocabulary

_T5_LENGTHS = {"inputs": 512, "targets": 114}  # for tasks that need lengths
_SEGMENTS = "123456789abcdefghijklmnopqrstuvwxyz"
_MODEL_FEATURES = {
    "encoder_input_tokens": ("inputs", "encoder_segment_ids"),
    "decoder_target_tokens": ("targets", "decoder_segment_ids"),
}


class DataReport:
    """A report about a task or mixture.

    Args:
      page: where it is written.
      task: the task or mixture.
      split: split of the task.
      lengths: {feature: tokens}, as for training; None truncates nothing.
      pack: show a packed row.
      seed: seed of the order and of random preprocessors. The order is that of a run with this seed and one row.
    """

    def __init__(
        self,
        page: TextPage,
        task: Task | Mixture,
        *,
        split: str = "train",
        lengths: Mapping[str, int] | None = None,
        pack: bool = False,
        seed: int = 0,
    ):
        self._page, self._whole, self._split, self._lengths = page, task, split, lengths
        self._pack, self._seed = pack, seed
        check_split(task, split)
        self._rates = {part: rate for part, rate in task_rates(task).items() if split in part.splits}
        self._tasks = [part for part in get_subtasks(task) if split in part.splits]
        self._check_lengths()

    def _check_lengths(self) -> None:
        features, required = self._whole.output_features, self._converter(pack=False).TASK_FEATURES
        if self._lengths is None:
            return
        if unknown := [name for name in self._lengths if name not in features]:
            raise UserError(
                f"--lengths: {self._whole.name!r} has no feature {unknown[0]!r} (features: {', '.join(features)})."
            )
        if missing := [name for name in required if name not in self._lengths]:
            raise UserError(f"--lengths: the length of {', '.join(missing)} is missing. Pass all lengths or none.")

    def write(self, count: int, *, sample: int = 2000, seconds: float = 10.0) -> None:
        """Write the report.

        Args:
          count: number of examples to show.
          sample, seconds: limits on the number of examples that are measured, and on the time.
        """
        pipelines = self._open_pipelines()
        self._write_overview()
        for number in range(count):
            count_before, index = divmod(number, len(pipelines))
            self._write_example(self._tasks[index], pipelines[index], count_before)
        if deep := [name for name, feature in self._whole.output_features.items() if feature.rank > 1]:
            self._page.line()
            self._page.line(f"rows and lengths are not measured: {', '.join(deep)} has more than one dimension")
        else:
            self._write_statistics(pipelines, sample, seconds)

    def _open_pipelines(self) -> list[Pipeline]:
        try:
            return [task.uncached_pipeline(self._split, self._lengths, self._seed) for task in self._tasks]
        except UserError as error:
            if self._lengths is not None:
                raise
            try:
                pipelines = [task.uncached_pipeline(self._split, _T5_LENGTHS, self._seed) for task in self._tasks]
            except UserError:
                raise error from None
        self._lengths = _T5_LENGTHS
        used = ",".join(f"{name}={length}" for name, length in _T5_LENGTHS.items())
        self._page.line(f"{self._whole.name} needs --lengths; using {used}")
        return pipelines

    def _converter(self, pack: bool) -> FeatureConverter:
        kind = EncDecFeatureConverter if "inputs" in self._whole.output_features else DecoderFeatureConverter
        return kind(pack=pack)

    def _write_overview(self) -> None:
        whole, split = self._whole, self._split
        kind = "mixture" if isinstance(whole, Mixture) else "task"
        sizes = {task: task.num_input_examples(split) for task in self._tasks}
        others = [name for name in whole.splits if name != split]
        also = f" (other splits: {', '.join(others)})" if others else ""
        self._page.line(f"{kind} {whole.name}, split {split}: {sum(sizes.values()):,} source examples{also}", bold=True)
        shared: dict[Vocabulary, list[str]] = {}
        for name, feature in whole.output_features.items():
            shared.setdefault(feature.vocabulary, []).append(name)
        for vocabulary, names in shared.items():
            self._page.line(f"  {', '.join(names)}: {vocabulary.vocab_size:,} ids, {vocabulary}")
        if isinstance(whole, Mixture):
            total = sum(self._rates.values())
            rows = [
                (task.name, f"{sizes[task]:,}", f"{rate:,.4g}", f"{100 * rate / total:.2f} %")
                for task, rate in self._rates.items()
            ]
            self._page.line()
            self._page.table(("task", "examples", "rate", "share"), rows)

    # --- Examples, step by step ---------------------------------------------------------------------------------------

    def _write_example(self, task: Task, pipeline: Pipeline, number: int) -> None:
        """Write example `number` (from 0) of a task, or the piece of joined examples, after each preprocessor."""
        if pipeline.pieces is None:
            epoch, index = Order(len(pipeline), pipeline.seed, shuffle=True)(number)
            self._page.section(f"{task.name}: {pipeline.location(index)}")
            try:
                self._write_stages(task, pipeline.stages(epoch, index))
                pipeline.outputs(epoch, index)  # check the output features
            except BadExample as error:
                self._page.wrapped(f"cannot be used: {error}")
            return
        piece = next(itertools.islice(joined_pieces(pipeline), number, None))
        self._page.section(f"{task.name}: piece {number + 1}, starting in {pipeline.location(piece.index)}")
        self._write_stages(task, pipeline.stages(0, piece.index))
        size, sources = len(piece.tokens), count_examples(piece.num_sources)
        self._page.line(f"ConcatenateAndSplit: a piece of {size} tokens from {sources}", bold=True)
        (_, whole), *stages = pipeline.piece_stages(piece.tokens, piece.place, piece.index)
        self._write_stages(task, [("", whole), *stages])

    def _write_stages(self, task: Task, stages: Sequence[tuple[str, list[Example]]]) -> None:
        """Write each stage with the fields that it changed; follow the first of several examples."""
        page = self._page
        before: Example = {}
        count = 1
        for name, examples in stages:
            if not examples:
                page.line(f"{name}: drops it", bold=True)
                return
            after = examples[0]
            changed = {field: value for field, value in after.items() if not _same(before.get(field), value)}
            removed = [field for field in before if field not in after]
            note = f": makes {len(examples)} examples of it; the first:" if len(examples) != count else ""
            if not (changed or removed or note):
                note = ": changes nothing"
            if name:
                page.line(f"{name}{note}", bold=True)
            for field, value in changed.items():
                copied = [old for old, text in before.items() if isinstance(text, str) and _same(text, value)]
                if copied:
                    page.field(field, f"= {copied[0]} before")
                else:
                    self._write_value(task, field, value, before.get(field))
            if removed:
                page.line(f"  removed: {', '.join(removed)}")
            before, count = after, len(examples)

    def _write_value(self, task: Task, field: str, value: Any, before: Any) -> None:
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
            self._page.paragraph(field, str(value))
            return
        summary, added = f"{len(value):,} tokens", value
        if isinstance(before, np.ndarray) and 0 < len(before) < len(value) and _same(value[: len(before)], before):
            summary, added = f"{summary}: the {len(before):,} before, then", value[len(before) :]
        ids = [str(i) for i in added.tolist()]
        feature = task.output_features.get(field)
        names = token_names(feature.vocabulary, added.tolist()) if feature else []
        if added is not value and len(ids) <= 3:
            self._page.field(field, f"{summary} {' '.join(ids)}" + (f" ({' '.join(names)})" if names else ""))
            return
        self._page.field(field, summary)
        if ids:
            self._page.items(ids, lines=1)
        if names:
            self._page.items(names, lines=2)

    # --- Rows, lengths and padding of a sample ------------------------------------------------------------------------

    def _write_statistics(self, pipelines: Sequence[Pipeline], count: int, seconds: float) -> None:
        page, lengths = self._page, self._lengths
        # Without lengths if the task allows it, so that truncations can be counted.
        untrimmed = [self._without_lengths(task) for task in self._tasks]
        rates = [self._rates[task] for task in self._tasks]
        used = [whole or trimmed for whole, trimmed in zip(untrimmed, pipelines, strict=True)]
        examples, description = sample_examples(used, rates, self._seed, count, seconds)
        if not examples:
            raise UserError(f"No example of {self._whole.name!r} was found in {seconds:g} s: {description}.")
        converter = self._converter(pack=True)
        room = lengths or measure_lengths(examples, converter.TASK_FEATURES)
        rows = list(packed_rows(converter, examples, room))

        sizes = ", ".join(f"{name} {length}" for name, length in room.items())
        kind = "packed" if self._pack else "not packed (--pack)"
        page.section(f"a row of a batch, {kind}: {sizes}" + ("" if lengths else " (longest found)"))
        shown = rows[0] if self._pack else rows[0][:1]
        self._write_row(self._converter(self._pack).convert_row(shown, room))

        page.section(f"lengths of {count_examples(len(examples))}")
        page.wrapped(description)
        for name in self._whole.output_features:
            numbers = np.asarray([len(example[name]) for example in examples if name in example])
            if numbers.size:
                self._write_lengths(name, numbers, (lengths or {}).get(name))
        if empty := sum(len(example["targets"]) <= 1 for example in examples if "targets" in example):
            page.line(f"{count_examples(empty)} with an empty target (EOS alone)")
        unknown = [task.name for task, whole in zip(self._tasks, untrimmed, strict=True) if whole is None]
        if lengths and unknown:
            page.wrapped(f"The preprocessors of {', '.join(unknown)} need lengths; what they truncate is not counted.")

        page.section("padding")
        used = np.sum([converter.sizes(example, room) for example in examples], axis=0)
        capacity = np.asarray(converter.capacity(room))
        names = converter.TASK_FEATURES if len(capacity) == len(converter.TASK_FEATURES) else ["row"]
        table = []
        for label, number in (("one example a row", len(examples)), ("packed", len(rows))):
            shares = [f"{100 * share:.1f} %" for share in 1 - used / (number * capacity)]
            table.append((label, *shares, f"{number:,}", f"{len(examples) / number:.1f}"))
        page.table(("", *names, "rows", "examples a row"), table)

    def _without_lengths(self, task: Task) -> Pipeline | None:
        try:
            return task.uncached_pipeline(self._split, None, self._seed)
        except UserError:
            return None

    def _write_row(self, row: Mapping[str, np.ndarray]) -> None:
        """Draw each feature of a row: the number of the example at each position, a dot for padding."""
        for model_feature, (name, segments) in _MODEL_FEATURES.items():
            if model_feature not in row:
                continue
            ids = row[segments] if segments in row else (row[model_feature] != 0).astype(np.int32)
            width = min(len(ids), self._page.width - 14)
            drawn = ids[(np.arange(width) * len(ids)) // max(1, width)]
            marks = "".join("." if not i else _SEGMENTS[(i - 1) % len(_SEGMENTS)] for i in drawn.tolist())
            self._page.field(name, f"|{marks}|")
            filled = int(np.count_nonzero(ids))
            text = f"{filled} of {len(ids)} positions ({100 * filled / len(ids):.0f} %)"
            if segments in row:
                sizes = np.bincount(ids)[1:].tolist()
                text += f", {count_examples(len(sizes))}: {' '.join(map(str, sizes))}"
            self._page.field("", text)

    def _write_lengths(self, name: str, numbers: np.ndarray, limit: int | None) -> None:
        page = self._page
        median, high = (np.percentile(numbers, q, method="inverted_cdf") for q in (50, 95))
        summary = f"mean {numbers.mean():.1f}, median {median:.0f}, 95 % {high:.0f}, max {numbers.max()}"
        page.line(f"{name}: {summary}", bold=True)
        if numbers.min() < numbers.max():
            page.histogram(numbers)
        if limit is not None:
            over = numbers[numbers > limit]
            lost = int((over - limit).sum())
            shares = 100 * len(over) / len(numbers), 100 * lost / max(1, numbers.sum())
            text = f"{count_examples(len(over))} ({shares[0]:.1f} %) lose {lost:,} tokens ({shares[1]:.1f} %)"
            page.line(f"  truncated to {limit}: {text if len(over) else 'none is longer'}")


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Tokens joined from several examples; `place` is that of `Stream` in a run with one row."""

    tokens: np.ndarray
    place: tuple[int, ...]
    index: int
    num_sources: int


class _Recorder(Pipeline):
    """A copy of a pipeline that records the calls of `piece_outputs`."""

    def __init__(self, pipeline: Pipeline):
        self.__dict__.update(vars(pipeline))
        self.calls: list[tuple[np.ndarray, tuple[int, ...], int]] = []

    def piece_outputs(self, tokens: np.ndarray, place: tuple[int, ...], index: int) -> list[Example]:
        self.calls.append((tokens, place, index))
        return super().piece_outputs(tokens, place, index)


def joined_pieces(pipeline: Pipeline) -> Iterator[_Piece]:
    """Yield the pieces of a run with one row, endlessly."""
    recorder = _Recorder(pipeline)
    calls = recorder.calls
    stream = Stream(0, 1, Order(len(pipeline), pipeline.seed, shuffle=True), recorder, BadExamples())
    while True:
        stream.next()
        while stream.position.returned:  # a piece may become several examples
            stream.next()
        ends = [place for _, place, _ in calls[1:]] + [stream.position]
        for (tokens, place, index), (cursor, used, offset, *_) in zip(calls, ends, strict=True):
            yield _Piece(tokens, place, index, cursor - place[0] + bool(used or offset))
        calls.clear()


def sample_examples(
    pipelines: Sequence[Pipeline], rates: Sequence[float], seed: int, count: int, seconds: float
) -> tuple[list[Example], str]:
    """Read examples of a run with one row: up to `count`, for up to `seconds`, and no task more than once.

    Returns:
      the examples, and a sentence about the source examples that were read for them.
    """
    bad, random = BadExamples(), generator(seed)
    examples: list[Example] = []
    streams = [Stream(0, 1, Order(len(p), p.seed, shuffle=True), p, bad) for p in pipelines]
    shares = np.asarray(rates) / sum(rates)
    end = time.monotonic() + seconds
    ended = False
    while len(examples) < count and time.monotonic() < end and not ended:
        number = random.choice(len(streams), p=shares) if len(streams) > 1 else 0
        stream, size = streams[number], len(pipelines[number])
        try:
            example, _ = stream.next()
        except UserError:  # all examples are dropped
            if not examples:
                raise
            break
        ended = stream.position.cursor >= size
        if stream.position.cursor <= size:
            examples.append(example)
    total = sum(map(len, pipelines))
    read = sum(min(stream.position.cursor, len(p)) for stream, p in zip(streams, pipelines, strict=True))
    text = f"from {read:,} of {total:,} source examples"
    if not ended and len(examples) < count:
        text += f", read in {seconds:.0f} s"
    if dropped := sum((pipeline.dropped for pipeline in pipelines), collections.Counter()):
        text += f"; dropped by {', '.join(f'{name}: {number:,}' for name, number in dropped.most_common())}"
    if bad.count:
        text += f"; {bad.count:,} cannot be used"
    return examples, text


def packed_rows(
    converter: FeatureConverter, examples: Sequence[Example], lengths: Mapping[str, int]
) -> Iterator[list[Example]]:
    """Yield the examples of each packed row, as the loader would pack them."""
    row: list[Example] = []
    room = capacity = np.asarray(converter.capacity(lengths))
    for example in examples:
        sizes = np.asarray(converter.sizes(example, lengths))
        if row and ((room - sizes < 0).any() or not room.all()):
            yield row
            row, room = [], capacity
        row.append(example)
        room = room - sizes
    yield row


def count_examples(count: int) -> str:
    return "1 example" if count == 1 else f"{count:,} examples"


def token_names(vocabulary: Any, ids: Sequence[int]) -> list[str]:
    """Return what each id stands for: a SentencePiece piece, token or character, or else `<7>`."""
    tokenizer = getattr(vocabulary, "tokenizer", None)
    name = getattr(tokenizer, "id_to_piece", None) or getattr(tokenizer, "id_to_token", None)
    if name is None:
        special = {vocabulary.pad_id: "<pad>", vocabulary.eos_id: "</s>", vocabulary.unk_id: "<unk>"}

        def name(i: int) -> str:
            return special.get(i) or _character(vocabulary, i)

    size = vocabulary.vocab_size
    return [name(i) or f"<{i}>" if 0 <= i < size else f"<{i}: not in the vocabulary>" for i in ids]


def _character(vocabulary: Any, i: int) -> str:
    text = vocabulary.decode([i])
    if isinstance(text, str) and text:
        return "\u2581" if text == " " else text
    return f"\\x{i - 3:02x}" if type(vocabulary).__name__ == "ByteVocabulary" and i < 259 else f"<{i}>"


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return np.array_equal(a, b)
    return type(a) is type(b) and a == b
