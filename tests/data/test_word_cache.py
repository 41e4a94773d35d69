"""Remembered words give exactly SentencePiece's ids."""

import gzip
import pickle
import threading

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2

from t5x.data.vocabularies import SentencePieceVocabulary
from t5x.data.vocabularies.words import WordIds, is_splittable

from .conftest import SHARED

MODELS = [("t5_vocab", 0), ("t5_vocab", 100), ("mt5_vocab", 0), ("umt5_vocab", 0)]

EDGES = [
    " ",
    "    ",
    " leading",
    "trailing ",
    "two  spaces   three    four",
    "lines\nof\n\ntext\n",
    "tab\tnext",
    "no\u00a0break",
    "soft\u00adhyphen",
    "zero\u200bwidth",
    "cafe\u0301 \u0301alone",
    "\u00a8 \u00b4 \u2026 \u00bd \u2122 \ufb01",
    "a" * 40,
    "aaaa aaaaaaaa " * 9,
    "zzzzz lllll " * 9,
    "<<<< {x} ~ <unk>",
    "日本語 and English",
    "\u2581 literal \u2581word",
    "Translate <extra_id_0> and <extra_id_99>.",
    "x<extra_id_1> <extra_id_1>x",
    "[eod] x[web]y",
    "</s> <pad> <s>",
    "Straße Ελλάδα Москва naïve €5",
]

# Joined, so that words are met again and in every order.
PIECES = [
    "the",
    "aaaa",
    "places",
    "<",
    "<extra_id_0>",
    " ",
    "  ",
    "\n",
    "…",
    "é",
    "e\u0301",
    "\u2581",
    "un",
    "ß",
    "½",
    "语",
]
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=20).map("".join))


def load(folder, extra_ids=0, **options):
    if not SHARED.is_dir():
        pytest.skip("the real data sets (../shared/data) are not here")
    return SentencePieceVocabulary(str(SHARED / folder / "spiece.model"), extra_ids, **options)


def proto_of(vocabulary):
    return sentencepiece_model_pb2.ModelProto.FromString(vocabulary.tokenizer.serialized_model_proto())


def word_ids(vocabulary, **options):
    return WordIds(proto_of(vocabulary), vocabulary.tokenizer, **options)


@pytest.fixture(scope="module")
def sentences():
    if not SHARED.is_dir():
        pytest.skip("the real data sets (../shared/data) are not here")
    return [
        line
        for language in ("en", "de")
        for line in gzip.open(SHARED / f"multi30k_ende/val.{language}.gz", "rt", encoding="utf-8").read().split("\n")
        if line
    ]


@pytest.mark.parametrize(("folder", "extra_ids"), MODELS)
def test_sentences_and_edges_agree_with_the_library(sentences, folder, extra_ids):
    vocabulary = load(folder, extra_ids)
    texts = [*sentences, *EDGES, " ".join(sentences[:60]), " ".join(sentences)]
    expected = vocabulary.tokenizer.encode(texts)
    assert [vocabulary.encode(text) for text in texts] == expected
    assert [vocabulary.encode(text) for text in texts] == expected  # now from memory


@pytest.mark.parametrize(("folder", "extra_ids"), MODELS)
def test_ordinary_sentences_are_encoded_from_memory(sentences, folder, extra_ids):
    words = word_ids(load(folder, extra_ids))
    assert sum(words.encode(sentence) is not None for sentence in sentences) > 0.98 * len(sentences)


@pytest.mark.parametrize(("folder", "extra_ids"), MODELS)
def test_any_text_agrees_with_the_library(folder, extra_ids):
    vocabulary = load(folder, extra_ids)

    @settings(max_examples=150)
    @given(TEXTS)
    def check(text):
        assert vocabulary.encode(text) == (vocabulary.tokenizer.encode(text) if text else [])

    check()


@pytest.mark.parametrize("word", ["zzzzz", "lllll", "Zanzibar", "Fowler"])
def test_nearly_equal_segmentations_are_left_to_the_library(word):
    """▁ z zz zz and ▁ zz zz z score the same; ▁Za n zi bar is 0.005 better than ▁Z anz i bar."""
    words = word_ids(load("t5_vocab"))
    assert words.encode("good morning") is not None
    assert words.encode(f"good {word} morning") is None


def test_a_close_word_is_looked_up_in_short_texts_only():
    vocabulary = load("mt5_vocab")
    words = word_ids(vocabulary)
    for text in ("passed", "assigned", "Several", "contained", "settlers"):
        assert words.encode(text) == vocabulary.tokenizer.encode(text)
    assert all(words.encode(f"{'the ' * 3000}{text}") is None for text in ("passed", "assigned"))
    assert words.encode("the " * 3000) == vocabulary.tokenizer.encode("the " * 3000)
    assert words.encode("the " * 5000) is None


def test_a_full_memory_grows_no_more(sentences):
    vocabulary = load("t5_vocab")
    words = word_ids(vocabulary, most_words=50)
    for sentence in sentences[:300]:
        assert words.encode(sentence) in (None, vocabulary.tokenizer.encode(sentence))
    assert len(words._ids) + len(words._unsafe) <= 50


def test_texts_of_ever_new_words_end_it():
    words = word_ids(load("t5_vocab"))
    words._credit = 1000
    assert words.encode("good morning") is not None
    for i in range(20):
        words.encode(f"word{i} other{i}")
    assert words.encode("good morning") is None


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.trainer_spec, "model_type", model.trainer_spec.BPE),
        lambda model: setattr(model.trainer_spec, "treat_whitespace_as_suffix", True),
        lambda model: setattr(model.normalizer_spec, "add_dummy_prefix", False),
        lambda model: setattr(model.normalizer_spec, "escape_whitespaces", False),
        lambda model: setattr(model.normalizer_spec, "name", "user_defined"),
        lambda model: model.pieces.add(piece="\u2581of\u2581the", score=-5.0),
        lambda model: model.pieces.add(piece="of the", score=0.0, type=model.SentencePiece.USER_DEFINED),
        lambda model: model.pieces.add(piece="bonus", score=1.0),
    ],
)
def test_models_whose_words_depend_on_each_other_are_left_alone(change):
    model = proto_of(load("t5_vocab"))
    assert is_splittable(model)
    change(model)
    assert not is_splittable(model)


@pytest.mark.parametrize("overrides", [{"remove_extra_whitespaces": False}, {"add_dummy_prefix": False}])
def test_overridden_normalisation(overrides):
    vocabulary = load("t5_vocab", normalizer_spec_overrides=overrides)
    for text in [*EDGES, *EDGES]:
        assert vocabulary.encode(text) == vocabulary.tokenizer.encode(text), text


def test_a_user_defined_piece_inside_words(tmp_path):
    model = proto_of(load("t5_vocab"))
    next(piece for piece in model.pieces if piece.piece == "ing").type = model.SentencePiece.USER_DEFINED
    path = tmp_path / "user.model"
    path.write_bytes(model.SerializeToString())
    vocabulary = SentencePieceVocabulary(str(path))
    library = sentencepiece.SentencePieceProcessor(model_file=str(path))
    for text in ["a king is singing", "bring it", "ing", "something ingenious"] * 2:
        assert vocabulary.encode(text) == library.encode(text)


def test_threads_share_the_memory(sentences):
    vocabulary = load("t5_vocab", 7)  # loaded by no other test: all words are new
    expected = vocabulary.tokenizer.encode(sentences)
    results = {}

    def work(i):
        results[i] = [vocabulary.encode(sentence) for sentence in sentences]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [results[i] == expected for i in range(4)] == [True] * 4


def test_a_pickle_does_not_carry_the_words():
    vocabulary = load("t5_vocab")
    size = len(pickle.dumps(vocabulary))
    vocabulary.encode("remembered words stay here")
    assert len(pickle.dumps(vocabulary)) == size
    assert pickle.loads(pickle.dumps(vocabulary)).encode("good") == vocabulary.encode("good")
