"""`t5x.load`, compared with transformers on the same random weights."""

import json

import numpy as np
import pytest

import t5x
from t5x._runtime.errors import UserError
from tests.checkpoints.formats import huggingface_models

TEXTS = ["a date", "the third of March", "x", "", "another text that is longer than the rest of them"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(ours, the model of transformers), a ByT5."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    theirs = huggingface_models.model("T5 1.1", vocab_size=384, num_decoder_layers=2)
    directory = tmp_path_factory.mktemp("hf") / "byt5"
    theirs.save_pretrained(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    return t5x.load(str(directory)), theirs


def padded(rows, side=0):
    import torch

    longest = max(map(len, rows))
    return torch.tensor([[*row, *[side] * (longest - len(row))] for row in rows])


def ids(texts):
    return [[*(byte + 3 for byte in text.encode()), 1] for text in texts]


def theirs_generated(theirs, texts, **options):
    import torch

    inputs = padded(ids(texts))
    with torch.no_grad():
        made = theirs.generate(
            input_ids=inputs, attention_mask=(inputs > 0).int(), max_new_tokens=8, do_sample=False,
            return_dict_in_generate=True, output_scores=True, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
            **options,
        )  # fmt: skip
    rows = []
    for row in made.sequences[:, 1:].tolist():
        rows.append(row[: row.index(1) + 1] if 1 in row else row)
    return rows, made


CASES = {
    "greedy": ({}, {"num_beams": 1}),
    "penalties": (
        {"repetition_penalty": 1.7, "no_repeat_ngram": 2, "min_length": 3},
        {"num_beams": 1, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_new_tokens": 3},
    ),
    "beams": (
        {"beams": 3, "num_return": 3, "length_penalty": 1.0},
        {"num_beams": 3, "num_return_sequences": 3, "length_penalty": 1.0},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_generate_is_that_of_transformers(case, pair):
    ours, theirs = pair
    mine, their_options = CASES[case]
    found = ours.generate(TEXTS, max_length=8, **mine)
    expected, made = theirs_generated(theirs, TEXTS, **their_options)
    flat = [g for generations in found for g in (generations if case == "beams" else [generations])]
    assert [[t for t in g.tokens] for g in flat] == expected
    if case == "beams":
        np.testing.assert_allclose([g.score for g in flat], made.sequences_scores, rtol=1e-4)


def test_scores_and_logits_are_those_of_transformers(pair):
    import torch

    ours, theirs = pair
    targets = ["yes", "no, never", "", "a", "1999-05-03"]
    inputs, labels = padded(ids(TEXTS)), padded(ids(targets))
    with torch.no_grad():
        logits = theirs(
            input_ids=inputs, attention_mask=(inputs > 0).int(),
            decoder_input_ids=torch.nn.functional.pad(labels, (1, 0))[:, :-1],
        ).logits  # fmt: skip
    log_probs = torch.log_softmax(logits, -1).gather(2, labels[..., None])[..., 0]
    expected = (log_probs * (labels > 0)).sum(1)
    np.testing.assert_allclose(ours.score(list(zip(TEXTS, targets, strict=True))), expected, rtol=1e-4)
    found = ours.logits(ids(TEXTS), ids(targets))
    assert found.shape == logits.shape
    for i, target in enumerate(targets):
        end = len(target) + 1
        np.testing.assert_allclose(found[i, :end], logits[i, :end], rtol=1e-3, atol=1e-4)


def test_beams_without_a_result_are_omitted(pair):
    """The scores of the others are those of their texts, divided by T5X's penalty."""
    ours, _ = pair
    texts = ["a date", "x"]
    found = ours.generate(texts, beams=4, num_return=4, max_length=8, choices=["yes", "no"])
    assert [sorted(g.text for g in generations) for generations in found] == [["no", "yes"]] * 2
    pairs = [(text, g.text) for text, generations in zip(texts, found, strict=True) for g in generations]
    lengths = np.array([len(choice) + 1 for _, choice in pairs])
    scores = np.array([[g.score for g in generations] for generations in found])
    np.testing.assert_allclose(scores.reshape(-1), ours.score(pairs) / ((5 + lengths) / 6) ** 0.6, rtol=1e-4)
    assert (np.diff(scores) <= 0).all()


def test_rank_is_a_softmax_over_the_first_logits_of_two_labels(pair):
    import torch

    ours, theirs = pair
    passages = [("d7", "A quark is a particle."), ("d3", "Quark is a cheese.")]
    inputs = padded(ids([f"Query: what is a quark? Document: {text} Relevant:" for _, text in passages]))
    with torch.no_grad():
        logits = theirs(
            input_ids=inputs, attention_mask=(inputs > 0).int(), decoder_input_ids=torch.zeros((2, 1), dtype=int)
        ).logits[:, 0]  # fmt: skip
    expected = torch.log_softmax(logits[:, [ord("t") + 3, ord("f") + 3]], -1)[:, 0]
    found = ours.rank("what is a quark?", passages, labels="t,f")
    order = np.argsort(-expected.numpy())
    assert [(r.index, r.doc_id) for r in found] == [(i, passages[i][0]) for i in order]
    np.testing.assert_allclose([r.score for r in found], expected[order], rtol=1e-4, atol=1e-5)
    (alone,) = ours.rank("what is a quark?", ["Quark is a cheese."], labels="t,f")
    assert alone.doc_id == 0 and alone.score == pytest.approx(expected[1].item(), rel=1e-4)
    with pytest.raises(UserError, match=r"'true' is not a single piece .* 4: \['t', 'r', 'u', 'e'\]"):
        ours.rank("what is a quark?", passages)


def test_activations_have_the_dtype_of_the_device_or_the_one_asked_for(pair):
    ours, _ = pair
    pairs = [(text, "a text") for text in TEXTS]
    narrow = t5x.load(ours.source.path, dtype="bfloat16")
    assert (ours.model.module.config.dtype, narrow.model.module.config.dtype) == ("float32", "bfloat16")
    scores, expected = narrow.score(pairs), ours.score(pairs)
    np.testing.assert_allclose(scores, expected, rtol=2e-2)
    assert np.abs(np.subtract(scores, expected)).max() > 1e-4  # float32 would be closer
    with pytest.raises(UserError, match="dtype is 'float8': it must be one of float32, bfloat16"):
        t5x.load(ours.source.path, dtype="float8")


def test_answer_asks_as_t5_was_trained_to_be(pair):
    ours, _ = pair
    found = ours.answer("who?", "Effi.", max_length=8)
    expected = ours.generate("question: who? context: Effi.", max_length=8)
    assert (found.text, found.score) == (expected.text, expected.score)
    assert found.score < 0


def test_unsupported_calls_raise_user_error(pair):
    ours, _ = pair
    with pytest.raises(UserError, match="max_length is 0"):
        ours.generate("x", max_length=0)
    with pytest.raises(UserError, match="beams is 0"):
        ours.generate("x", beams=0)
    with pytest.raises(UserError, match="length_penalty is nan"):
        ours.generate("x", beams=2, length_penalty=float("nan"))
    with pytest.raises(UserError, match=r"memory are free.*--num_return"):
        ours.generate("x", temperature=1.0, num_return=10**12)
    with pytest.raises(UserError, match=r"of memory, but only .* are free.*--max_length"):
        ours.generate("x", max_length=10**12)
