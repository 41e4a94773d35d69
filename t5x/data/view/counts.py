"""The statistics of `t5x data`: a row of a batch, lengths, padding and truncation."""

import collections
import time
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from t5x.data.example_order import Order
from t5x.data.feature_converters import DecoderFeatureConverter, EncDecFeatureConverter, FeatureConverter
from t5x.data.lanes import BadExamples, Stream
from t5x.data.loader import measure_lengths
from t5x.data.pipeline import Example, Pipeline
from t5x.data.preprocessor_kinds import generator
from t5x.data.tasks import Mixture, Task, task_rates
from t5x.data.view.drawing import Page, histogram, table
from t5x.errors import UserError


def measured(
    page: Page,
    found: Task | Mixture,
    tasks: Sequence[Task],
    pipelines: Sequence[Pipeline],
    lengths: Mapping[str, int] | None,
    pack: bool,
    split: str,
    seed: int,
    sample: int,
    seconds: float,
) -> Iterator[str]:
    """Yield lines about the rows and lengths of a sample; arguments as for `t5x.data.view.report`."""
    if odd := [name for name, feature in found.output_features.items() if feature.rank > 1]:
        yield f"\n{', '.join(odd)}: of more than one dimension, so that rows and lengths are not measured"
        return
    rates = [rate for task, rate in task_rates(found).items() if task in tasks]
    # Without lengths if the task allows it, so that truncations can be counted.
    untrimmed = {task.name: _untrimmed(task, split, seed) for task in tasks}
    taken = Sample([p or q for p, q in zip(untrimmed.values(), pipelines, strict=True)], rates, seed)
    taken.read(sample, seconds)
    examples = taken.examples
    if not examples:
        raise taken.failure or UserError(f"No example of {found.name!r} was found in {seconds:g} s: {taken.told}.")
    converter = converter_of(found, pack=True)
    room = lengths or measure_lengths(examples, converter.TASK_FEATURES)

    yield ""
    kind = "packed" if pack else "not packed (--pack)"
    told = ", ".join(f"{name} {length}" for name, length in room.items())
    yield page.rule(f"a row of a batch, {kind}: {told}" + ("" if lengths else ", the longest"))
    rows = packed(converter, examples, room)
    first = next(rows)
    row = (converter if pack else converter_of(found, pack=False)).convert_row(first if pack else first[:1], room)
    yield from _row(page, row)

    yield ""
    yield page.rule(f"lengths of {how_many(len(examples))}")
    yield from page.wrapped(taken.told)
    for name in found.output_features:
        numbers = [len(example[name]) for example in examples if name in example]
        if numbers:
            yield from _lengths(page, name, numbers, (lengths or {}).get(name))
    empty = sum(bool(len(e["targets"]) <= 1) for e in examples if "targets" in e)
    if empty:
        yield f"{how_many(empty)} without a target but EOS\n"
    if lengths and (unsure := [name for name, pipeline in untrimmed.items() if pipeline is None]):
        yield from page.wrapped(
            f"{', '.join(unsure)} must know the lengths: nothing can be said of what it cuts itself."
        )
        yield ""

    yield page.rule("padding")
    count = 1 + sum(1 for _ in rows)
    yield from _padding(converter, examples, room, count)


def converter_of(found: Task | Mixture, pack: bool) -> FeatureConverter:
    kind = EncDecFeatureConverter if "inputs" in found.output_features else DecoderFeatureConverter
    return kind(pack=pack)


class Sample:
    """The first examples of a run with one row; tasks of a mixture are sampled by their rates.

    Attributes:
      examples: finished examples.
      told: a sentence with the number of examples and of source examples read.
      failure: why reading stopped early, or None.
    """

    def __init__(self, pipelines: Sequence[Pipeline], rates: Sequence[float], seed: int):
        self.examples: list[Example] = []
        self.told = ""
        self.failure: UserError | None = None
        self._pipelines = pipelines
        self._bad = BadExamples()
        orders = [Order(len(pipeline), pipeline.seed, shuffle=True) for pipeline in pipelines]
        self._streams = [
            Stream(0, 1, order, pipeline, self._bad) for order, pipeline in zip(orders, pipelines, strict=True)
        ]
        self._shares = np.asarray(rates) / sum(rates)
        self._random = generator(seed)

    def read(self, count: int, seconds: float) -> None:
        """Read up to `count` examples for up to `seconds`, and no task more than once."""
        end = time.monotonic() + seconds
        ended = False
        while len(self.examples) < count and time.monotonic() < end and not ended:
            number = self._random.choice(len(self._streams), p=self._shares) if len(self._streams) > 1 else 0
            stream, size = self._streams[number], len(self._pipelines[number])
            try:
                example, _ = stream.next()
            except UserError as error:  # all examples are dropped
                self.failure = error
                break
            ended = stream.position.cursor >= size
            if stream.position.cursor <= size:
                self.examples.append(example)
        total = sum(len(pipeline) for pipeline in self._pipelines)
        read = sum(
            min(stream.position.cursor, len(p)) for stream, p in zip(self._streams, self._pipelines, strict=True)
        )
        made = len(self.examples)
        self.told = f"made of {read:,} of the {total:,} source examples"
        if not ended and made < count:
            self.told += f", as many as in {seconds:.0f} s"
        dropped = collections.Counter()
        for pipeline in self._pipelines:
            dropped.update(pipeline.dropped)
        if dropped:
            self.told += f"; dropped by {', '.join(f'{name}: {number:,}' for name, number in dropped.most_common())}"
        if self._bad.count:
            self.told += f"; {self._bad.count:,} cannot be used"


def _untrimmed(task: Task, split: str, seed: int) -> Pipeline | None:
    """Return a pipeline without lengths, so that truncations can be counted; None if the task needs lengths."""
    try:
        return task.uncached_pipeline(split, None, seed)
    except UserError:
        return None


def packed(
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


_MODEL_FEATURES = {
    "encoder_input_tokens": ("inputs", "encoder_segment_ids"),
    "decoder_target_tokens": ("targets", "decoder_segment_ids"),
}


def _row(page: Page, row: Mapping[str, np.ndarray]) -> Iterator[str]:
    for model_feature, (name, segments) in _MODEL_FEATURES.items():
        if model_feature in row:
            tokens = row[model_feature]
            ids = row[segments] if segments in row else (tokens != 0).astype(np.int32)
            yield page.field(name, f"|{page.strip(ids)}|")
            filled = int(np.count_nonzero(ids))
            sizes = [int(np.count_nonzero(ids == segment)) for segment in range(1, int(ids.max(initial=0)) + 1)]
            told = f"{filled} of {len(ids)} positions ({100 * filled / len(ids):.0f} %)"
            if segments in row:
                told += f", {how_many(len(sizes))}: {' '.join(map(str, sizes))}"
            yield page.field("", told)


def how_many(count: int) -> str:
    return "1 example" if count == 1 else f"{count:,} examples"


def _lengths(page: Page, name: str, numbers: Sequence[int], length: int | None) -> Iterator[str]:
    array = np.asarray(numbers)
    middle, high = (np.percentile(array, q, method="inverted_cdf") for q in (50, 95))
    figures = f"mean {array.mean():.1f}, median {middle:.0f}, 95 % {high:.0f}, max {array.max()}"
    yield page.bold(f"{name}: {figures}")
    if array.min() < array.max():
        yield from histogram(array, page.width)
    if length is not None:
        over = array[array > length]
        tokens = int((over - length).sum())
        share, part = 100 * len(over) / len(array), 100 * tokens / max(1, array.sum())
        if len(over):
            yield f"  cut to {length}: {how_many(len(over))} ({share:.1f} %) lose {tokens:,} tokens ({part:.1f} %)"
        else:
            yield f"  cut to {length}: none is longer"
    yield ""


def _padding(
    converter: FeatureConverter, examples: Sequence[Example], lengths: Mapping[str, int], packed_rows: int
) -> Iterator[str]:
    used = np.sum([converter.sizes(example, lengths) for example in examples], axis=0)
    capacity = np.asarray(converter.capacity(lengths))
    names = converter.TASK_FEATURES if len(capacity) == len(converter.TASK_FEATURES) else ["row"]
    rows = []
    for label, count in (("one example a row", len(examples)), ("packed", packed_rows)):
        shares = 100 * (1 - used / (count * capacity))
        rows.append((label, *(f"{share:.1f} %" for share in shares), f"{count:,}", f"{len(examples) / count:.1f}"))
    yield from table(("", *names, "rows", "examples a row"), rows)
