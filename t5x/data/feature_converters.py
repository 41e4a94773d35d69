"""Convert a task's examples to the arrays a model takes.

A converter fills one row at a time. With `pack=True` a row holds as many complete examples as fit: the loader adds up
their `sizes` until the next one would exceed the row's `capacity`, as seqio does. Rows equal seqio's except in two rare
cases: an example without inputs (or targets) still counts as a segment, so that encoder and decoder segments stay
aligned; and an id 0 inside an example is kept, where seqio drops one token from its end instead.
"""

import abc
import collections
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from t5x._runtime.errors import UserError

logger = logging.getLogger(__name__)

Example = Mapping[str, Any]
Row = dict[str, np.ndarray]
Lengths = Mapping[str, int]


def non_padding_position(tokens: np.ndarray, dtype: Any = np.int32, pad_id: int = 0) -> np.ndarray:
    """Return 1 where `tokens` is not padding and 0 elsewhere, in the same shape."""
    return (tokens != pad_id).astype(dtype)


def make_autoregressive_inputs(
    targets: np.ndarray, sequence_id: np.ndarray | None = None, bos_id: int = 0
) -> np.ndarray:
    """Shift targets right by one, with `bos_id` at the start of each segment.

    >>> make_autoregressive_inputs(np.array([3, 8, 1, 9, 1, 0]), np.array([1, 1, 1, 2, 2, 0]))
    array([0, 3, 8, 0, 9, 0])

    Args:
      targets: ids [..., length].
      sequence_id: segment of each position [..., length], for packed rows.
      bos_id: first input.
    """
    inputs = np.empty_like(targets)
    inputs[..., 1:] = targets[..., :-1]
    inputs[..., :1] = bos_id
    if sequence_id is not None:
        inputs[..., 1:][sequence_id[..., 1:] != sequence_id[..., :-1]] = bos_id
    return inputs


class FeatureConverter(abc.ABC):
    """Converts the examples of a row to model features.

    Args:
      pack: put several examples in a row.
      use_custom_packing_ops: accepted for seqio compatibility; no effect.
      apply_length_check: False trims features that are too long even if the dataset asks for an error.
      bos_id: first decoder input.
      pad_id: the padding token.

    Attributes:
      trimmed: number of times each task feature was trimmed.
    """

    TASK_FEATURES: tuple[str, ...] = ()
    # Used if they are in task_feature_lengths.
    OPTIONAL_TASK_FEATURES: tuple[str, ...] = ()
    pad_id = 0

    def __init__(
        self,
        pack: bool = False,
        use_custom_packing_ops: bool = False,
        apply_length_check: bool = True,
        bos_id: int = 0,
        pad_id: int = 0,
    ):
        self.pack = pack
        self.bos_id = bos_id
        if pad_id:  # else it stays the class's: the data fingerprints of earlier checkpoints do not know it
            self.pad_id = pad_id
        self.trimmed: collections.Counter[str] = collections.Counter()
        self._apply_length_check = apply_length_check

    @abc.abstractmethod
    def get_model_feature_lengths(self, task_feature_lengths: Lengths) -> dict[str, int]:
        """Return {model feature: length} for {task feature: length}."""

    @abc.abstractmethod
    def convert_row(self, examples: Sequence[Example], task_feature_lengths: Lengths, *, trim: bool = True) -> Row:
        """Return one row of the batch.

        Args:
          examples: the examples of the row: one; none for a row of padding; when packing, several that fit.
          task_feature_lengths: {task feature: length}.
          trim: truncate features that are too long; False raises a UserError instead.

        Returns:
          {model feature: int32 [length]}.
        """

    def __call__(self, ds: Iterable[Example], task_feature_lengths: Lengths) -> Any:
        """Convert examples one by one, or a tf.data.Dataset as seqio's converter of the same name does."""
        if not hasattr(ds, "element_spec"):
            return [self.convert_row([example], task_feature_lengths) for example in ds]
        import seqio

        if self.bos_id or self.pad_id:
            raise UserError(
                f"seqio's converters pad with 0, and the model has decoder_start_token_id {self.bos_id} and "
                f"pad_token_id {self.pad_id}: use tasks of t5x.data."
            )
        seqio_converter = getattr(seqio, type(self).__name__, None)
        if seqio_converter is None:
            raise UserError(f"seqio has no {type(self).__name__}, so a tf.data.Dataset cannot be converted by it.")
        return seqio_converter(pack=self.pack)(ds, dict(task_feature_lengths))

    def capacity(self, task_feature_lengths: Lengths) -> tuple[int, ...]:
        """Return the number of positions of a row in each packed feature; (1,), one example, without packing."""
        return tuple(task_feature_lengths[feature] for feature in self.TASK_FEATURES) if self.pack else (1,)

    def sizes(self, example: Example, task_feature_lengths: Lengths, trim: bool = True) -> tuple[int, ...]:
        """Return the number of positions of `capacity` that an example takes."""
        if not self.pack:
            return (1,)
        return tuple(map(len, self._ids_of(example, task_feature_lengths, trim, count=False)))

    def convert_batch(
        self, rows: Sequence[Sequence[Example]], task_feature_lengths: Lengths, *, trim: bool = True
    ) -> Row:
        """Return the rows as a batch, {model feature: int32 [rows, length]}."""
        return stack_rows([self.convert_row(row, task_feature_lengths, trim=trim) for row in rows])

    def check(self, available: Sequence[str], task_feature_lengths: Lengths, task_name: str) -> None:
        """Raise a UserError if the task lacks a feature, or a feature has no length."""
        needed = self.task_features(task_feature_lengths)
        for feature in needed:
            if feature not in available:
                raise UserError(
                    f"{type(self).__name__} needs the features {', '.join(needed)}; task {task_name!r} "
                    f"has {', '.join(available)}."
                )
            if task_feature_lengths.get(feature) is None:
                raise UserError(
                    f"Task {task_name!r}: task_feature_lengths gives no length for {feature!r}: "
                    f"{dict(task_feature_lengths)}. Add it: TASK_FEATURE_LENGTHS = {{'inputs': 512, 'targets': 114}}."
                )

    def task_features(self, available: Collection[str]) -> tuple[str, ...]:
        """Return the features used of a task that has `available` features, or lengths for these."""
        optional = (feature for feature in self.OPTIONAL_TASK_FEATURES if feature in available)
        return (*optional, *self.TASK_FEATURES)

    def _names(self, side: str, *names: str) -> list[str]:
        packing = ("segment_ids", "positions") if self.pack else ()
        return [f"{side}_{name}" for name in (*names, *packing)]

    def _place_examples(self, examples: Sequence[Example], lengths: Lengths, trim: bool) -> list["_Placed"]:
        """Return one row for each of TASK_FEATURES."""
        ids = [self._ids_of(example, lengths, trim) for example in examples]
        return self._place(ids, [lengths[feature] for feature in self.TASK_FEATURES])

    def _ids_of(self, example: Example, lengths: Lengths, trim: bool, count: bool = True) -> tuple[Any, ...]:
        """Return the ids of each of TASK_FEATURES that go into the row."""
        return tuple(self._ids(example, feature, lengths[feature], trim, count) for feature in self.TASK_FEATURES)

    def _ids(self, example: Example, feature: str, length: int, trim: bool, count: bool) -> Any:
        """Return the first `length` ids of `feature`, without trailing padding when packing; count truncations."""
        ids = example[feature]
        if len(ids) > length:
            if not trim and self._apply_length_check:
                raise UserError(
                    f"{feature!r} has {len(ids)} tokens, more than its length {length}. Increase its length in "
                    "task_feature_lengths, or truncate it with trim_output_features=True."
                )
            if count:
                if not self.trimmed[feature]:
                    logger.warning(
                        "%r of an example has %d tokens and is truncated to %d; further truncations are only counted",
                        feature, len(ids), length,
                    )  # fmt: skip
                self.trimmed[feature] += 1
            ids = ids[:length]
        if self.pack and len(ids) and ids[-1] == self.pad_id:
            ids = ids[: len(np.trim_zeros(np.asarray(ids) - self.pad_id, "b"))]
        return ids

    def _place(self, examples: Sequence[tuple[Any, ...]], lengths: Sequence[int]) -> list["_Placed"]:
        """Concatenate the examples' ids into one row per feature.

        Args:
          examples: for each example, the ids of each feature.
          lengths: row length of each feature.
        """
        if len(examples) > 1 and not self.pack:
            raise ValueError(f"{len(examples)} examples for one row, without packing")
        placed = [_Placed(*np.zeros((3 if self.pack else 1, length), np.int32)) for length in lengths]
        for row in placed:
            row.tokens[:] = self.pad_id
        starts = [0] * len(lengths)
        segment = 0
        for ids_of in examples:
            segment += any(map(len, ids_of))
            for i, (row, ids) in enumerate(zip(placed, ids_of, strict=True)):
                here = slice(starts[i], starts[i] + len(ids))
                if here.stop > lengths[i]:
                    raise ValueError(f"{here.stop} ids for the {lengths[i]} positions of a row")
                row.tokens[here] = ids
                if row.segment_ids is not None and row.positions is not None:
                    row.segment_ids[here] = segment
                    row.positions[here] = np.arange(len(ids))
                starts[i] = here.stop
        return placed


class _Placed(NamedTuple):
    """The ids of a row, int32 [length]; when packing also segments (1, 2, …; 0 for padding) and positions in them."""

    tokens: np.ndarray
    segment_ids: np.ndarray | None = None
    positions: np.ndarray | None = None

    def packing(self, side: str) -> Row:
        if self.segment_ids is None or self.positions is None:
            return {}
        return {f"{side}_segment_ids": self.segment_ids, f"{side}_positions": self.positions}

    def decoder_features(self, bos_id: int, pad_id: int) -> Row:
        return {
            "decoder_target_tokens": self.tokens,
            "decoder_input_tokens": make_autoregressive_inputs(self.tokens, self.segment_ids, bos_id),
            "decoder_loss_weights": non_padding_position(self.tokens, pad_id=pad_id),
            **self.packing("decoder"),
        }


class EncDecFeatureConverter(FeatureConverter):
    """Converter for encoder-decoder models: `inputs` for the encoder, `targets` for the decoder.

    >>> def show(row):
    ...     for name, ids in row.items():
    ...         print(f"{name:22}", *ids)
    >>> lengths = {"inputs": 10, "targets": 7}
    >>> first = {"inputs": [7, 8, 5, 1], "targets": [3, 9, 1]}
    >>> show(EncDecFeatureConverter().convert_row([first], lengths))
    encoder_input_tokens   7 8 5 1 0 0 0 0 0 0
    decoder_target_tokens  3 9 1 0 0 0 0
    decoder_input_tokens   0 3 9 1 0 0 0
    decoder_loss_weights   1 1 1 0 0 0 0

    Packed:

    >>> second = {"inputs": [8, 4, 9, 3, 1], "targets": [4, 1]}
    >>> show(EncDecFeatureConverter(pack=True).convert_row([first, second], lengths))
    encoder_input_tokens   7 8 5 1 8 4 9 3 1 0
    encoder_segment_ids    1 1 1 1 2 2 2 2 2 0
    encoder_positions      0 1 2 3 0 1 2 3 4 0
    decoder_target_tokens  3 9 1 4 1 0 0
    decoder_input_tokens   0 3 9 0 4 0 0
    decoder_loss_weights   1 1 1 1 1 0 0
    decoder_segment_ids    1 1 1 2 2 0 0
    decoder_positions      0 1 2 0 1 0 0
    """

    TASK_FEATURES: tuple[str, ...] = ("inputs", "targets")

    def get_model_feature_lengths(self, task_feature_lengths: Lengths) -> dict[str, int]:
        encoder = self._names("encoder", "input_tokens")
        decoder = self._names("decoder", "target_tokens", "input_tokens", "loss_weights")
        inputs, targets = task_feature_lengths["inputs"], task_feature_lengths["targets"]
        return dict.fromkeys(encoder, inputs) | dict.fromkeys(decoder, targets)

    def convert_row(self, examples: Sequence[Example], task_feature_lengths: Lengths, *, trim: bool = True) -> Row:
        return self._features(*self._place_examples(examples, task_feature_lengths, trim))

    def _features(self, inputs: _Placed, targets: _Placed) -> Row:
        encoder = {"encoder_input_tokens": inputs.tokens, **inputs.packing("encoder")}
        return encoder | targets.decoder_features(self.bos_id, self.pad_id)


class PrePackedEncDecFeatureConverter(EncDecFeatureConverter):
    """`EncDecFeatureConverter` for examples that are already packed, with `*_segment_ids` and `*_positions`."""

    TASK_FEATURES = ("inputs", "inputs_segment_ids", "inputs_positions",
                     "targets", "targets_segment_ids", "targets_positions")  # fmt: skip

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        if self.pack:
            raise UserError("PrePackedEncDecFeatureConverter is for examples that are already packed: set pack=False.")

    def get_model_feature_lengths(self, task_feature_lengths: Lengths) -> dict[str, int]:
        return EncDecFeatureConverter(pack=True).get_model_feature_lengths(task_feature_lengths)

    def convert_row(self, examples: Sequence[Example], task_feature_lengths: Lengths, *, trim: bool = True) -> Row:
        rows = [row.tokens for row in self._place_examples(examples, task_feature_lengths, trim)]
        return self._features(_Placed(*rows[:3]), _Placed(*rows[3:]))


class DecoderFeatureConverter(FeatureConverter):
    """Converter for decoder-only models: `targets` alone (a language model), or after `inputs` (a prefix LM).

    The features in task_feature_lengths decide which. The loss of a prefix LM is on the targets only.
    `decoder_causal_attention` is 1 over the inputs and one more position, because decoder inputs are shifted right.

    Args:
      loss_on_targets_only: False also computes the loss on the inputs of a prefix LM.

    >>> row = DecoderFeatureConverter().convert_row(
    ...     [{"inputs": [7, 8], "targets": [3, 9, 1]}], {"inputs": 3, "targets": 4})
    >>> {name: list(map(int, ids)) for name, ids in row.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'decoder_target_tokens': [7, 8, 3, 9, 1, 0, 0], 'decoder_input_tokens': [0, 7, 8, 3, 9, 1, 0],
     'decoder_loss_weights': [0, 0, 1, 1, 1, 0, 0], 'decoder_causal_attention': [1, 1, 1, 0, 0, 0, 0]}
    """

    TASK_FEATURES: tuple[str, ...] = ("targets",)
    OPTIONAL_TASK_FEATURES: tuple[str, ...] = ("inputs",)
    # {feature that must not be in task_feature_lengths: the reason}
    _REFUSED: ClassVar[dict[str, str]] = {
        "suffixes": "suffixes after the targets (seqio's PrefixSuffixLMFeatureConverter) are not supported. Append "
        "them to the targets, and remove 'suffixes' from task_feature_lengths."
    }

    def __init__(self, loss_on_targets_only: bool = True, **kwargs: Any):
        super().__init__(**kwargs)
        self.loss_on_targets_only = loss_on_targets_only

    def get_model_feature_lengths(self, task_feature_lengths: Lengths) -> dict[str, int]:
        names = self._names("decoder", "target_tokens", "input_tokens", "loss_weights")
        names += ["decoder_causal_attention"] if "inputs" in task_feature_lengths else []
        return dict.fromkeys(names, _decoder_length(task_feature_lengths))

    def capacity(self, task_feature_lengths: Lengths) -> tuple[int, ...]:
        return (_decoder_length(task_feature_lengths),) if self.pack else (1,)

    def sizes(self, example: Example, task_feature_lengths: Lengths, trim: bool = True) -> tuple[int, ...]:
        return (sum(super().sizes(example, task_feature_lengths, trim)),)

    def check(self, available: Sequence[str], task_feature_lengths: Lengths, task_name: str) -> None:
        super().check(available, task_feature_lengths, task_name)
        for feature, reason in self._REFUSED.items():
            if feature in task_feature_lengths:
                raise UserError(f"Task {task_name!r}: {reason}")

    def convert_row(self, examples: Sequence[Example], task_feature_lengths: Lengths, *, trim: bool = True) -> Row:
        length = _decoder_length(task_feature_lengths)
        ids_of = [self._ids_of(example, task_feature_lengths, trim) for example in examples]
        (row,) = self._place([(np.concatenate(ids),) for ids in ids_of], [length])
        features = row.decoder_features(self.bos_id, self.pad_id)
        if "inputs" in task_feature_lengths:
            features["decoder_causal_attention"] = prefix = np.zeros(length, np.int32)
            start = 0
            for inputs, targets in ids_of or [((), ())]:
                middle = start + len(inputs)
                end = middle + len(targets)
                prefix[start : min(middle + 1, end) if self.pack else middle + 1] = 1
                if self.loss_on_targets_only:
                    features["decoder_loss_weights"][start:middle] = 0
                start = end
        return features

    def _ids_of(self, example: Example, lengths: Lengths, trim: bool, count: bool = True) -> tuple[Any, ...]:
        if "inputs" not in lengths:
            return super()._ids_of(example, lengths, trim, count)
        of_inputs, of_targets = lengths["inputs"], lengths["targets"]
        if trim or self._apply_length_check:
            inputs = self._ids(example, "inputs", of_inputs, trim, count)
        else:  # only what exceeds the whole row is too long
            inputs = self._ids(example, "inputs", of_inputs + of_targets, trim, count)
            of_targets += of_inputs - len(inputs)
        return inputs, self._ids(example, "targets", of_targets, trim, count)


class LMFeatureConverter(DecoderFeatureConverter):
    """A `DecoderFeatureConverter` for `targets` alone."""

    OPTIONAL_TASK_FEATURES = ()
    _REFUSED: ClassVar[dict[str, str]] = DecoderFeatureConverter._REFUSED | {
        "inputs": "LMFeatureConverter takes targets alone, but task_feature_lengths has 'inputs'. Remove it, or use "
        "PrefixLMFeatureConverter."
    }


class PrefixLMFeatureConverter(DecoderFeatureConverter):
    """A `DecoderFeatureConverter` for `inputs` and `targets`."""

    TASK_FEATURES: tuple[str, ...] = ("inputs", "targets")
    OPTIONAL_TASK_FEATURES = ()


class EncoderFeatureConverter(FeatureConverter):
    """Converter for encoder-only models such as BERT: `targets` has one token for each token of `inputs`.

    >>> row = EncoderFeatureConverter(mask_id=9).convert_row(
    ...     [{"inputs": [8, 9, 9, 3, 1], "targets": [8, 7, 4, 3, 1]}], {"inputs": 6, "targets": 6})
    >>> {name: list(map(int, ids)) for name, ids in row.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'encoder_input_tokens': [8, 9, 9, 3, 1, 0], 'encoder_target_tokens': [8, 7, 4, 3, 1, 0],
     'encoder_loss_weights': [0, 1, 1, 0, 0, 0]}

    Args:
      mask_id: the loss is computed where the inputs have this id.
    """

    TASK_FEATURES: tuple[str, ...] = ("inputs", "targets")

    def __init__(self, mask_id: int, **kwargs: Any):
        super().__init__(**kwargs)
        self.mask_id = mask_id

    def get_model_feature_lengths(self, task_feature_lengths: Lengths) -> dict[str, int]:
        names = self._names("encoder", "input_tokens", "target_tokens", "loss_weights")
        return dict.fromkeys(names, task_feature_lengths["inputs"])

    def check(self, available: Sequence[str], task_feature_lengths: Lengths, task_name: str) -> None:
        super().check(available, task_feature_lengths, task_name)
        if task_feature_lengths["inputs"] != task_feature_lengths["targets"]:
            raise UserError(
                f"Task {task_name!r}: an encoder needs inputs and targets of one length; task_feature_lengths is "
                f"{dict(task_feature_lengths)}."
            )

    def convert_row(self, examples: Sequence[Example], task_feature_lengths: Lengths, *, trim: bool = True) -> Row:
        inputs, targets = self._place_examples(examples, task_feature_lengths, trim)
        return {
            "encoder_input_tokens": inputs.tokens,
            "encoder_target_tokens": targets.tokens,
            "encoder_loss_weights": (inputs.tokens == self.mask_id).astype(np.int32),
            **inputs.packing("encoder"),
        }

    def _ids_of(self, example: Example, lengths: Lengths, trim: bool, count: bool = True) -> tuple[Any, ...]:
        sizes = len(example["inputs"]), len(example["targets"])
        if sizes[0] != sizes[1]:
            raise UserError(
                f"'inputs' has {sizes[0]} tokens and 'targets' {sizes[1]}; an encoder needs a target for every input."
            )
        inputs, _ = super()._ids_of(example, lengths, trim, count)
        return inputs, example["targets"][: len(inputs)]


class PassThroughFeatureConverter(FeatureConverter):
    """Passes the features in task_feature_lengths through, for examples that already are rows. Nothing is packed.

    Args:
      kwargs: arguments of the other converters; no effect.
    """

    def __init__(self, **kwargs: Any):
        super().__init__()

    def get_model_feature_lengths(self, task_feature_lengths: Lengths) -> dict[str, int]:
        return dict(task_feature_lengths)

    def convert_row(self, examples: Sequence[Example], task_feature_lengths: Lengths, *, trim: bool = True) -> Row:
        if not examples:
            return {feature: np.zeros(length, np.int32) for feature, length in task_feature_lengths.items()}
        (example,) = examples
        for feature, length in task_feature_lengths.items():
            if len(example[feature]) != length:
                raise UserError(
                    f"{feature!r} has {len(example[feature])} values, not {length}: PassThroughFeatureConverter takes "
                    "examples that already have their length. Fix the task, or the length in task_feature_lengths."
                )
        return {feature: np.asarray(example[feature]) for feature in task_feature_lengths}

    def task_features(self, available: Collection[str]) -> tuple[str, ...]:
        return tuple(available)


def _decoder_length(lengths: Lengths) -> int:
    return lengths.get("inputs", 0) + lengths["targets"]


def stack_rows(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Stack {feature: [length]} rows into {feature: [rows, length]}."""
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}
