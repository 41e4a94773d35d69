"""From a task's examples to the arrays a model takes."""

import abc
import collections
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from t5x.errors import UserError

logger = logging.getLogger(__name__)

Example = Mapping[str, Any]


def non_padding_position(tokens: np.ndarray, dtype: Any = np.int32, pad_id: int = 0) -> np.ndarray:
    """1 where `tokens` is not padding, else 0. Same shape."""
    return (tokens != pad_id).astype(dtype)


def make_autoregressive_inputs(
    targets: np.ndarray, sequence_id: np.ndarray | None = None, bos_id: int = 0
) -> np.ndarray:
    """Targets shifted right by one, with `bos_id` at the beginning (of each segment, where there are several).

    >>> make_autoregressive_inputs(np.array([3, 8, 1, 9, 1, 0]), np.array([1, 1, 1, 2, 2, 0]))
    array([0, 3, 8, 0, 9, 0])

    Args:
      targets: ids [..., length].
      sequence_id: segment of each position [..., length], of packed rows.
      bos_id: first input.
    """
    inputs = np.empty_like(targets)
    inputs[..., 1:] = targets[..., :-1]
    inputs[..., :1] = bos_id
    if sequence_id is not None:
        inputs[..., 1:][sequence_id[..., 1:] != sequence_id[..., :-1]] = bos_id
    return inputs


class FeatureConverter(abc.ABC):
    """Makes a row of model features from the examples that go into it.

    Args:
      pack: several examples a row.
      use_custom_packing_ops: seqio's; without effect.
      apply_length_check: False trims features that are too long even where the dataset says not to.
      bos_id: first decoder input.

    Attributes:
      trimmed: how many times each task feature was trimmed.
    """

    TASK_FEATURES: tuple[str, ...] = ()

    def __init__(
        self,
        pack: bool = False,
        use_custom_packing_ops: bool = False,
        apply_length_check: bool = True,
        bos_id: int = 0,
    ):
        if pack:
            raise UserError(
                f"{type(self).__name__}: packing is not available in this version. Set pack=False "
                "(--gin.utils.DatasetConfig.pack=False)."
            )
        self.pack = pack
        self.bos_id = bos_id
        self.trimmed: collections.Counter[str] = collections.Counter()
        self._apply_length_check = apply_length_check

    @abc.abstractmethod
    def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]) -> dict[str, int]:
        """{model feature: length} for {task feature: length}."""

    @abc.abstractmethod
    def convert_row(
        self, examples: Sequence[Example], task_feature_lengths: Mapping[str, int], *, trim: bool = True
    ) -> dict[str, np.ndarray]:
        """One row of the batch.

        Args:
          examples: what goes into the row: one example, none for a row of padding; several when packing.
          task_feature_lengths: {task feature: length}.
          trim: cut features that are too long; False makes them a UserError.

        Returns:
          {model feature: int32 [length]}.
        """

    def convert_batch(
        self, rows: Sequence[Sequence[Example]], task_feature_lengths: Mapping[str, int], *, trim: bool = True
    ) -> dict[str, np.ndarray]:
        """The rows as one batch: {model feature: int32 [rows, length]}."""
        return stack_rows([self.convert_row(row, task_feature_lengths, trim=trim) for row in rows])

    def check(self, available: Sequence[str], task_feature_lengths: Mapping[str, int], task_name: str) -> None:
        """A UserError where the task lacks a feature, or a feature its length."""
        for feature in self.TASK_FEATURES:
            if feature not in available:
                raise UserError(
                    f"{type(self).__name__} needs the features {', '.join(self.TASK_FEATURES)}; task {task_name!r} "
                    f"has {', '.join(available)}."
                )
            if task_feature_lengths.get(feature) is None:
                raise UserError(
                    f"Task {task_name!r}: task_feature_lengths gives no length for {feature!r}: "
                    f"{dict(task_feature_lengths)}. Add it: TASK_FEATURE_LENGTHS = {{'inputs': 512, 'targets': 114}}."
                )

    def _padded(self, examples: Sequence[Example], feature: str, length: int, trim: bool) -> np.ndarray:
        """`feature` of at most one example, filled up with padding: int32 [length]."""
        row = np.zeros(length, np.int32)
        for example in examples:
            ids = example[feature]
            if len(ids) > length:
                if not trim and self._apply_length_check:
                    raise UserError(
                        f"{feature!r} has {len(ids)} tokens, more than its length {length}. Raise the length in "
                        "task_feature_lengths, or let it be cut with trim_output_features=True."
                    )
                if not self.trimmed[feature]:
                    logger.warning(
                        "%r of an example has %d tokens and is cut to %d; further ones are counted, not reported",
                        feature,
                        len(ids),
                        length,
                    )
                self.trimmed[feature] += 1
                ids = ids[:length]
            row[: len(ids)] = ids
        return row


class EncDecFeatureConverter(FeatureConverter):
    """For encoder-decoder models: `inputs` to the encoder, `targets` to the decoder.

    >>> row = EncDecFeatureConverter().convert_row(
    ...     [{"inputs": [7, 8, 1], "targets": [3, 9, 1]}], {"inputs": 4, "targets": 5})
    >>> {name: list(map(int, ids)) for name, ids in row.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'encoder_input_tokens': [7, 8, 1, 0], 'decoder_target_tokens': [3, 9, 1, 0, 0],
     'decoder_input_tokens': [0, 3, 9, 1, 0], 'decoder_loss_weights': [1, 1, 1, 0, 0]}
    """

    TASK_FEATURES = ("inputs", "targets")

    def get_model_feature_lengths(self, task_feature_lengths: Mapping[str, int]) -> dict[str, int]:
        decoder = ("decoder_target_tokens", "decoder_input_tokens", "decoder_loss_weights")
        return {
            "encoder_input_tokens": task_feature_lengths["inputs"],
            **dict.fromkeys(decoder, task_feature_lengths["targets"]),
        }

    def convert_row(
        self, examples: Sequence[Example], task_feature_lengths: Mapping[str, int], *, trim: bool = True
    ) -> dict[str, np.ndarray]:
        targets = self._padded(examples, "targets", task_feature_lengths["targets"], trim)
        return {
            "encoder_input_tokens": self._padded(examples, "inputs", task_feature_lengths["inputs"], trim),
            "decoder_target_tokens": targets,
            "decoder_input_tokens": make_autoregressive_inputs(targets, bos_id=self.bos_id),
            "decoder_loss_weights": non_padding_position(targets),
        }


def stack_rows(rows: Sequence[Mapping[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """{feature: [length]} rows as one {feature: [rows, length]}."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}
