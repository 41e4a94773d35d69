"""Feature converters for pairs and lists of passages."""

from collections.abc import Sequence

import numpy as np

from t5x.data.feature_converters import EncDecFeatureConverter, Example, Lengths, Row
from t5x.errors import UserError


class RankingFeatureConverter(EncDecFeatureConverter):
    """`EncDecFeatureConverter` that also converts tasks of lists (those with `grades`), one row per list.

    >>> lists = {"inputs": [[7, 1, 0], [8, 9, 1]], "targets": [5, 6], "grades": [2, 0]}
    >>> row = RankingFeatureConverter().convert_row([lists], {"inputs": 3, "targets": 2, "grades": 2})
    >>> {name: values.tolist() for name, values in row.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'encoder_input_tokens': [[7, 1, 0], [8, 9, 1]], 'decoder_target_tokens': [5, 6],
     'decoder_loss_weights': [1, 1], 'passage_grades': [2, 0]}
    """

    OPTIONAL_TASK_FEATURES = ("grades",)

    def get_model_feature_lengths(self, task_feature_lengths: Lengths) -> dict[str, int]:
        if "grades" not in task_feature_lengths:
            return super().get_model_feature_lengths(task_feature_lengths)
        names = ("decoder_target_tokens", "decoder_loss_weights", "passage_grades")
        passages = dict.fromkeys(names, task_feature_lengths["targets"])
        return {"encoder_input_tokens": task_feature_lengths["inputs"], **passages}

    def convert_row(self, examples: Sequence[Example], task_feature_lengths: Lengths, *, trim: bool = True) -> Row:
        if "grades" not in task_feature_lengths:
            if any(np.ndim(example["inputs"]) > 1 for example in examples):
                raise UserError("The example is a list of passages: set task_feature_lengths['grades'] too.")
            return super().convert_row(examples, task_feature_lengths, trim=trim)
        if self.pack:
            raise UserError("Lists of passages cannot be packed: set pack=False.")
        passages, length = task_feature_lengths["targets"], task_feature_lengths["inputs"]
        inputs, targets = np.zeros((passages, length), np.int32), np.zeros(passages, np.int32)
        grades = np.zeros_like(targets)
        for example in examples:
            inputs[:], targets[:], grades[:] = example["inputs"], example["targets"], example["grades"]
        return {
            "encoder_input_tokens": inputs,
            "decoder_target_tokens": targets,
            "decoder_loss_weights": (targets != 0).astype(np.int32),
            "passage_grades": grades,
        }
