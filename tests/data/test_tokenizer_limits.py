"""Untrusted tokenizers: those that would take all memory are refused before they see an input."""

import base64
import io
import json
import struct

import pytest

from t5x._runtime.errors import UserError
from t5x.data.vocabularies import ByteVocabulary, HuggingFaceVocabulary, PassThroughVocabulary, SentencePieceVocabulary
from tests.checkpoints.formats.test_huggingface_tokenizer import small_tokenizer


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def charsmap(longest: int) -> bytes:
    """SentencePiece's rules with a replacement of that length, under a trie that is empty."""
    return struct.pack("<I", 1024) + bytes(1024) + b"a" * longest + b"\0"


def precompiled(longest: int) -> dict:
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap(longest)).decode()}


def sequence(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"normalizer": sequence(*[replace({"String": "a"}, "aa")] * 40)}, "times as long"),
        ({"normalizer": sequence(*[{"type": "ByteLevel"}] * 40)}, "times as long"),
        ({"normalizer": sequence(replace({"Regex": "."}, "a" * 300), replace({"String": "a"}, "b" * 300))},
         "times as long"),
        ({"decoder": {"type": "Sequence", "decoders": [replace({"String": "a"}, "aa")] * 40}}, "times as long"),
        ({"normalizer": precompiled(10**6)}, "replaces a character by 1,000,000 bytes"),
        ({"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a" * 5000, 0.0]]}}, "token of 5,000 characters"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_takes_all_memory_is_refused(tmp_path, changes, reason):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(small_tokenizer(**changes)))
    with pytest.raises(UserError, match=reason) as error:
        HuggingFaceVocabulary(file).encode("a" * 30 + "!")
    assert str(file) in str(error.value)


def test_a_tokenizer_nested_too_deep(tmp_path):
    steps = sequence({"type": "NFC"})
    for _ in range(60):
        steps = sequence(steps)
    file = tmp_path / "tokenizer.json"
    for content in (json.dumps(small_tokenizer(normalizer=steps)), "[" * 100_000):
        file.write_text(content)
        with pytest.raises(UserError, match="nested"):
            HuggingFaceVocabulary(file).encode("a")


def test_an_error_of_the_library_while_encoding_is_a_message(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(small_tokenizer(model={"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]})))
    with pytest.raises(UserError, match=r"tokenizer\.json .*'b'"):
        HuggingFaceVocabulary(file).encode("b")


# --- SentencePiece ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    content = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a quick brown fox"] * 10), model_writer=content, vocab_size=20, hard_vocab_limit=False,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, normalization_rule_name="identity", minloglevel=2,
    )  # fmt: skip
    return lambda: sentencepiece_model_pb2.ModelProto.FromString(content.getvalue())


def repeat_a_piece(model):
    model.pieces.add(piece=model.pieces[5].piece, score=0)


def spoil_rules(model):
    model.normalizer_spec.precompiled_charsmap = b"\xff" * 100


def make_rules_grow(model):
    model.normalizer_spec.precompiled_charsmap = charsmap(10**6)


def make_a_piece_long(model):
    model.pieces[5].piece = "a" * 5000


def make_the_unknown_long(model):
    model.trainer_spec.unk_surface = "?" * 10**6


@pytest.mark.parametrize(
    "change, reason",
    [
        (repeat_a_piece, "already defined"),
        (spoil_rules, "not a SentencePiece model"),
        (make_rules_grow, "replaces a character by 1,000,000 bytes"),
        (make_a_piece_long, "piece of 5,000 characters"),
        (make_the_unknown_long, "piece of 1,000,000 characters"),
    ],
)
def test_a_hostile_sentencepiece_model(model, tmp_path, change, reason):
    hostile = model()
    change(hostile)
    file = tmp_path / "spiece.model"
    file.write_bytes(hostile.SerializeToString())
    with pytest.raises(UserError, match=reason) as error:
        SentencePieceVocabulary(file).encode("a quick")
    assert str(file) in str(error.value)


@pytest.mark.parametrize("extra_ids", [10**9, -1, 1.5, "100", True])
def test_extra_ids_that_no_vocabulary_has(extra_ids):
    with pytest.raises(UserError, match=f"extra_ids is '{extra_ids}'.*from 0 to 100,000"):
        ByteVocabulary(extra_ids=extra_ids)
    with pytest.raises(UserError, match=f"extra_ids is '{extra_ids}'.*from 0 to 100,000"):
        SentencePieceVocabulary("x", extra_ids=extra_ids)


def test_other_arguments_of_the_wrong_type():
    for overrides in ([1], "x", {"name": [1]}, {3: 4}):
        with pytest.raises(UserError, match="normalizer_spec_overrides"):
            SentencePieceVocabulary("x", normalizer_spec_overrides=overrides)
    for arguments in ({"size": "3"}, {"size": 3, "eos_id": []}, {"size": -1}):
        with pytest.raises(UserError, match="PassThroughVocabulary"):
            PassThroughVocabulary(**arguments)
