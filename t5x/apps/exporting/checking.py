"""Compare an export with its model."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.apps.exporting.programs import Exportable
from t5x.inference.loaded import Generation, LoadedModel, without_padding

TEXTS = (
    "translate English to German: The house is wonderful.",
    "What is the capital of France?",
    "summarize: The committee met on Monday, and after four hours of talks it agreed on a budget for the coming year.",
    "Is this review positive or negative? I would watch it again.",
)
QUERY = "a"  # short, so that it fits with a template
_LABELS = ("true", "false")
# Nats per token. int8 weights cost a Flan-T5 small 0.015 (100 inputs), 7 bits 0.04, and 6 bits 0.15.
INT8_WEIGHTS_LIMIT = 0.05
# CTranslate2 rounds activations and `wo` to int8 too, which costs it 0.14.
INT8_ACTIVATIONS_LIMIT = 0.3
_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # of log probabilities and logits, by the dtype of the activations


class WrongExport(UserError):
    """The outputs of an export are not those of the model."""


class ExportComparison:
    """The differences between an export and its model. A difference beyond the tolerance raises `WrongExport`.

    Args:
      dtype: of the activations.
    """

    def __init__(self, dtype: str):
        self._tolerance = _TOLERANCE[dtype]
        self._lines: list[str] = []

    def __str__(self) -> str:
        return "; ".join(self._lines)

    def numbers(self, name: str, expected: Any, actual: Any) -> None:
        """Compare arrays of log probabilities or logits."""
        expected, actual = np.asarray(expected, np.float64), np.asarray(actual, np.float64)
        if expected.shape != actual.shape:
            raise WrongExport(f"{name} has the shape {actual.shape}, not {expected.shape}. {_REFUSED}")
        difference = np.abs(actual - expected)
        if not np.all(difference <= self._tolerance * np.maximum(1, np.abs(expected) / 10)):  # also refuses NaN
            raise WrongExport(f"{name} differs by {difference.max():.2g} from the model's. {_REFUSED}")
        self._lines.append(f"{name} within {difference.max(initial=0):.1e}")

    def outputs(self, name: str, expected: Sequence[Any], actual: Sequence[Any], scores: Sequence[Any] = ()) -> None:
        """Compare generated outputs. Different outputs with the same score are ties.

        Args:
          expected, actual: strings or lists of ids.
          scores: (expected, actual) log probability of each output that differs, if the export has them.
        """
        if len(expected) != len(actual):
            raise WrongExport(f"{name} returned {len(actual)} outputs for {len(expected)} inputs. {_REFUSED}")
        wrong = [i for i, (a, b) in enumerate(zip(expected, actual, strict=True)) if a != b]
        for i in wrong:
            is_tie = scores and abs(scores[i][0] - scores[i][1]) <= self._tolerance * max(1, abs(scores[i][0]) / 10)
            if not is_tie:
                raise WrongExport(f"{name} returned {actual[i]!r}, the model {expected[i]!r}. {_REFUSED}")
        self._lines.append(f"{name}: {len(expected) - len(wrong)} of {len(expected)} outputs equal")


_REFUSED = "Nothing was exported; please report this with the model's name."


@dataclasses.dataclass
class Sample:
    """Inputs through which a model and its export are compared.

    Attributes:
      texts: the inputs.
      targets: a target each; empty uses what the model generates.
    """

    texts: Sequence[str] = TEXTS
    targets: Sequence[str] = ()

    def encoded(self, loaded: LoadedModel) -> tuple[list[list[int]], list[list[int]]]:
        """Return the ids of inputs and targets."""
        if not self.targets:
            self.targets = [output.text for output in loaded.generate(list(self.texts))]
        return [loaded.input_ids(x)[0] for x in self.texts], [loaded.target_ids(x)[0] for x in self.targets]

    def loss(self, loaded: LoadedModel) -> float:
        """Return the mean negative log likelihood of a target token."""
        inputs, targets = self.encoded(loaded)
        return -sum(scores_of(loaded, inputs, targets)) / sum(map(len, targets))


def report_loss(before: float, after: float, examples: int, limit: float = INT8_WEIGHTS_LIMIT) -> str:
    """Return a line about the loss with int8 weights. Raise `WrongExport` if it is higher by more than `limit`."""
    if not after - before <= limit:  # also refuses NaN
        raise WrongExport(
            f"With int8 weights the loss is {after:.4f} per token instead of {before:.4f}, which is more than {limit} "
            "above it. Export without --int8."
        )
    return f"int8 weights: loss {before:.4f} -> {after:.4f} per token ({after - before:+.4f}, {examples} examples)"


def compare_ids(exportable: Exportable, run: Callable[..., Mapping[str, np.ndarray]]) -> str:
    """Compare programs of token ids with the model, in batches of one and of three rows.

    Args:
      run: (name of a program, arrays of ids) -> {output: array}.
    """
    loaded = exportable.loaded
    comparison = ExportComparison(loaded.dtype)
    inputs = [loaded.input_ids(text, exportable.max_input_length)[0] for text in TEXTS]
    pad_id = loaded.model.pad_id
    input_ids = padded(inputs, exportable.max_input_length, pad_id)

    def generate(name: str, rows: slice) -> tuple[list[list[int]], np.ndarray]:
        outputs = run(name, input_ids[rows])
        ids = np.reshape(outputs["output_ids"], (-1, exportable.max_length))
        return [without_padding(row, pad_id) for row in ids], outputs["score"]

    targets = [output.tokens for output in compare_generations(comparison, exportable, inputs, generate)]
    scores = run("score", input_ids[1:], padded(targets[1:], exportable.max_length, pad_id))["score"]
    comparison.numbers("score", scores_of(loaded, inputs[1:], targets[1:]), scores)
    labels = [loaded.target_ids(word)[0][0] for word in _LABELS]
    expected = loaded.label_logits(inputs[1:], labels, max_input_length=exportable.max_input_length, batch_size=4)
    logits = run("rank", input_ids[1:], np.array([labels] * len(expected), np.int32))["logits"]
    comparison.numbers("rank", expected, logits)
    return str(comparison)


def compare_texts(
    exportable: Exportable, run: Callable[..., Mapping[str, np.ndarray]], ranked: Callable[..., Sequence[float]] | None
) -> str:
    """Compare signatures of strings with the model; see `compare_ids`.

    Args:
      run: (name of a signature, {input: strings}) -> {output: array}.
      ranked: scores of (query, document) pairs by the model; None if there is no signature `rank`.
    """
    loaded, texts = exportable.loaded, list(TEXTS)
    comparison = ExportComparison(loaded.dtype)
    inputs = [loaded.input_ids(text, exportable.max_input_length)[0] for text in texts]

    def generate(name: str, rows: slice) -> tuple[list[str], np.ndarray]:
        outputs = run(name, text_batch=texts[rows])
        return [text.decode() for text in np.ravel(outputs["text"])], outputs["score"]

    targets = [output.text for output in compare_generations(comparison, exportable, inputs, generate)]
    target_ids = [loaded.target_ids(text, exportable.max_length)[0] for text in targets[1:]]
    scores = run("score", text_batch=texts[1:], targets=targets[1:])["score"]
    comparison.numbers("score", scores_of(loaded, inputs[1:], target_ids), scores)
    if ranked is not None:
        pairs = [(QUERY, text) for text in (*texts[1:], " ".join(texts * exportable.max_input_length))]
        scores = run("rank", query=[query for query, _ in pairs], document=[text for _, text in pairs])["score"]
        comparison.numbers("rank", ranked(pairs), scores)
    return str(comparison)


def compare_generations(
    comparison: ExportComparison,
    exportable: Exportable,
    inputs: Sequence[Sequence[int]],
    generate: Callable[[str, slice], tuple[list[Any], np.ndarray]],
) -> list[Generation]:
    """Compare generated ids, or strings, and their scores, in a batch of one row and one of the others.

    Args:
      generate: (name of a program, rows) -> outputs and scores.

    Returns:
      The model's own best output for each input.
    """
    for name, decoding in exportable.decodings().items():
        predictions = exportable.loaded.predictions(
            inputs, decoding, max_length=exportable.max_length, max_input_length=exportable.max_input_length,
            batch_size=len(inputs),
        )  # fmt: skip
        generations = [generation for of_input in predictions for generation in of_input]
        batches = [generate(name, rows) for rows in (slice(0, 1), slice(1, None))]
        actual = [output for outputs, _ in batches for output in outputs]
        is_text = isinstance(actual[0], str)
        expected = [generation.text if is_text else generation.tokens for generation in generations]
        scores = np.concatenate([np.ravel(of_batch) for _, of_batch in batches])
        pairs = list(zip([generation.score for generation in generations], scores, strict=True))
        comparison.outputs(name, expected, actual, pairs)
        comparison.numbers(f"{name} scores", *zip(*pairs, strict=True))
    return generations[:: decoding.num_return]


def scores_of(loaded: LoadedModel, inputs: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> list[float]:
    """Return the log probabilities of targets by the model itself."""
    return loaded.scores(inputs, targets, max_input_length=max(map(len, inputs)), batch_size=len(inputs))


def padded(rows: Sequence[Sequence[int]], columns: int, pad_id: int = 0) -> np.ndarray:
    """Return int32 [rows, columns], filled up with `pad_id`.

    >>> padded([[5, 1], [1]], 3).tolist()
    [[5, 1, 0], [1, 0, 0]]
    """
    array = np.full((len(rows), columns), pad_id, np.int32)
    for row, ids in zip(array, rows, strict=True):
        row[: len(ids)] = ids
    return array
