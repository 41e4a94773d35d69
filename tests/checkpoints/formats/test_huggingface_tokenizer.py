"""Hugging Face directories whose vocabulary is a tokenizer.json alone, as version 5 of transformers saves them."""

import json

import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints.convert import convert
from t5x.checkpoints.formats.huggingface import read_huggingface, write_huggingface
from t5x.data.vocabularies import ByteVocabulary, HuggingFaceVocabulary, SentencePieceVocabulary, load_vocabulary
from tests.checkpoints.formats import huggingface_models as models
from tests.support.paths import SHARED

T5 = SHARED / "t5_vocab"
TEXTS = ["translate English to German: That is good.", "Ein Mädchen läuft über die Straße.", "a <extra_id_3> b", ""]

needs_shared = pytest.mark.skipif(not T5.is_dir(), reason="the real data (../shared/data) is not here")


def small_tokenizer(**changes):
    """A tokenizer.json of ten ids, which adds no EOS."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", "a", "b", "ab", "▁a", "▁b", "<extra_id_0>"]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special | {"id": i, "content": pieces[i]} for i in (0, 1, 2, 9)],
        "normalizer": None,
        "pre_tokenizer": space,
        "post_processor": None,
        "decoder": space,
        "model": {"type": "Unigram", "unk_id": 2, "vocab": [[piece, i - 10.0] for i, piece in enumerate(pieces)]},
    } | changes


def directory(path, tokenizer=None, rows=10, **changes):
    """A model of `rows` ids; beside it `tokenizer` as tokenizer.json."""
    table = np.random.default_rng(1).standard_normal((rows, 4)).astype(np.float32)
    tensors = models.tiny_tensors() | {"shared.weight": table}
    models.write_directory(path, tensors, models.tiny_config(vocab_size=rows, **changes))
    if tokenizer is not None:
        content = tokenizer if isinstance(tokenizer, bytes) else json.dumps(tokenizer).encode()
        (path / "tokenizer.json").write_bytes(content)
    return path


def vocabulary_of(path, into):
    """What travels with the directory, rebuilt in `into`; the same for both features."""
    files = read_huggingface(path).vocabulary_files
    assert files.keys() == {"inputs", "targets"} and files["inputs"] == files["targets"]
    into.mkdir()
    for name, content in files["inputs"].items():
        (into / name).write_bytes(content)
    return load_vocabulary(into)


@needs_shared
@pytest.mark.slow
def test_a_model_that_transformers_saves_round_trips_and_infers(tmp_path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import t5x

    hf = directory(tmp_path / "hf", rows=32128)
    theirs = transformers.AutoTokenizer.from_pretrained(T5)
    theirs.save_pretrained(hf)
    if (hf / "spiece.model").exists():
        pytest.skip("this version of transformers saves spiece.model")
    vocabulary = vocabulary_of(hf, tmp_path / "vocabulary")
    assert isinstance(vocabulary, HuggingFaceVocabulary) and vocabulary.vocab_size == 32100
    reference = SentencePieceVocabulary(T5 / "spiece.model", extra_ids=100)
    for text in TEXTS[:2]:
        assert vocabulary.encode(text) == reference.encode(text)

    convert(str(hf), str(tmp_path / "t5x"), to="t5x")
    convert(str(tmp_path / "t5x"), str(tmp_path / "again"), to="hf")
    for path in (hf, tmp_path / "again"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        for text in TEXTS:
            assert tokenizer(text).input_ids == theirs(text).input_ids == [*vocabulary.encode(text), 1]
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)
        assert len(tokenizer) == 32100
    assert (tmp_path / "again/tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    assert vocabulary_of(tmp_path / "again", tmp_path / "last") == vocabulary

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
    ids = model.generate(**theirs(TEXTS[0], return_tensors="pt"), num_beams=1, do_sample=False, max_new_tokens=4)
    result = t5x.load(str(tmp_path / "t5x")).generate(TEXTS[0], max_length=4)
    assert result.text == theirs.decode(ids[0], skip_special_tokens=True) != ""
    assert t5x.load(str(hf)).model.input_vocabulary == vocabulary


@needs_shared
def test_spiece_model_counts_before_tokenizer_json(tmp_path):
    hf = directory(tmp_path / "hf", small_tokenizer(), rows=32128)
    (hf / "spiece.model").write_bytes((T5 / "spiece.model").read_bytes())
    assert isinstance(vocabulary_of(hf, tmp_path / "vocabulary"), SentencePieceVocabulary)


def test_a_byt5_has_bytes_whatever_lies_beside_it(tmp_path):
    hf = directory(tmp_path / "hf", b"{}", rows=384, tokenizer_class="ByT5Tokenizer")
    assert vocabulary_of(hf, tmp_path / "vocabulary") == ByteVocabulary(extra_ids=125)


def test_a_tokenizer_that_adds_no_eos_is_written_so_that_it_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    source = read_huggingface(directory(tmp_path / "hf", small_tokenizer()))
    write_huggingface(tmp_path / "new", source.config, source.arrays, vocabulary_files=source.vocabulary_files)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    vocabulary = vocabulary_of(tmp_path / "hf", tmp_path / "vocabulary")
    for text, ids in (("ab a", [7, 5, 7]), ("b <extra_id_0>", [8, 3, 9]), ("", [])):
        assert vocabulary.encode(text) == ids
        assert tokenizer(text).input_ids == [*ids, 1]
    assert json.loads((tmp_path / "new/config.json").read_text())["eos_token_id"] == 1


def test_id_0_of_a_tokenizer_without_padding_stays_a_word(tmp_path):
    transformers = pytest.importorskip("transformers")
    changed = small_tokenizer()
    changed["model"]["vocab"][0][0] = "▁abba"
    changed["added_tokens"] = changed["added_tokens"][1:]
    source = read_huggingface(directory(tmp_path / "hf", changed))
    write_huggingface(tmp_path / "new", source.config, source.arrays, vocabulary_files=source.vocabulary_files)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert tokenizer("abba").input_ids == [0, 1]
    assert tokenizer.pad_token is None


def damaged(**changes):
    def make():
        return small_tokenizer() | changes

    return make


@pytest.mark.parametrize(
    "content, pattern",
    [
        (lambda: b"", "can read"),
        (lambda: b"[" * 100_000, "can read"),
        (lambda: b"[]", "JSON object"),
        (lambda: b"{}", "[Mm]odel"),
        (damaged(model={"type": "Unigram", "unk_id": None, "vocab": []}, added_tokens=[]), "empty"),
        (damaged(model={"type": "Unigram", "unk_id": 5, "vocab": [["a", 0.0]]}), "can read"),
        (damaged(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "charsmap"),
        (damaged(normalizer={"type": "Replace", "pattern": {"Regex": "(a"}, "content": ""}), "can read"),
    ],
)
def test_a_broken_tokenizer_json_is_named(tmp_path, content, pattern):
    hf = directory(tmp_path / "hf", content())
    with pytest.raises(UserError, match=pattern) as error:
        read_huggingface(hf)
    assert str(hf / "tokenizer.json") in str(error.value)


def test_a_file_too_large_for_a_tokenizer_is_not_read(tmp_path):
    hf = directory(tmp_path / "hf", b"")
    with (hf / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)  # takes no room
    with pytest.raises(UserError, match="bytes, more than such a file can have"):
        read_huggingface(hf)


def test_a_tokenizer_of_more_ids_than_the_model(tmp_path):
    hf = directory(tmp_path / "hf", small_tokenizer(), rows=9)
    with pytest.raises(UserError, match=r"10 ids, .* 9 rows"):
        read_huggingface(hf)
