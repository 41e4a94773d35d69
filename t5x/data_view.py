"""`t5x data`: what a task's examples become, what a row of a batch looks like, and how long the examples are."""

import itertools
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from t5x.data.feature_converters import DecoderFeatureConverter, EncDecFeatureConverter, FeatureConverter
from t5x.data.file_tasks import file_task
from t5x.data.lanes import BadExamples, Stream
from t5x.data.loader import measure_lengths
from t5x.data.order import Order
from t5x.data.pipeline import Example, Pipeline
from t5x.data.sources import BadExample
from t5x.data.streams import generator
from t5x.data.tasks import Mixture, Task, get_mixture_or_task, get_subtasks, task_rates
from t5x.data.vocabularies import Vocabulary
from t5x.errors import UserError
from t5x.plain import vocabulary_named
from t5x.text_view import Page, escaped, histogram, table

SAMPLE = 2000
SECONDS = 10.0
_JOINED_SHOWN = 6


def view_named(
    name: str | None, file: Mapping[str, Any], *, split: str, count: int, lengths: str | None, pack: bool, seed: int
) -> None:
    """What `t5x data` does: `view` of a registered task, or of a plain file.

    Args:
      name: of the task or mixture; None where `file` has `data`.
      file: `data`, `inputs`, `targets`, `prefix`, `vocabulary`, as `t5x.plain.PlainRun` has them.
      lengths: as `parse_lengths` takes them.
    """
    if (name is None) == ("data" not in file):
        raise UserError(
            "Name a task, `t5x data my_task --import my_tasks.py`, or a file, `t5x data --data train.jsonl …`."
        )
    if name is not None:
        if file:
            raise UserError(f"{', '.join(f'--{option}' for option in file)} goes with --data; a task has its own.")
        found = get_mixture_or_task(name)
    else:
        if "vocabulary" not in file:
            raise UserError("--data needs --vocabulary: a SentencePiece model (*.model), a tokenizer.json, or bytes.")
        fields = {option: file[option] for option in ("inputs", "targets", "prefix") if option in file}
        vocabulary = vocabulary_named(file["vocabulary"]).load()
        found = file_task({split: file["data"]}, vocabulary, **fields, name="file")
    if count < 0:
        raise UserError(f"-n is {count}: it must be at least 0.")
    sys.stdout.reconfigure(errors="backslashreplace")
    view(found, split=split, count=count, lengths=parse_lengths(lengths), pack=pack, seed=seed)


def view(
    found: Task | Mixture,
    *,
    split: str = "train",
    count: int = 5,
    lengths: Mapping[str, int] | None = None,
    pack: bool = False,
    seed: int = 0,
) -> None:
    """Prints a report about a task or mixture.

    Args:
      split: of the task.
      count: examples to show.
      lengths: {feature: tokens}, as training would be given; None: nothing is cut.
      pack: show a packed row.
      seed: of the order and of random preprocessors. Examples come in the order of a run with this seed and one row.
    """
    columns = shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else 80
    page = Page(min(columns, 120), bold=sys.stdout.isatty() and "NO_COLOR" not in os.environ)
    for line in report(page, found, split=split, count=count, lengths=lengths, pack=pack, seed=seed):
        print(line, flush=True)


def report(
    page: Page,
    found: Task | Mixture,
    *,
    split: str,
    count: int,
    lengths: Mapping[str, int] | None,
    pack: bool,
    seed: int,
    sample: int = SAMPLE,
    seconds: float = SECONDS,
) -> Iterator[str]:
    """The lines of the report; arguments as of `view`.

    Args:
      sample, seconds: how many examples are measured at most, and for how long.
    """
    tasks = [task for task in get_subtasks(found) if split in task.splits]
    if not tasks:
        raise UserError(f"{found.name!r} has no split {split!r}; it has {', '.join(map(repr, found.splits))}.")
    _check_lengths(found, lengths)
    pipelines = [_pipeline(task, split, lengths, seed) for task in tasks]
    yield from _overview(page, found, tasks, split)
    for number in range(count):
        at = number % len(pipelines)
        yield from _example(page, tasks[at], pipelines[at], number // len(pipelines))
    yield from _measured(page, found, tasks, pipelines, lengths, pack, split, seed, sample, seconds)


def parse_lengths(text: str | None) -> dict[str, int] | None:
    """
    >>> parse_lengths("inputs=512,targets=114")
    {'inputs': 512, 'targets': 114}
    """
    if text is None:
        return None
    lengths = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if not name.strip() or not number.strip().isdigit() or int(number) < 1:
            raise UserError(f"--lengths {text}: write it as inputs=512,targets=114, with lengths of at least 1.")
        lengths[name.strip()] = int(number)
    return lengths


def _check_lengths(found: Task | Mixture, lengths: Mapping[str, int] | None) -> None:
    for name in lengths or ():
        if name not in found.output_features:
            raise UserError(
                f"--lengths: {found.name!r} has no feature {name!r}; it has {', '.join(found.output_features)}."
            )
    if lengths and (missing := [name for name in _converter(found, False).TASK_FEATURES if name not in lengths]):
        raise UserError(f"--lengths: there is none for {', '.join(missing)}; give all or none.")


def _converter(found: Task | Mixture, pack: bool) -> FeatureConverter:
    kind = EncDecFeatureConverter if "inputs" in found.output_features else DecoderFeatureConverter
    return kind(pack=pack)


def _pipeline(task: Task, split: str, lengths: Mapping[str, int] | None, seed: int) -> Pipeline:
    """That of the task, without a cache: every preprocessor is to be seen."""
    return Pipeline(task.name, task.source, split, task.preprocessors, task.output_features, lengths, seed)


# --- What there is ----------------------------------------------------------------------------------------------------


def _overview(page: Page, found: Task | Mixture, tasks: Sequence[Task], split: str) -> Iterator[str]:
    rates = {task: rate for task, rate in task_rates(found).items() if task in tasks}
    others = [other for other in found.splits if other != split]
    also = f" (other splits: {', '.join(others)})" if others else ""
    kind = "mixture" if isinstance(found, Mixture) else "task"
    total = sum(task.num_input_examples(split) for task in tasks)
    yield page.heading(f"{kind} {found.name}, split {split}: {total:,} source examples{also}")
    shared: dict[Vocabulary, list[str]] = {}
    for name, feature in found.output_features.items():
        shared.setdefault(feature.vocabulary, []).append(name)
    for vocabulary, names in shared.items():
        yield page.cut(f"  {', '.join(map(escaped, names))}: {_named(vocabulary)}, {vocabulary.vocab_size:,} ids")
    if isinstance(found, Mixture):
        whole = sum(rates.values())
        rows = [
            (task.name, f"{task.num_input_examples(split):,}", f"{rate:,.4g}", f"{100 * rate / whole:.2f} %")
            for task, rate in rates.items()
        ]
        yield ""
        yield from table(("task", "examples", "rate", "share"), rows)


def _named(vocabulary: Vocabulary) -> str:
    path = getattr(vocabulary, "sentencepiece_model_file", None) or getattr(vocabulary, "tokenizer_file", None)
    return f"{type(vocabulary).__name__}({escaped(os.path.basename(path))})" if path else escaped(vocabulary)


# --- Examples, step by step -------------------------------------------------------------------------------------------


def _example(page: Page, task: Task, pipeline: Pipeline, number: int) -> Iterator[str]:
    """Example `number` (from 0) of a task, or the piece of joined ones with that number, after each preprocessor."""
    yield ""
    if pipeline.pieces is None:
        epoch, index = Order(len(pipeline), pipeline.seed, shuffle=True)(number)
        yield page.rule(f"example {index + 1} of {task.name}, {pipeline.location(index)}")
        try:
            yield from _stages(page, task, pipeline.stages(epoch, index))
        except BadExample as error:
            yield from page.wrapped(f"cannot be used: {escaped(error)}")
        return
    piece = next(itertools.islice(_pieces(pipeline), number, None))
    index = piece.sources[0][0]
    yield page.rule(f"piece {number + 1} of {task.name}, begins in {pipeline.location(index)}")
    yield from _stages(page, task, pipeline.stages(0, index))
    sizes = [f"{size}" for _, size in piece.sources]
    shown = " + ".join(sizes[:_JOINED_SHOWN]) + (" + …" if len(sizes) > _JOINED_SHOWN else "")
    many = f"{len(sizes)} examples" if len(sizes) > 1 else "1 example"
    yield page.step("ConcatenateAndSplit", f"{shown} tokens of {many}: a piece of {len(piece.tokens)}")
    joined, *rest = pipeline.piece_stages(piece.tokens, piece.place, index)
    yield from _stages(page, task, [("", joined[1]), *rest])


class _Piece(NamedTuple):
    """Tokens joined from (source index, number of tokens) each; `place` is that of `Stream` for a run of one row."""

    tokens: np.ndarray
    place: tuple[int, int, int]
    sources: list[tuple[int, int]]


def _pieces(pipeline: Pipeline) -> Iterator[_Piece]:
    """The pieces of a run with one row, endless."""
    length, feature = pipeline.pieces.length, pipeline.pieces.feature
    order = Order(len(pipeline), pipeline.seed, shuffle=True)
    parts: list[np.ndarray] = []
    place, sources, missing = (0, 0, 0), [], length
    for position in itertools.count():
        if position == len(pipeline) and not parts and missing == length:
            raise UserError(f"No example of task {pipeline.name!r} has any tokens in {feature!r}.")
        epoch, index = order(position)
        for used, example in enumerate(pipeline.outputs(epoch, index)):
            tokens, offset = np.asarray(example[feature]), 0
            while offset < len(tokens):
                if missing == length:
                    place = (position, used, offset)
                part = tokens[offset : offset + missing]
                parts.append(part)
                sources.append((index, len(part)))
                offset, missing = offset + len(part), missing - len(part)
                if not missing:
                    yield _Piece(np.concatenate(parts), place, sources)
                    parts, sources, missing = [], [], length


def _stages(page: Page, task: Task, stages: Sequence[tuple[str, list[Example]]]) -> Iterator[str]:
    """Each stage with the fields that it changed; of several examples the first is followed."""
    before: Example = {}
    was = 1
    for name, made in stages:
        if not made:
            yield page.step(name, "drops it")
            return
        note = f"makes {len(made)} examples of it; the first:" if len(made) != was else ""
        changed = {field: value for field, value in made[0].items() if not _same(before.get(field), value)}
        gone = [field for field in before if field not in made[0]]
        if not changed and not gone and not note:
            note = "changes nothing"
        if name:
            yield page.step(name, note)
        for field, value in changed.items():
            copy = next((old for old, text in before.items() if isinstance(text, str) and _same(text, value)), None)
            if copy is not None:
                yield page.field(field, f"= {copy} before")
            else:
                yield from _value(page, task, field, value, before.get(field))
        if gone:
            yield page.cut(f"  without {', '.join(map(escaped, gone))}")
        before, was = made[0], len(made)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and np.array_equal(a, b)
    return type(a) is type(b) and a == b


def _value(page: Page, task: Task, field: str, value: Any, before: Any = None) -> Iterator[str]:
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
        yield from page.paragraph(field, escaped(value))
        return
    told, shown = f"{len(value):,} tokens", value
    if isinstance(before, np.ndarray) and 0 < len(before) < len(value) and _same(value[: len(before)], before):
        told, shown = f"{told}: the {len(before):,} before, then", value[len(before) :]
    yield page.field(field, told)
    if len(shown):
        yield from page.items([str(i) for i in shown.tolist()], lines=1)
        if field in task.output_features:
            yield from page.items(pieces(task.output_features[field].vocabulary, shown.tolist()), lines=2)


def pieces(vocabulary: Any, ids: Sequence[int]) -> list[str]:
    """Each id as what it stands for: SentencePiece's pieces, tokens, characters; `<7>` where there is no such thing."""
    size = vocabulary.vocab_size
    tokenizer = getattr(vocabulary, "tokenizer", None)
    if hasattr(tokenizer, "id_to_piece"):
        name = tokenizer.id_to_piece
    elif hasattr(tokenizer, "id_to_token"):
        name = tokenizer.id_to_token
    else:
        special = {vocabulary.pad_id: "<pad>", vocabulary.eos_id: "</s>", vocabulary.unk_id: "<unk>"}
        name = lambda i: special.get(i) or _character(vocabulary, i)
    return [escaped(name(i) or f"<{i}>") if 0 <= i < size else f"<{i}: not in the vocabulary>" for i in ids]


def _character(vocabulary: Any, i: int) -> str:
    text = vocabulary.decode([i])
    if isinstance(text, str) and text:
        return "\u2581" if text == " " else text
    return f"\\x{i - 3:02x}" if type(vocabulary).__name__ == "ByteVocabulary" and i < 259 else f"<{i}>"


# --- Rows and lengths -------------------------------------------------------------------------------------------------


def _measured(
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
    rates = task_rates(found)
    as_trained = Sample(pipelines, [rates[task] for task in tasks], seed)
    as_trained.read(sample, seconds)
    untrimmed = _untrimmed(tasks, split, seed)
    whole = as_trained
    if untrimmed is not None and lengths:
        whole = Sample(untrimmed, [rates[task] for task in tasks], seed)
        whole.read(len(as_trained.examples), seconds)
    examples = as_trained.examples
    if not examples:
        yield f"\nno example of {found.name} is left: its preprocessors drop them all, or none can be read"
        return
    converter = _converter(found, pack=True)
    measured = lengths or measure_lengths(examples, converter.TASK_FEATURES)

    yield ""
    kind = "packed" if pack else "not packed (--pack)"
    told = ", ".join(f"{name} {length}" for name, length in measured.items())
    yield page.rule(f"a row of a batch, {kind}: {told}" + ("" if lengths else ", the longest"))
    rows = _packed(converter, examples, measured)
    first = next(rows)
    row = (converter if pack else _converter(found, pack=False)).convert_row(first if pack else first[:1], measured)
    yield from _row(page, row)

    yield ""
    yield page.rule(f"lengths of {as_trained.told}")
    for name in found.output_features:
        numbers = [len(example[name]) for example in whole.examples if name in example]
        if numbers:
            yield from _lengths(page, name, numbers, (lengths or {}).get(name))
    empty = sum(bool(len(e["targets"]) <= 1) for e in examples if "targets" in e)
    if empty:
        yield f"{empty:,} examples have no target but EOS\n"
    if whole is as_trained and lengths:
        yield "(as the preprocessors make them, which know the lengths)\n"

    yield page.rule("padding")
    count = 1 + sum(1 for _ in rows)
    yield from _padding(converter, examples, measured, count)


class Sample:
    """The first examples of a run with one row: of a mixture, tasks are drawn by their rates.

    Attributes:
      examples: finished ones.
      told: how many there are, and of how many, in words.
    """

    def __init__(self, pipelines: Sequence[Pipeline], rates: Sequence[float], seed: int):
        self.examples: list[Example] = []
        self.told = ""
        self._pipelines = pipelines
        self._bad = BadExamples()
        orders = [Order(len(pipeline), pipeline.seed, shuffle=True) for pipeline in pipelines]
        self._streams = [
            Stream(0, 1, order, pipeline, self._bad) for order, pipeline in zip(orders, pipelines, strict=True)
        ]
        self._shares = np.asarray(rates) / sum(rates)
        self._random = generator(seed)

    def read(self, count: int, seconds: float) -> None:
        """Reads up to `count` examples, for so many seconds, and no task more than once over."""
        end = time.monotonic() + seconds
        ended = False
        while len(self.examples) < count and time.monotonic() < end and not ended:
            number = self._random.choice(len(self._streams), p=self._shares) if len(self._streams) > 1 else 0
            stream, size = self._streams[number], len(self._pipelines[number])
            try:
                example, _ = stream.next()
            except UserError:  # all are dropped
                break
            ended = stream.position.cursor >= size
            if stream.position.cursor <= size:
                self.examples.append(example)
        total = sum(len(pipeline) for pipeline in self._pipelines)
        read = sum(
            min(stream.position.cursor, len(p)) for stream, p in zip(self._streams, self._pipelines, strict=True)
        )
        made = len(self.examples)
        self.told = f"{made:,} of {total:,} examples"
        if made != read:
            self.told = f"{made:,} examples, made of {read:,} of the {total:,} in the source"
        if not ended and made < count:
            self.told += f", as many as in {seconds:.0f} s"
        if dropped := sum(
            (pipeline.dropped for pipeline in self._pipelines), start=self._pipelines[0].dropped.__class__()
        ):
            by = ", ".join(f"{name} {number:,}" for name, number in dropped.most_common())
            self.told += f"; dropped by {by}"
        if self._bad.count:
            self.told += f"; {self._bad.count:,} cannot be used"


def _untrimmed(tasks: Sequence[Task], split: str, seed: int) -> list[Pipeline] | None:
    """Pipelines that know no lengths, so that what would be cut can be counted; None where a task needs them."""
    try:
        return [_pipeline(task, split, None, seed) for task in tasks]
    except UserError:
        return None


def _packed(
    converter: FeatureConverter, examples: Sequence[Example], lengths: Mapping[str, int]
) -> Iterator[list[Example]]:
    """The examples of each row, by the rule of the loader."""
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
                told += f", {len(sizes)} example(s): {' '.join(map(str, sizes))}"
            yield page.field("", told)


def _lengths(page: Page, name: str, numbers: Sequence[int], length: int | None) -> Iterator[str]:
    array = np.asarray(numbers)
    middle, high = (np.percentile(array, q, method="inverted_cdf") for q in (50, 95))
    figures = f"mean {array.mean():.1f}, median {middle:.0f}, 95 % {high:.0f}, max {array.max()}"
    yield page.bold(f"{name}: {figures}")
    yield from histogram(array, page.width)
    if length is not None:
        over = array[array > length]
        tokens = int((over - length).sum())
        share, part = 100 * len(over) / len(array), 100 * tokens / max(1, array.sum())
        if len(over):
            yield f"  cut to {length}: {len(over):,} examples ({share:.1f} %) lose {tokens:,} tokens ({part:.1f} %)"
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
