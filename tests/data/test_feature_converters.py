import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from t5x._runtime.errors import UserError
from t5x.data.feature_converters import (
    DecoderFeatureConverter,
    EncDecFeatureConverter,
    EncoderFeatureConverter,
    LMFeatureConverter,
    PassThroughFeatureConverter,
    PrefixLMFeatureConverter,
    PrePackedEncDecFeatureConverter,
    make_autoregressive_inputs,
    non_padding_position,
)


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
    assert "3 tokens and is truncated to 2" in caplog.text


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


EXAMPLES = [{"inputs": [7, 8, 5, 1], "targets": [3, 9, 1]}, {"inputs": [8, 4, 9, 3, 1], "targets": [4, 1]}]


def test_a_packed_row():
    lengths = {"inputs": 10, "targets": 7}
    converter = EncDecFeatureConverter(pack=True)
    row = converter.convert_row(EXAMPLES, lengths)
    assert lists(row) == {
        "encoder_input_tokens": [7, 8, 5, 1, 8, 4, 9, 3, 1, 0],
        "decoder_target_tokens": [3, 9, 1, 4, 1, 0, 0],
        "decoder_input_tokens": [0, 3, 9, 0, 4, 0, 0],
        "decoder_loss_weights": [1, 1, 1, 1, 1, 0, 0],
        "encoder_segment_ids": [1, 1, 1, 1, 2, 2, 2, 2, 2, 0],
        "decoder_segment_ids": [1, 1, 1, 2, 2, 0, 0],
        "encoder_positions": [0, 1, 2, 3, 0, 1, 2, 3, 4, 0],
        "decoder_positions": [0, 1, 2, 0, 1, 0, 0],
    }
    assert {ids.dtype.name for ids in row.values()} == {"int32"}
    assert {name: len(ids) for name, ids in row.items()} == converter.get_model_feature_lengths(lengths)


def test_a_packed_prefix_lm():
    row = DecoderFeatureConverter(pack=True).convert_row(EXAMPLES, {"inputs": 7, "targets": 8})
    assert lists(row) == {
        "decoder_target_tokens": [7, 8, 5, 1, 3, 9, 1, 8, 4, 9, 3, 1, 4, 1, 0],
        "decoder_input_tokens": [0, 7, 8, 5, 1, 3, 9, 0, 8, 4, 9, 3, 1, 4, 0],
        "decoder_loss_weights": [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0],
        "decoder_positions": [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 6, 0],
        "decoder_segment_ids": [1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 0],
        "decoder_causal_attention": [1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0],
    }


def test_a_prefix_lm_that_learns_its_inputs():
    converter = PrefixLMFeatureConverter(loss_on_targets_only=False)
    row = converter.convert_row([{"inputs": [9, 4], "targets": [3, 1]}], {"inputs": 3, "targets": 2})
    assert row["decoder_loss_weights"].tolist() == [1, 1, 1, 1, 0]
    assert row["decoder_causal_attention"].tolist() == [1, 1, 1, 0, 0]


def test_a_packed_language_model():
    converter = LMFeatureConverter(pack=True)
    row = converter.convert_row([{"targets": [3, 9, 1]}, {"targets": [4, 1]}], {"targets": 6})
    assert lists(row) == {
        "decoder_target_tokens": [3, 9, 1, 4, 1, 0],
        "decoder_input_tokens": [0, 3, 9, 0, 4, 0],
        "decoder_loss_weights": [1, 1, 1, 1, 1, 0],
        "decoder_segment_ids": [1, 1, 1, 2, 2, 0],
        "decoder_positions": [0, 1, 2, 0, 1, 0],
    }
    assert converter.get_model_feature_lengths({"targets": 6}) == dict.fromkeys(row, 6)


def test_a_packed_encoder():
    examples = [
        {"inputs": [8, 9, 9, 3, 4, 1], "targets": [8, 7, 4, 3, 4, 1]},
        {"inputs": [8, 3, 9, 1], "targets": [8, 3, 6, 1]},
    ]
    lengths = {"inputs": 11, "targets": 11}
    converter = EncoderFeatureConverter(mask_id=9, pack=True)
    row = converter.convert_row(examples, lengths)
    assert lists(row) == {
        "encoder_input_tokens": [8, 9, 9, 3, 4, 1, 8, 3, 9, 1, 0],
        "encoder_target_tokens": [8, 7, 4, 3, 4, 1, 8, 3, 6, 1, 0],
        "encoder_loss_weights": [0, 1, 1, 0, 0, 0, 0, 0, 1, 0, 0],
        "encoder_segment_ids": [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0],
        "encoder_positions": [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 0],
    }
    assert converter.get_model_feature_lengths(lengths) == dict.fromkeys(row, 11)


def test_an_encoder_needs_a_target_for_every_input():
    converter = EncoderFeatureConverter(mask_id=9)
    with pytest.raises(UserError, match="'inputs' has 3 tokens and 'targets' 2"):
        converter.convert_row([{"inputs": [8, 9, 1], "targets": [8, 1]}], {"inputs": 4, "targets": 4})
    with pytest.raises(UserError, match="of one length"):
        converter.check(("inputs", "targets"), {"inputs": 4, "targets": 5}, "task")


def test_segments_of_encoder_and_decoder_are_of_the_same_example_even_without_inputs():
    examples = [{"inputs": [7], "targets": [3]}, {"inputs": [], "targets": [4]}, {"inputs": [6], "targets": [5]}]
    row = EncDecFeatureConverter(pack=True).convert_row(examples, {"inputs": 3, "targets": 4})
    assert row["encoder_segment_ids"].tolist() == [1, 3, 0]
    assert row["decoder_segment_ids"].tolist() == [1, 2, 3, 0]


def test_an_example_without_targets_adds_no_loss_to_a_packed_prefix_lm():
    examples = [{"inputs": [5], "targets": []}, {"inputs": [6, 6], "targets": [2]}]
    row = PrefixLMFeatureConverter(pack=True).convert_row(examples, {"inputs": 4, "targets": 4})
    assert row["decoder_target_tokens"].tolist() == [5, 6, 6, 2, 0, 0, 0, 0]
    assert row["decoder_loss_weights"].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert row["decoder_causal_attention"].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_padding_at_the_end_of_an_example_is_not_packed_and_a_zero_inside_is_kept():
    examples = [{"inputs": [7, 0, 8, 0, 0], "targets": np.array([3, 0])}, {"inputs": [6], "targets": [5]}]
    converter = EncDecFeatureConverter(pack=True)
    lengths = {"inputs": 5, "targets": 3}
    assert converter.sizes(examples[0], lengths) == (3, 1)
    row = converter.convert_row(examples, lengths)
    assert row["encoder_input_tokens"].tolist() == [7, 0, 8, 6, 0]
    assert row["encoder_segment_ids"].tolist() == [1, 1, 1, 2, 0]
    assert row["decoder_target_tokens"].tolist() == [3, 5, 0]


def test_space_of_an_example_in_a_row():
    lengths = {"inputs": 5, "targets": 4}
    example = {"inputs": [1] * 9, "targets": [2, 2]}
    encdec = EncDecFeatureConverter(pack=True)
    assert (encdec.capacity(lengths), encdec.sizes(example, lengths)) == ((5, 4), (5, 2))
    prefix = DecoderFeatureConverter(pack=True)
    assert (prefix.capacity(lengths), prefix.sizes(example, lengths)) == ((9,), (7,))
    assert (prefix.capacity({"targets": 4}), prefix.sizes(example, {"targets": 4})) == ((4,), (2,))
    for single in (EncDecFeatureConverter(), DecoderFeatureConverter(), PassThroughFeatureConverter(pack=True)):
        assert (single.capacity(lengths), single.sizes(example, lengths)) == ((1,), (1,))
    assert not encdec.trimmed
    with pytest.raises(UserError, match="'inputs' has 9 tokens"):
        encdec.sizes(example, lengths, trim=False)


def test_examples_that_do_not_fit_are_not_lost_in_silence():
    with pytest.raises(ValueError, match="9 ids for the 8 positions"):
        EncDecFeatureConverter(pack=True).convert_row(EXAMPLES, {"inputs": 8, "targets": 7})
    with pytest.raises(ValueError, match="2 examples for one row"):
        EncDecFeatureConverter().convert_row(EXAMPLES, {"inputs": 10, "targets": 7})


@pytest.mark.parametrize("pack", [False, True])
def test_a_row_of_padding(pack):
    lengths = {"inputs": 2, "targets": 3}
    for converter in (
        EncDecFeatureConverter(pack=pack),
        EncoderFeatureConverter(mask_id=9, pack=pack),
        LMFeatureConverter(pack=pack),
        PassThroughFeatureConverter(),
    ):
        taken = {"targets": 3} if isinstance(converter, LMFeatureConverter) else lengths
        row = converter.convert_row([], taken)
        assert not any(ids.any() for ids in row.values())
        assert row.keys() == converter.get_model_feature_lengths(taken).keys()


ids = st.lists(st.integers(1, 99), min_size=1, max_size=6)


@given(st.lists(st.tuples(ids, ids), max_size=6), st.integers(0, 3), st.integers(0, 3))
def test_a_packed_row_holds_its_examples_whole(pairs, more_inputs, more_targets):
    examples = [{"inputs": inputs, "targets": targets} for inputs, targets in pairs]
    lengths = {
        "inputs": sum(len(inputs) for inputs, _ in pairs) + more_inputs + 1,
        "targets": sum(len(targets) for _, targets in pairs) + more_targets + 1,
    }
    row = EncDecFeatureConverter(pack=True).convert_row(examples, lengths)
    for segment, (inputs, targets) in enumerate(pairs, start=1):
        there, here = row["encoder_segment_ids"] == segment, row["decoder_segment_ids"] == segment
        assert row["encoder_input_tokens"][there].tolist() == inputs
        assert row["decoder_target_tokens"][here].tolist() == targets
        assert row["decoder_input_tokens"][here].tolist() == [0, *targets[:-1]]
        assert row["decoder_positions"][here].tolist() == list(range(len(targets)))
    assert row["decoder_loss_weights"].sum() == sum(len(targets) for _, targets in pairs)


def test_rows_that_are_packed_already():
    example = {
        "inputs": [7, 8, 1, 8],
        "targets": [3, 1, 4],
        "inputs_segment_ids": [1, 1, 1, 2],
        "targets_segment_ids": [1, 1, 2],
        "inputs_positions": [0, 1, 2, 0],
        "targets_positions": [0, 1, 0],
    }
    lengths = {feature: 5 if feature.startswith("inputs") else 4 for feature in example}
    row = PrePackedEncDecFeatureConverter().convert_row([example], lengths)
    assert row["decoder_input_tokens"].tolist() == [0, 3, 0, 0]
    assert row["encoder_segment_ids"].tolist() == [1, 1, 1, 2, 0]
    assert row["decoder_positions"].tolist() == [0, 1, 0, 0]
    with pytest.raises(UserError, match="set pack=False"):
        PrePackedEncDecFeatureConverter(pack=True)


def test_pass_through():
    converter = PassThroughFeatureConverter(pack=True, bos_id=3)
    example = {"image": np.array([0.5, 1.5]), "label": [3], "text": "not asked for"}
    assert lists(converter.convert_row([example], {"image": 2, "label": 1})) == {"image": [0.5, 1.5], "label": [3]}
    with pytest.raises(UserError, match="'image' has 2 values, not 3"):
        converter.convert_row([example], {"image": 3})
    with pytest.raises(UserError, match="needs the features image"):
        converter.check(("inputs",), {"image": 3}, "task")


def test_features_that_a_decoder_takes_or_not():
    with pytest.raises(UserError, match=r"needs the features inputs, targets; task 'lm' has targets"):
        DecoderFeatureConverter().check(("targets",), {"inputs": 3, "targets": 3}, "lm")
    DecoderFeatureConverter().check(("targets",), {"targets": 3}, "lm")
    with pytest.raises(UserError, match="takes targets alone"):
        LMFeatureConverter().check(("inputs", "targets"), {"inputs": 3, "targets": 3}, "task")
    with pytest.raises(UserError, match="no length for 'inputs'"):
        PrefixLMFeatureConverter().check(("inputs", "targets"), {"targets": 3}, "task")
    with pytest.raises(UserError, match="suffixes after the targets"):
        DecoderFeatureConverter().check(("inputs", "targets"), {"inputs": 3, "targets": 3, "suffixes": 3}, "task")


def test_missing_features_and_lengths():
    converter = EncDecFeatureConverter()
    with pytest.raises(UserError, match=r"needs the features inputs, targets; task 'lm' has targets"):
        converter.check(("targets",), {"inputs": 1, "targets": 1}, "lm")
    with pytest.raises(UserError, match="no length for 'targets'"):
        converter.check(("inputs", "targets"), {"inputs": 1}, "task")
