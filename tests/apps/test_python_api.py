"""The Python API, as users of transformers call it, compared with transformers on the same random weights."""

import dataclasses
import filecmp
import json
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

import t5x
from t5x._runtime.errors import UserError
from t5x.inference.generation import Decoding, translate_arguments
from tests.checkpoints.formats import huggingface_models
from tests.inference.models import byte_model
from tests.support.paths import SHARED

TOKENS = {"eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 0}


@pytest.fixture
def model(loaded_tiny_t5):
    return loaded_tiny_t5


def test_text_and_beams_are_those_of_transformers_by_its_own_names(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    theirs = huggingface_models.model("T5 1.1", vocab_size=384, num_decoder_layers=2)
    theirs.save_pretrained(tmp_path / "byt5")
    transformers.ByT5Tokenizer().save_pretrained(tmp_path / "byt5")
    tokenizer, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "byt5"), t5x.load(tmp_path / "byt5")
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdefgh "), rng.integers(1, 16))) for _ in range(24)]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    options = {  # test_loaded.py: each alone, by our names
        "num_beams": 3, "num_return_sequences": 3, "length_penalty": 0.5, "no_repeat_ngram_size": 2,
        "min_new_tokens": 3, "max_new_tokens": 8, "do_sample": False,
    }  # fmt: skip
    with torch.no_grad():
        made = theirs.generate(**batch, **TOKENS, **options)
    expected = tokenizer.batch_decode(made, skip_special_tokens=True)
    found = [each for result in ours.generate(texts, **options) for each in result]
    assert [str(each) for each in found] == expected


def test_names_of_transformers_become_those_of_t5x():
    assert translate_arguments({"do_sample": True, "top_p": 0.9}) == {"temperature": 1.0, "top_k": 50, "top_p": 0.9}
    assert translate_arguments({"do_sample": False, "temperature": 0.7}) == {}
    assert translate_arguments({"num_beams": 4}) == {"beams": 4, "length_penalty": 1.0}
    assert translate_arguments({"beams": 4}) == {"beams": 4}  # T5X's search
    with pytest.raises(UserError, match="same argument"):
        translate_arguments({"beams": 4, "num_beams": 4})


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda m: m.generate("a", num_beam=4), "num_beams"),
        (lambda m: m.generate("a", nonsense=4), "repetition_penalty"),
        (lambda m: m.generate(None), "string"),
        (lambda m: m.generate(7), "string"),
        (lambda m: m.generate(b"abc"), "string"),
        (lambda m: m.generate(["a", None]), "Input 1"),
        (lambda m: m.generate([("a", "b")]), "Input 0"),
        (lambda m: m.generate({"question": "a"}), "'question'"),
        (lambda m: m.score("ab"), "(input, target)"),
        (lambda m: m.score(None), "(input, target)"),
        (lambda m: m.score([("a", "b"), ("a",)]), "Pair 1"),
        (lambda m: m.logits(["a"], []), "1 input(s) but 0 target(s)"),
        (lambda m: m.answer("a", "b", beam=4), "beams"),
        (lambda m: m.rank("a", ["b"], label="t,f"), "labels"),
        (lambda m: list(m.stream("a", num_beams=2)), "beams"),
        (lambda m: list(m.stream(["a", "b"])), "one input"),
        (lambda m: t5x.load(None), "google/flan-t5-small"),
        (lambda m: t5x.load(m.source.path, dtype=jnp.int32), "bfloat16"),
        (lambda m: t5x.load(m.source.path, device="abacus"), "cpu"),
        (lambda m: t5x.pipeline("text-generation", m), "text2text-generation"),
    ],
)
def test_wrong_calls_get_one_message_with_the_fix(model, call, fix):
    with pytest.raises(UserError, match=re.escape(fix)):
        call(model)


@pytest.mark.slow
def test_inputs_may_be_strings_objects_or_lists(model):
    one = model.generate("abc", max_length=4)
    assert model.generate({"inputs": "abc", "id": 7}, max_length=4) == one
    assert model.generate([{"inputs": "abc"}, "abc"], max_length=4) == model.generate(["abc", "abc"], max_length=4)
    assert model.generate(("abc",), max_length=4) == [one] and model.generate([]) == []
    assert str(one) == one.text and repr(one.text) in repr(one)
    source = dataclasses.replace(model.source, data={"inputs": "{first} {second}", "prefix": "b: "})
    trained = type(model)(source, model.model, model._partitioner)
    assert trained.generate({"first": "ab", "second": 7}, max_length=4) == model.generate("b: ab 7", max_length=4)


def test_scores_of_tokens_add_up(model):
    texts = ["abc", "hadcggg", "b"]
    found = model.generate(texts, beams=2, num_return=2, max_length=6, token_scores=True)
    made = [(text, each) for text, of_text in zip(texts, found, strict=True) for each in of_text]
    for text, each in made:
        assert len(each.token_scores) == len(each.tokens)
        if each.tokens[-1] == 1:
            assert sum(each.token_scores) == pytest.approx(model.score((text, each.text)), abs=1e-4)
    assert any(each.tokens[-1] == 1 for _, each in made)


@pytest.mark.slow
def test_an_output_ends_before_a_stop_string(model):
    texts = ["abc", "hadcggg", "b", "aa bb", "gha"]
    whole = max(model.generate(texts, max_length=12, repetition_penalty=1.5), key=lambda made: len(made.text))
    text = texts[model.generate(texts, max_length=12, repetition_penalty=1.5).index(whole)]
    stop = whole.text[2:4]
    cut = model.generate(text, max_length=12, repetition_penalty=1.5, stop_strings=[stop])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert model.decode(cut.tokens).endswith(stop) and cut.tokens == whole.tokens[: len(cut.tokens)]


def test_an_output_ends_before_the_first_of_several_stop_strings(model):
    (whole,) = model.generate(["b"], max_length=12, no_repeat_ngram=2)
    early, late = whole.text[2:4], whole.text[8:10]
    assert whole.text.index(early) == 2 and whole.text.index(late) == 8
    for stop in ([late, early], [early, late]):
        ended = model.generate("b", max_length=12, no_repeat_ngram=2, stop=stop)
        assert ended.text == whole.text[:2] and model.decode(ended.tokens) == whole.text[:4]


def test_every_eos_of_a_model_ends_an_output_and_is_not_part_of_its_text(model, tmp_path):
    whole = model.generate("b", max_length=12, no_repeat_ngram=2)
    other_eos = whole.text[8]
    directory = byte_model(tmp_path / "tiny")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, ord(other_eos) + 3]}))
    other = t5x.load(directory)
    ended = other.generate("b", max_length=12, no_repeat_ngram=2)
    assert ended.text == whole.text.partition(other_eos)[0] and ended.tokens[-1] == ord(other_eos) + 3
    assert "".join(other.stream("b", max_length=12, no_repeat_ngram=2)) == ended.text


@pytest.mark.slow
def test_a_sample_depends_on_its_seed_and_index_only(model):
    """Not on its row, the number and lengths of the other inputs, or the lengths to which they are padded."""
    ids, *others = map(model.tokenize, ["abc", "", "h" * 30, "gh" * 70, *["bad" * i for i in range(8)]])

    def sample(*rows, seed=5):
        """Return the tokens of one sample for each (ids, index)."""
        inputs, indices = zip(*rows, strict=True)
        options = {"max_length": 8, "max_input_length": 150, "batch_size": 16, "seed": seed}
        return [best.tokens for best, *_ in model.predictions(inputs, Decoding(top_k=9), indices=indices, **options)]

    (alone,) = sample((ids, 7))
    assert len(alone) > 2
    assert sample((others[1], 7), (others[0], 3), (ids, 7))[-1] == alone  # one batch of a coarse shape
    many = [(each, index) for index, each in enumerate(others, start=20)]
    assert sample(*many, (ids, 7))[-1] == alone  # a batch of another length
    assert alone not in [*sample((ids, 8), (ids, 0)), *sample((ids, 7), seed=6)]


def test_streamed_pieces_are_the_output(model):
    for options in ({}, {"temperature": 1.0, "seed": 3}):
        pieces = list(model.stream("hadcggg", max_new_tokens=60, **options))
        assert "".join(pieces) == model.generate("hadcggg", max_length=60, **options).text
    assert len(pieces) > 1


@pytest.mark.slow
def test_a_stream_takes_options_that_need_more_tokens_than_its_first_piece(model):
    for options in ({"min_length": 12}, {"choices": ["a long answer", "another one"]}):
        text = model.generate("hadcggg", max_length=20, **options).text
        assert "".join(model.stream("hadcggg", max_length=20, **options)) == text


def test_a_stream_ends_before_a_stop_string_between_two_pieces(model):
    whole = model.generate("b", max_length=16, no_repeat_ngram=2).text
    stop = whole[6:10]  # the first piece ends within it
    assert whole.index(stop) == 6
    assert "".join(model.stream("b", max_length=16, no_repeat_ngram=2, stop=stop)) == whole[:6]


def test_tokens_and_logits_from_text(model):
    ids = model.tokenize("abc")
    assert ids == [100, 101, 102, 1] and model.tokenize(["abc"]) == [ids] and model.decode(ids) == "abc"
    assert model.decode(np.array([ids, ids])) == ["abc", "abc"]
    np.testing.assert_array_equal(model.logits("abc", "b"), model.logits([ids], [[101, 1]])[0])


def test_repr_and_attributes_name_model_device_and_dtype(model):
    assert (model.device, model.dtype) == ("cpu", "float32")
    assert t5x.load(model.source.path, dtype=jnp.bfloat16, device="cpu").dtype == "bfloat16"
    assert "float32 on cpu" in repr(model)


def test_pipelines_return_what_those_of_transformers_did(model):
    pipe = t5x.pipeline("text2text-generation", model=model)
    best = [model.generate(text, beams=2, length_penalty=1.0, max_length=4).text for text in ("abc", "b")]
    options = {"num_beams": 2, "max_new_tokens": 4}
    assert pipe("abc", **options) == [{"generated_text": best[0]}]
    assert pipe(["abc", "b"], **options) == [{"generated_text": text} for text in best]
    several = pipe(["abc", "b"], num_return_sequences=2, **options)
    assert [[list(each) for each in of_text] for of_text in several] == [[["generated_text"]] * 2] * 2
    assert pipe("abc", num_return_sequences=2, **options) == several[0]
    assert list(t5x.pipeline("summarization", model=model)("abc", **options)[0]) == ["summary_text"]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data is not there")
@pytest.mark.parametrize("names", [["tokenizer.json"], ["spiece.model", "tokenizer.json"]])
def test_a_tokenizer_json_round_trips(tmp_path, names):
    """Alone, as transformers 5 saves it, or beside the SentencePiece model, which is the one in use."""
    tensors = huggingface_models.tiny_tensors() | {"shared.weight": np.ones((32128, 4))}
    huggingface_models.write_directory(tmp_path / "hf", tensors, huggingface_models.tiny_config(vocab_size=32128))
    for name in names:
        shutil.copy(SHARED / "t5_vocab" / name, tmp_path / "hf")
    model = t5x.load(tmp_path / "hf")
    model.save(tmp_path / "ours", to="t5x")
    t5x.load(tmp_path / "ours").save(tmp_path / "back")
    assert filecmp.cmp(SHARED / "t5_vocab" / "tokenizer.json", tmp_path / "back" / "tokenizer.json", shallow=False)
    expected = [13959, 1566, 12, 2968, 10, 32099, 207, 5, 1]  # by the tokenizers library
    text = "translate English to German: <extra_id_0> good."
    assert t5x.load(tmp_path / "back").tokenize(text) == model.tokenize(text) == expected


def test_decoding_options_round_trip(model, tmp_path):
    """Hugging Face -> ours -> Hugging Face, by `save`."""
    directory = byte_model(tmp_path / "hf")
    options = {"num_beams": 2, "max_new_tokens": 4, "length_penalty": 0.6, "no_repeat_ngram_size": 3}
    (directory / "generation_config.json").write_text(json.dumps(options | {"_from_model_config": True}))
    t5x.load(directory).save(tmp_path / "ours", to="t5x")
    again = t5x.load(tmp_path / "ours")
    again.save(tmp_path / "back")
    kept = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert options.items() <= kept.items()
    expected = again.generate("abc", **options).text
    assert t5x.pipeline("translation", str(tmp_path / "back"))("abc") == [{"translation_text": expected}]
    with pytest.raises(UserError, match="overwrite"):
        again.save(tmp_path / "back")
