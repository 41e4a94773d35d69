import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.data import ByteVocabulary, Feature, PassThroughVocabulary, SentencePieceVocabulary
from t5x.data.preprocessors import (
    append_eos,
    append_eos_after_trim,
    rekey,
    tokenize,
    tokenize_and_append_eos,
    truncate_inputs_left,
)

BYTES = {"inputs": Feature(ByteVocabulary(), add_eos=False), "targets": Feature(ByteVocabulary(), add_eos=True)}


def lists(value):
    """Arrays as lists, at any depth."""
    if isinstance(value, dict):
        return {name: lists(one) for name, one in value.items()}
    if isinstance(value, np.ndarray):
        return value.tolist()
    return [lists(one) for one in value] if isinstance(value, list) else value


def test_rekey():
    example = {"text": "good", "other": "bad"}
    assert rekey(example, {"inputs": "other", "targets": "text"}) == {"inputs": "bad", "targets": "good"}
    assert rekey(example, {"inputs": "text", "targets": None}) == {"inputs": "good", "targets": ""}
    assert rekey(example) == example
    with pytest.raises(KeyError, match="label"):
        rekey(example, {"inputs": "label"})


@pytest.mark.parametrize("ids", [[5, 2**31], np.array([5, 2**31]), [np.int64(2**31)]])
def test_ids_that_do_not_fit_are_refused(ids):
    features = {"targets": Feature(PassThroughVocabulary(2**40))}
    with pytest.raises(UserError, match=r"feature 'targets': .*2147483648.* int32"):
        tokenize({"targets": ids}, features)
    wide = {"targets": Feature(PassThroughVocabulary(2**40), dtype="int64")}
    assert tokenize({"targets": ids}, wide)["targets"].max() == 2**31


def test_tokenize_keeps_the_text_and_other_fields():
    example = {"inputs": "ab", "targets": "c", "id": 7}
    assert lists(tokenize(example, BYTES)) == {
        "inputs": [100, 101],
        "inputs_pretokenized": "ab",
        "targets": [102],
        "targets_pretokenized": "c",
        "id": 7,
    }
    made = tokenize(example, BYTES, copy_pretokenized=False)
    assert lists(made) == {"inputs": [100, 101], "targets": [102], "id": 7}
    assert made["inputs"].dtype == np.int32
    assert example["inputs"] == "ab"


def test_tokenize_and_append_eos_honours_add_eos():
    made = tokenize_and_append_eos({"inputs": "ab", "targets": "c"}, BYTES, copy_pretokenized=False)
    assert lists(made) == {"inputs": [100, 101], "targets": [102, 1]}


def test_empty_text_becomes_eos_alone():
    made = tokenize_and_append_eos({"targets": ""}, BYTES)
    assert lists(made) == {"targets_pretokenized": "", "targets": [1]}


def test_nested_texts_get_eos_after_the_last_of_each_list():
    flat = tokenize({"targets": ["a", "b"]}, BYTES, copy_pretokenized=False, with_eos=True)
    assert lists(flat) == {"targets": [[100], [101, 1]]}
    nested = tokenize({"targets": [["a", "b"], ["c"]]}, BYTES, copy_pretokenized=False, with_eos=True)
    assert lists(nested) == {"targets": [[[100], [101, 1]], [[102, 1]]]}


def test_tokenize_passes_ids_through():
    features = {"targets": Feature(PassThroughVocabulary(100), add_eos=False)}
    for ids in ([5, 6], np.array([5, 6])):
        assert lists(tokenize({"targets": ids}, features, copy_pretokenized=False)) == {"targets": [5, 6]}


@pytest.mark.parametrize("value", [None, 3])
def test_tokenize_names_a_feature_that_is_not_a_string(value):
    with pytest.raises(UserError, match="feature 'targets': only text"):
        tokenize({"targets": value}, BYTES)


def test_tokenize_real_text(t5_model_file):
    features = {"targets": Feature(SentencePieceVocabulary(t5_model_file, extra_ids=100))}
    made = tokenize_and_append_eos({"targets": "<extra_id_0> That is good. <extra_id_1>"}, features)
    assert made["targets"].tolist() == [32099, 466, 19, 207, 5, 32098, 1]


def test_append_eos_does_not_trim():
    example = {"inputs": [5, 6], "targets": [7, 8, 9], "other": [1]}
    assert lists(append_eos(example, BYTES)) == {"inputs": [5, 6], "targets": [7, 8, 9, 1], "other": [1]}


@pytest.mark.parametrize(
    ("ids", "length", "expected"),
    [
        ([4, 5, 6, 7], 3, [4, 5, 1]),
        ([4, 5, 6, 7], 4, [4, 5, 6, 1]),
        ([4, 5, 6, 7], 5, [4, 5, 6, 7, 1]),
        ([4, 5, 6, 7], 1, [1]),
        ([4, 5, 6, 7], None, [4, 5, 6, 7, 1]),
        ([], 3, [1]),
        ([[20, 21], [], [22, 23, 24, 25]], 4, [[20, 21, 1], [1], [22, 23, 24, 1]]),
        (np.array([[4, 5], [6, 7]]), 4, [[4, 5, 1], [6, 7, 1]]),
    ],
)
def test_append_eos_after_trim_leaves_room(ids, length, expected):
    made = append_eos_after_trim({"targets": ids}, BYTES, sequence_length={"targets": length, "inputs": 2})
    assert lists(made) == {"targets": expected}


def test_append_eos_after_trim_leaves_features_without_eos_alone():
    made = append_eos_after_trim({"inputs": [1, 2, 3], "other": [4, 5]}, BYTES, {"inputs": 2, "other": 1})
    assert lists(made) == {"inputs": [1, 2, 3], "other": [4, 5]}
    assert lists(append_eos_after_trim({"targets": [4, 5]}, BYTES, None)) == {"targets": [4, 5, 1]}


def test_eos_of_a_vocabulary_that_has_none():
    features = {"targets": Feature(PassThroughVocabulary(100))}
    with pytest.raises(UserError, match="add_eos=False"):
        append_eos({"targets": [5]}, features)


def test_truncate_inputs_left_keeps_the_end():
    example = {"inputs": np.array([1, 2, 3]), "targets": [4, 5, 6, 7]}
    made = truncate_inputs_left(example, {"inputs": 2, "targets": 2})
    assert lists(made) == {"inputs": [2, 3], "targets": [4, 5, 6, 7]}
    assert lists(truncate_inputs_left(example, {"inputs": 9})) == lists(example)
    assert truncate_inputs_left(example, None) is truncate_inputs_left(example, {"targets": 1}) is example
