"""`t5x data`: examples after each preprocessor, a row of a batch, and the lengths of the examples."""

import itertools
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from t5x.data.example_order import Order
from t5x.data.file_tasks import file_task
from t5x.data.lanes import BadExamples, Position, Stream
from t5x.data.pipeline import Example, Pipeline
from t5x.data.sources import BadExample
from t5x.data.tasks import Mixture, Task, get_mixture_or_task, get_subtasks, task_rates
from t5x.data.view.counts import converter_of, how_many, measured
from t5x.data.view.drawing import Page, escaped, table
from t5x.data.vocabularies import Vocabulary
from t5x.errors import UserError
from t5x.plain import vocabulary_named

SAMPLE = 2000
SECONDS = 10.0
_JOINED_SHOWN = 4
_FEW = 3  # tokens shown on one line
_LENGTHS = {"inputs": 512, "targets": 114}  # T5's, for tasks that need lengths


def view_named(
    name: str | None, file: Mapping[str, Any], *, split: str, count: int, lengths: str | None, pack: bool, seed: int
) -> None:
    """Run `t5x data`: `view` a registered task or a plain file.

    Args:
      name: name of the task or mixture; None if `file` has `data`.
      file: `data`, `inputs`, `targets`, `prefix`, `vocabulary`, as in `t5x.plain.PlainRun`.
      lengths: see `parse_lengths`.
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
    """Print a report about a task or mixture.

    Args:
      split: split of the task.
      count: number of examples to show.
      lengths: {feature: tokens}, as for training; None truncates nothing.
      pack: show a packed row.
      seed: seed of the order and of random preprocessors. The order is that of a run with this seed and one row.
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
    """Yield the lines of the report; arguments as for `view`.

    Args:
      sample, seconds: limits on the number of examples measured and on the time.
    """
    tasks = [task for task in get_subtasks(found) if split in task.splits]
    if not tasks:
        raise UserError(f"{found.name!r} has no split {split!r}; it has {', '.join(map(repr, found.splits))}.")
    _check_lengths(found, lengths)
    try:
        pipelines = [task.uncached_pipeline(split, lengths, seed) for task in tasks]
    except UserError as error:
        if lengths is not None:
            raise
        try:
            pipelines = [task.uncached_pipeline(split, _LENGTHS, seed) for task in tasks]
        except UserError:
            raise error from None
        lengths = _LENGTHS
        yield f"no --lengths, which {found.name} needs: {', '.join(f'{k} {v}' for k, v in lengths.items())} are taken"
    yield from _overview(page, found, tasks, split)
    for number in range(count):
        at = number % len(pipelines)
        yield from _example(page, tasks[at], pipelines[at], number // len(pipelines))
    yield from measured(page, found, tasks, pipelines, lengths, pack, split, seed, sample, seconds)


def parse_lengths(text: str | None) -> dict[str, int] | None:
    """Parse lengths of features.

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
    if lengths and (missing := [name for name in converter_of(found, False).TASK_FEATURES if name not in lengths]):
        raise UserError(f"--lengths: there is none for {', '.join(missing)}; give all or none.")


# --- Overview ---------------------------------------------------------------------------------------------------------


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
    """Yield example `number` (from 0) of a task, or the piece of joined examples, after each preprocessor."""
    yield ""
    if pipeline.pieces is None:
        epoch, index = Order(len(pipeline), pipeline.seed, shuffle=True)(number)
        yield page.rule(f"{task.name}: {pipeline.location(index)}")
        try:
            yield from _stages(page, task, pipeline.stages(epoch, index))
            pipeline.outputs(epoch, index)  # check the output features
        except BadExample as error:
            yield from page.wrapped(f"cannot be used: {escaped(error)}")
        return
    piece = next(itertools.islice(joined(pipeline), number, None))
    index = piece.sources[0][0]
    yield page.rule(f"{task.name}: piece {number + 1}, which begins in {pipeline.location(index)}")
    yield from _stages(page, task, pipeline.stages(0, index))
    sizes = [f"{size}" for _, size in piece.sources if size]
    shown = " + ".join(sizes[:_JOINED_SHOWN]) + (" + …" if len(sizes) > _JOINED_SHOWN else "")
    told = f"{shown} tokens of {how_many(len(sizes))}: a piece of {len(piece.tokens)}"
    yield page.step("ConcatenateAndSplit", told)
    whole, *rest = pipeline.piece_stages(piece.tokens, piece.place, index)
    yield from _stages(page, task, [("", whole[1]), *rest])


class _Piece(NamedTuple):
    """Tokens joined from (source index, number of tokens) each; `place` is that of `Stream` in a run with one row."""

    tokens: np.ndarray
    place: tuple[int, int, int]
    sources: list[tuple[int, int]]


def joined(pipeline: Pipeline) -> Iterator[_Piece]:
    """Yield the pieces of a run with one row, endlessly."""
    order = Order(len(pipeline), pipeline.seed, shuffle=True)
    stream = Stream(0, 1, order, pipeline, BadExamples())
    while True:
        start = stream.position
        stream.next()  # first, because it raises if there are no tokens
        while stream.position.given:  # a piece may become several examples
            stream.next()
        yield _piece(pipeline, order, start)


def _piece(pipeline: Pipeline, order: Order, start: Position) -> _Piece:
    missing, feature = pipeline.pieces.length, pipeline.pieces.feature
    cursor, used, offset, _ = start
    parts, sources = [], []
    while missing:
        epoch, index = order(cursor)
        try:
            examples = pipeline.outputs(epoch, index)[used:]
        except BadExample:
            examples = []
        for example in examples:
            parts.append(np.asarray(example[feature])[offset : offset + missing])
            sources.append((index, len(parts[-1])))
            missing, offset = missing - len(parts[-1]), 0
            if not missing:
                break
        cursor, used, offset = cursor + 1, 0, 0
    return _Piece(np.concatenate(parts), start[:3], sources)


def _stages(page: Page, task: Task, stages: Sequence[tuple[str, list[Example]]]) -> Iterator[str]:
    """Yield each stage with the fields that it changed; follow the first of several examples."""
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
    if shown is not value and len(shown) <= _FEW:
        names = pieces(task.output_features[field].vocabulary, shown.tolist()) if field in task.output_features else []
        yield page.field(
            field, f"{told} {' '.join(map(str, shown.tolist()))}" + (f" ({' '.join(names)})" if names else "")
        )
        return
    yield page.field(field, told)
    if len(shown):
        yield from page.items([str(i) for i in shown.tolist()], lines=1)
        if field in task.output_features:
            yield from page.items(pieces(task.output_features[field].vocabulary, shown.tolist()), lines=2)


def pieces(vocabulary: Any, ids: Sequence[int]) -> list[str]:
    """Return what each id stands for: a SentencePiece piece, token or character, or else `<7>`."""
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
