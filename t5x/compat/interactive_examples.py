"""Examples for `t5x.interactive_model`, as sources and batches."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data import Feature, FunctionDataSource, Task, get_mixture_or_task, preprocessors
from t5x.data.example_order import Order
from t5x.data.pipeline import Example, Pipeline, Preprocessor
from t5x.data.tasks import check_split, task_rates

TextExample = str | Mapping[str, Any]
Batch = Sequence[TextExample]
Batches = Batch | Sequence[Batch]

SPLITS = ("train", "validation")


def get_dataset_from_natural_text_examples(
    examples: Batch,
    preprocessors: Sequence[Preprocessor],
    task_feature_lengths: Mapping[str, int] | None,
    features: Mapping[str, Feature],
) -> Any:
    """Return the preprocessed examples: a list, not yet truncated; with features of seqio, a tf.data.Dataset."""
    if not all(isinstance(feature, Feature) for feature in features.values()):
        return _seqio_dataset(_pairs(examples), preprocessors, task_feature_lengths, features)
    source = source_of(examples)
    pipeline = Pipeline("examples", source, "train", without_seqio(preprocessors), features, task_feature_lengths)
    return [example for index in range(len(pipeline)) for example in pipeline.outputs(0, index)]


def _seqio_dataset(pairs: Sequence[Example], steps: Sequence[Any], lengths: Any, features: Mapping[str, Any]) -> Any:
    import seqio
    import tensorflow as tf

    columns = {name: [pair[name] for pair in pairs] for name in pairs[0]}
    source = seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: tf.data.Dataset.from_tensor_slices(columns), splits=["train"]
    )
    task = seqio.Task("examples", source=source, preprocessors=list(steps), output_features=features)
    return task.get_dataset(lengths, "train", shuffle=False, num_epochs=1)


def without_seqio(functions: Sequence[Preprocessor]) -> list[Preprocessor]:
    """Replace seqio's preprocessors, which take a tf.data.Dataset, by those of `t5x.data`."""
    is_seqio = lambda f: getattr(f, "__module__", "") == "seqio.preprocessors"
    return [getattr(preprocessors, f.__name__, f) if is_seqio(f) else f for f in functions]


def get_batches_from_seqio(
    task_or_mixture_name: str,
    split: str,
    batch_size: int,
    num_batches: int,
    get_pretokenized_examples: bool = True,
    sequence_length: Mapping[str, int] | None = None,
    shuffle: bool = True,
    seed: int = 0,
) -> list[list[dict[str, Any]]]:
    """Return batches of examples {"input", "target"} of a registered task, or of a mixture by its rates.

    Args:
      get_pretokenized_examples: return strings; False returns token ids.
      sequence_length: lengths for preprocessors that use them.
      shuffle, seed: order of the examples; the seed is also that of random preprocessors.
    """
    task_or_mixture = get_mixture_or_task(task_or_mixture_name)
    check_split(task_or_mixture, split)
    rates = {task: rate for task, rate in task_rates(task_or_mixture).items() if split in task.splits}
    streams = {task: _examples(task, split, sequence_length, shuffle, seed) for task in rates}
    tasks, shares = list(rates), np.array(list(rates.values())) / sum(rates.values())
    rng = np.random.default_rng(seed)
    examples: list[dict[str, Any]] = []
    for _ in range(batch_size * num_batches):
        task = tasks[rng.choice(len(tasks), p=shares)]
        example = next(streams[task], None)
        if example is None:
            raise UserError(
                f"Split {split!r} of {task_or_mixture.name!r} has fewer than {num_batches} batches of {batch_size}: "
                f"task {task.name!r} ended after {len(examples)} examples. Ask for fewer."
            )
        value = functools.partial(_text if get_pretokenized_examples else _ids, task, example)
        examples.append({"input": value("inputs"), "target": value("targets")})
    return [examples[i : i + batch_size] for i in range(0, len(examples), batch_size)]


def source_of(examples: Batch) -> FunctionDataSource:
    """Return a source of the examples as {"inputs", "targets"}, with the same examples in every split."""
    pairs = _pairs(examples)
    return FunctionDataSource(lambda split: pairs, splits=SPLITS)


def _pairs(examples: Batch) -> list[dict[str, Any]]:
    if isinstance(examples, str | Mapping):
        raise UserError("examples is a single example: pass a list.")
    pairs = [_pair(example) for example in examples]
    if not pairs:
        raise UserError("examples is empty: give at least one.")
    return pairs


def _pair(example: TextExample) -> dict[str, Any]:
    if isinstance(example, str):
        return {"inputs": example, "targets": ""}
    if "input" not in example:
        raise UserError(f'An example must be a string or {{"input": text, "target": text}}, not {sorted(example)}.')
    others = {name: value for name, value in example.items() if name not in ("input", "target")}
    return {"inputs": example["input"], "targets": example.get("target", ""), **others}


def check_targets(examples: Batch) -> None:
    """Raise a UserError if an example has no target."""
    for index, example in enumerate(examples):
        if isinstance(example, str) or "target" not in example:
            raise UserError(f'Example {index} has no target: give {{"input": text, "target": text}}.')


def as_batches(batches: Batches) -> list[Batch]:
    """Return a list of batches, given one batch or a list of them."""
    is_one = isinstance(batches[0], str | Mapping)
    return [cast("Batch", batches)] if is_one else list(cast("Sequence[Batch]", batches))


def joined(batches: Batches) -> list[TextExample]:
    """Return the examples of all batches."""
    return [example for batch in as_batches(batches) for example in batch]


def _examples(task: Task, split: str, lengths: Mapping[str, int] | None, shuffle: bool, seed: int) -> Iterator[Example]:
    pipeline = task.pipeline(split, lengths, seed)
    if pipeline.pieces:
        raise UserError(f"Task {task.name!r} joins its examples, so it has no pairs of inputs and targets.")
    order = Order(len(pipeline), seed, shuffle)
    for position in range(len(pipeline)):
        yield from pipeline.outputs(*order(position))


def _text(task: Task, example: Example, feature: str) -> Any:
    text = example.get(f"{feature}_pretokenized")
    return task.output_features[feature].vocabulary.decode(example[feature]) if text is None else text


def _ids(task: Task, example: Example, feature: str) -> list[int]:
    return np.asarray(example[feature]).tolist()
