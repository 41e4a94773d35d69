"""Batches of a user's own function."""

import numpy as np
import pytest

from t5x.errors import UserError
from t5x.trainer.datasets import ExternalBatches


def batches(*rows):
    return ExternalBatches([{"decoder_target_tokens": np.full((n, 3), i)} for i, n in enumerate(rows)])


def test_a_position_is_taken_and_gone_on_from():
    first = batches(2, 2, 2)
    assert first.peek()["decoder_target_tokens"][0, 0] == 0
    next(first)
    again = batches(2, 2, 2)
    again.restore(first.state())
    assert next(again)["decoder_target_tokens"][0, 0] == next(first)["decoder_target_tokens"][0, 0] == 1


def test_the_end_and_other_shapes_are_explained():
    few = batches(2)
    next(few)
    with pytest.raises(UserError, match=r"1 batches.*TRAIN_STEPS"):
        next(few)
    uneven = batches(2, 2, 1)
    next(uneven), next(uneven)
    with pytest.raises(UserError, match=r"Batch 3 .*\(1, 3\).*\(2, 3\)"):
        next(uneven)
    assert uneven.state()["batches"] == 2
