import copy
import gzip
import json
import pickle

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from t5x._runtime.errors import UserError
from t5x.data.vocabularies import (
    ByteVocabulary,
    HuggingFaceVocabulary,
    PassThroughVocabulary,
    SentencePieceVocabulary,
    load_vocabulary,
)
from t5x.data.vocabularies.loading import rebuild_vocabulary

# folder: (pieces, unknown id, has extra ids)
VOCABULARIES = {"t5_vocab": (32000, 2, False), "mt5_vocab": (250100, 2, True), "umt5_vocab": (256000, 3, False)}


@pytest.fixture
def t5_tokenizer_file(shared_data):
    return str(shared_data / "t5_vocab/tokenizer.json")


@pytest.fixture
def tiny_tokenizer_file(tmp_path):
    """A word tokenizer whose file asks for EOS, truncation and padding."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<pad>": 0, "</s>": 1, "<unk>": 2, "good": 3, "morning": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>", "<extra_id_1>", "<extra_id_0>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def written(vocabulary, directory):
    directory.mkdir()
    for name, content in vocabulary.to_files().items():
        (directory / name).write_bytes(content)
    return directory


@pytest.mark.parametrize("folder", VOCABULARIES)
def test_real_models_agree_with_the_library(shared_data, folder):
    path = str(shared_data / folder / "spiece.model")
    size, unk_id, has_extra_ids = VOCABULARIES[folder]
    library = sentencepiece.SentencePieceProcessor(model_file=path)
    extra_ids = 0 if has_extra_ids else 100
    vocabulary = SentencePieceVocabulary(path, extra_ids=extra_ids)
    assert vocabulary.vocab_size == size + extra_ids
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id) == (0, 1, unk_id)
    with gzip.open(shared_data / "multi30k_ende/val.de.gz", "rt", encoding="utf-8") as file:
        texts = file.read().splitlines()[:200]
    for text in [*texts, "", " ", "a  b", "🤗 ﬁ ½", "tab\there", "\x00\x07", "日本語", "x" * 5000]:
        ids = library.encode(text)
        assert vocabulary.encode(text) == ids
        assert vocabulary.decode(ids) == library.decode(ids)


def test_the_published_ids_of_a_t5_prompt(t5_model_file):
    ids = [13959, 1566, 12, 2968, 10, 466, 19, 207, 5]
    assert SentencePieceVocabulary(t5_model_file).encode("translate English to German: That is good.") == ids


def test_bos_is_none_where_the_model_has_none(t5_model_file):
    assert SentencePieceVocabulary(t5_model_file).bos_id is None


def test_extra_ids_count_down_from_the_last_id(t5_model_file):
    vocabulary = SentencePieceVocabulary(t5_model_file, extra_ids=100)
    assert vocabulary.encode("<extra_id_0>") == [32099]
    assert vocabulary.encode("A <extra_id_1> b <extra_id_99>")[1] == 32098
    assert vocabulary.encode("<extra_id_99>") == [32000]
    assert vocabulary.decode([32099, 71, 32000]) == "<extra_id_0> A <extra_id_99>"


def test_extra_ids_are_not_added_twice(shared_data):
    path = str(shared_data / "mt5_vocab/spiece.model")
    assert SentencePieceVocabulary(path).encode("<extra_id_0>") == [250099]
    with pytest.raises(UserError, match="Set extra_ids=0"):
        SentencePieceVocabulary(path, extra_ids=100).encode("a")


def test_extra_ids_in_counting_order(t5_model_file):
    vocabulary = SentencePieceVocabulary(t5_model_file, extra_ids=3, reverse_extra_ids=False)
    assert [vocabulary.encode(f"<extra_id_{i}>") for i in range(3)] == [[32000], [32001], [32002]]
    assert vocabulary != SentencePieceVocabulary(t5_model_file, extra_ids=3)


def test_decoding_stops_at_eos_and_maps_strange_ids_to_unknown(t5_model_file):
    vocabulary = SentencePieceVocabulary(t5_model_file)
    assert vocabulary.decode([8774, 1, 8774]) == "Hello"
    assert vocabulary.decode(np.array([8774, 1, 0, 0], np.int32)) == "Hello"
    unknown = vocabulary.decode([2])
    assert unknown.strip() == "⁇"
    assert vocabulary.decode([32000]) == vocabulary.decode([10**6]) == vocabulary.decode([-7]) == unknown


@pytest.mark.parametrize("as_message", [False, True])
def test_normalizer_overrides(t5_model_file, as_message):
    from sentencepiece import sentencepiece_model_pb2

    overrides = {"remove_extra_whitespaces": False}
    if as_message:
        overrides = sentencepiece_model_pb2.NormalizerSpec(**overrides)
    plain = SentencePieceVocabulary(t5_model_file)
    kept = SentencePieceVocabulary(t5_model_file, normalizer_spec_overrides=overrides)
    assert plain.encode("a   b") == plain.encode("a b")
    assert kept.encode("a   b") != kept.encode("a b")
    assert kept != plain
    with pytest.raises(UserError, match="no_such_field"):
        SentencePieceVocabulary(t5_model_file, normalizer_spec_overrides={"no_such_field": 1}).encode("a")


def test_equality_is_of_content_not_of_path(t5_model_file, tmp_path, shared_data):
    original = SentencePieceVocabulary(t5_model_file, extra_ids=100)
    (tmp_path / "copy.model").write_bytes((shared_data / "t5_vocab/spiece.model").read_bytes())
    moved = SentencePieceVocabulary(str(tmp_path / "copy.model"), extra_ids=100)
    assert original == moved
    assert hash(original) == hash(moved)
    assert original != SentencePieceVocabulary(t5_model_file, extra_ids=99)
    assert original != ByteVocabulary()


def test_a_model_with_the_extra_ids_inside_equals_one_with_them_appended(t5_model_file, tmp_path):
    """T5's own files come in both forms: cc_all.32000.100extra, and cc_all.32000 with extra_ids=100."""
    appended = SentencePieceVocabulary(t5_model_file, extra_ids=100)
    (tmp_path / "100extra.model").write_bytes(appended.tokenizer.serialized_model_proto())
    assert SentencePieceVocabulary(str(tmp_path / "100extra.model")) == appended


def test_copies_and_pickles_still_work(t5_model_file):
    vocabulary = SentencePieceVocabulary(t5_model_file, extra_ids=10)
    ids = vocabulary.encode("good morning")
    for other in (copy.copy(vocabulary), copy.deepcopy(vocabulary), pickle.loads(pickle.dumps(vocabulary))):
        assert other.encode("good morning") == ids
        assert other == vocabulary


def test_the_file_is_read_lazily_and_a_missing_one_raises_user_error(tmp_path):
    vocabulary = SentencePieceVocabulary(str(tmp_path / "spiece.model"))
    with pytest.raises(UserError) as error:
        vocabulary.encode("a")
    assert str(tmp_path / "spiece.model") in str(error.value)
    assert "--gin.seqio.SentencePieceVocabulary.sentencepiece_model_file=" in str(error.value)


def test_a_remote_file_that_cannot_be_read_names_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    vocabulary = SentencePieceVocabulary("gs://no-such-bucket/vocabs/spiece.model")
    with pytest.raises(UserError) as error:
        _ = vocabulary.vocab_size
    assert "gs://no-such-bucket/vocabs/spiece.model" in str(error.value)
    assert "pip install gcsfs" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfenot a model", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_that_is_not_a_model(tmp_path, content):
    (tmp_path / "x.model").write_bytes(content)
    with pytest.raises(UserError, match="not a SentencePiece model"):
        SentencePieceVocabulary(str(tmp_path / "x.model")).encode("a")


def test_t5s_tokenizer_json_gives_the_ids_of_its_sentencepiece_model(t5_model_file, t5_tokenizer_file, shared_data):
    sentencepiece_one = SentencePieceVocabulary(t5_model_file, extra_ids=100)
    vocabulary = HuggingFaceVocabulary(t5_tokenizer_file)
    for name in ("vocab_size", "pad_id", "eos_id", "bos_id", "unk_id", "extra_ids"):
        assert getattr(vocabulary, name) == getattr(sentencepiece_one, name)
    with gzip.open(shared_data / "multi30k_ende/val.de.gz", "rt", encoding="utf-8") as file:
        texts = file.read().splitlines()[:300]
    for text in [*texts, "", "  a  b ", "A <extra_id_1> b <extra_id_99>"]:
        ids = sentencepiece_one.encode(text)
        assert vocabulary.encode(text) == ids
        if 2 not in ids and "<extra" not in text:  # unknown and sentinels are written differently
            assert vocabulary.decode([*ids, 1, 100]) == sentencepiece_one.decode(ids)
    assert vocabulary.decode([32099, 1]) == "<extra_id_0>"
    assert vocabulary != sentencepiece_one


def test_a_tokenizer_file_is_taken_without_what_it_adds_or_cuts(tiny_tokenizer_file):
    vocabulary = HuggingFaceVocabulary(tiny_tokenizer_file)
    assert vocabulary.encode("good good morning good night") == [3, 3, 4, 3, 2]
    assert (vocabulary.vocab_size, vocabulary.extra_ids, vocabulary.unk_id, vocabulary.bos_id) == (7, 2, 2, None)
    assert vocabulary.decode([3, 0, 6, 1, 4]) == "good <extra_id_0>"
    assert vocabulary.decode([3, 700]) == "good <unk>"
    assert pickle.loads(pickle.dumps(vocabulary)).encode("good") == [3]


def test_tokenizer_files_with_equal_content_are_equal(tiny_tokenizer_file, tmp_path):
    vocabulary = HuggingFaceVocabulary(tiny_tokenizer_file)
    with open(tiny_tokenizer_file) as file:
        content = json.load(file)
    (tmp_path / "other.json").write_text(json.dumps(content | {"truncation": None}))
    other = HuggingFaceVocabulary(str(tmp_path / "other.json"))
    assert vocabulary == other
    assert hash(vocabulary) == hash(other)
    content["model"]["vocab"] |= {"good": 4, "morning": 3}
    (tmp_path / "third.json").write_text(json.dumps(content))
    assert vocabulary != HuggingFaceVocabulary(str(tmp_path / "third.json"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"model": {"type": "Nonsense"}}'])
def test_a_file_that_is_not_a_tokenizer(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=r"tokenizer\.json is not a tokenizer\.json of Hugging Face"):
        HuggingFaceVocabulary(str(tmp_path / "tokenizer.json")).encode("a")


@given(st.text())
def test_bytes_are_shifted_by_three(text):
    if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        return
    vocabulary = ByteVocabulary()
    ids = vocabulary.encode(text)
    assert ids == [byte + 3 for byte in text.encode()]
    assert vocabulary.decode(ids) == text
    assert vocabulary.decode([*ids, 1, 100]) == text


def test_byte_vocabulary_specials():
    vocabulary = ByteVocabulary(extra_ids=10)
    assert (vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id, vocabulary.vocab_size) == (0, 1, 2, 269)
    assert vocabulary.decode([100, 0, 2, 268, 3000, -4000]) == "a"
    assert vocabulary.decode([0xC0 + 3, 100]) == "a"  # 0xC0 begins no UTF-8 sequence
    assert ByteVocabulary(10) == vocabulary != ByteVocabulary()


def test_pass_through():
    vocabulary = PassThroughVocabulary(size=128, eos_id=1)
    assert vocabulary.vocab_size == 128
    assert vocabulary.encode([5, 300]) == [5, 300]
    assert vocabulary.decode([5, 300, 1, 7]) == [5, 300, 1]
    assert PassThroughVocabulary(128).decode([5, 1, 7]) == [5, 1, 7]
    assert vocabulary == PassThroughVocabulary(128, 1) != PassThroughVocabulary(128)


@pytest.mark.parametrize("value", [3, None, ["a"], 1.5])
def test_only_text_is_encoded(value, t5_model_file):
    for vocabulary in (ByteVocabulary(), SentencePieceVocabulary(t5_model_file)):
        with pytest.raises(UserError, match="only text"):
            vocabulary.encode(value)


def test_half_a_surrogate_pair_is_refused(t5_model_file):
    for vocabulary in (ByteVocabulary(), SentencePieceVocabulary(t5_model_file)):
        with pytest.raises(UserError, match="not valid Unicode"):
            vocabulary.encode(json.loads('"\\ud83e oh"'))


def test_invalid_utf8_is_refused():
    assert ByteVocabulary().encode("ä".encode()) == ByteVocabulary().encode("ä")
    with pytest.raises(UserError, match="not valid Unicode"):
        ByteVocabulary().encode(b"\xff\xfe")


def test_files_rebuild_every_kind(t5_model_file, t5_tokenizer_file, tmp_path):
    overrides = {"remove_extra_whitespaces": False}
    kinds = [
        ByteVocabulary(extra_ids=125),
        HuggingFaceVocabulary(t5_tokenizer_file),
        PassThroughVocabulary(1000, eos_id=1),
        SentencePieceVocabulary(t5_model_file, extra_ids=100, normalizer_spec_overrides=overrides),
    ]
    for i, vocabulary in enumerate(kinds):
        directory = written(vocabulary, tmp_path / str(i))
        assert load_vocabulary(directory) == vocabulary
        rebuilt = rebuild_vocabulary(vocabulary.to_files().__getitem__, "nowhere")
        assert rebuilt == vocabulary and rebuilt.vocab_size == vocabulary.vocab_size


def test_damaged_vocabulary_files(tmp_path):
    for i, content in enumerate([b"{", b"[]", b"{}", b'{"class": "Pickle"}', b'{"class": "ByteVocabulary", "x": 1}']):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}/vocabulary.json").write_bytes(content)
        with pytest.raises(UserError, match=r"vocabulary\.json"):
            load_vocabulary(tmp_path / f"{i}")
