import logging

import numpy as np
import pytest

from t5x.data import EncDecFeatureConverter, make_autoregressive_inputs, non_padding_position
from t5x.errors import UserError


def lists(row):
    return {name: ids.tolist() for name, ids in row.items()}


@pytest.mark.parametrize(
    ("example", "lengths", "expected"),
    [
        (
            {"inputs": [9, 4, 3, 8, 1], "targets": [3, 9, 4, 1]},
            {"inputs": 7, "targets": 5},
            {
                "encoder_input_tokens": [9, 4, 3, 8, 1, 0, 0],
                "decoder_target_tokens": [3, 9, 4, 1, 0],
                "decoder_input_tokens": [0, 3, 9, 4, 1],
                "decoder_loss_weights": [1, 1, 1, 1, 0],
            },
        ),
        (
            {"inputs": [9, 4, 3, 8, 1], "targets": [3, 9, 4, 5, 1]},
            {"inputs": 5, "targets": 5},
            {
                "encoder_input_tokens": [9, 4, 3, 8, 1],
                "decoder_target_tokens": [3, 9, 4, 5, 1],
                "decoder_input_tokens": [0, 3, 9, 4, 5],
                "decoder_loss_weights": [1, 1, 1, 1, 1],
            },
        ),
        (  # padding inside the targets has no weight
            {"inputs": [], "targets": [3, 0, 4]},
            {"inputs": 1, "targets": 4},
            {
                "encoder_input_tokens": [0],
                "decoder_target_tokens": [3, 0, 4, 0],
                "decoder_input_tokens": [0, 3, 0, 4],
                "decoder_loss_weights": [1, 0, 1, 0],
            },
        ),
        (  # what is too long is cut
            {"inputs": [1, 2, 3], "targets": [4, 5, 6]},
            {"inputs": 2, "targets": 2},
            {
                "encoder_input_tokens": [1, 2],
                "decoder_target_tokens": [4, 5],
                "decoder_input_tokens": [0, 4],
                "decoder_loss_weights": [1, 1],
            },
        ),
    ],
)
def test_rows(example, lengths, expected):
    converter = EncDecFeatureConverter()
    row = converter.convert_row([{name: np.array(ids) for name, ids in example.items()}], lengths)
    assert lists(row) == expected
    assert {ids.dtype.name for ids in row.values()} == {"int32"}
    assert {name: len(ids) for name, ids in row.items()} == converter.get_model_feature_lengths(lengths)


def test_a_batch_with_a_row_of_padding():
    rows = [[{"inputs": [5, 1], "targets": [6, 1], "text": "five"}], []]
    batch = EncDecFeatureConverter().convert_batch(rows, {"inputs": 2, "targets": 3})
    assert lists(batch) == {
        "encoder_input_tokens": [[5, 1], [0, 0]],
        "decoder_target_tokens": [[6, 1, 0], [0, 0, 0]],
        "decoder_input_tokens": [[0, 6, 1], [0, 0, 0]],
        "decoder_loss_weights": [[1, 1, 0], [0, 0, 0]],
    }


def test_trimming_is_counted_and_reported_once(caplog):
    converter = EncDecFeatureConverter()
    with caplog.at_level(logging.WARNING, "t5x"):
        for _ in range(3):
            converter.convert_row([{"inputs": [1, 2, 3], "targets": [1]}], {"inputs": 2, "targets": 2})
    assert converter.trimmed == {"inputs": 3}
    assert len(caplog.records) == 1
    assert "3 tokens and is cut to 2" in caplog.text


def test_without_trimming_too_long_is_an_error():
    example = {"inputs": [1, 2, 3], "targets": [1]}
    with pytest.raises(UserError, match="'inputs' has 3 tokens, more than its length 2"):
        EncDecFeatureConverter().convert_row([example], {"inputs": 2, "targets": 2}, trim=False)
    unchecked = EncDecFeatureConverter(apply_length_check=False)
    row = unchecked.convert_row([example], {"inputs": 2, "targets": 2}, trim=False)
    assert row["encoder_input_tokens"].tolist() == [1, 2]


def test_autoregressive_inputs_of_packed_and_batched_targets():
    targets = np.array([[3, 8, 1, 9, 1, 5, 4, 1, 0, 0], [7, 1, 6, 6, 6, 6, 1, 0, 0, 0]])
    segments = np.array([[1, 1, 1, 2, 2, 3, 3, 3, 0, 0], [1, 1, 2, 2, 2, 2, 2, 0, 0, 0]])
    assert make_autoregressive_inputs(targets, segments).tolist() == [
        [0, 3, 8, 0, 9, 0, 5, 4, 0, 0],
        [0, 7, 0, 6, 6, 6, 6, 0, 0, 0],
    ]
    assert make_autoregressive_inputs(targets[1], bos_id=9).tolist() == [9, 7, 1, 6, 6, 6, 6, 1, 0, 0]
    assert make_autoregressive_inputs(np.zeros(0, np.int32)).shape == (0,)


def test_non_padding_position():
    assert non_padding_position(np.array([3, 8, 5, 0, 0, 2, 0])).tolist() == [1, 1, 1, 0, 0, 1, 0]


def test_packing_is_refused():
    with pytest.raises(UserError, match="pack=False"):
        EncDecFeatureConverter(pack=True)


def test_missing_features_and_lengths():
    converter = EncDecFeatureConverter()
    with pytest.raises(UserError, match=r"needs the features inputs, targets; task 'lm' has targets"):
        converter.check(("targets",), {"inputs": 1, "targets": 1}, "lm")
    with pytest.raises(UserError, match="no length for 'targets'"):
        converter.check(("inputs", "targets"), {"inputs": 1}, "task")
