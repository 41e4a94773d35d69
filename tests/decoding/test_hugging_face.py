"""Beam search with a length penalty against transformers' `generate`, on random and on real weights."""

import json

import jax
import numpy as np
import pytest
import torch

from t5x.decoding import beam_search, constraints, greedy_decode
from tests.checkpoints.formats import huggingface_models
from tests.checkpoints.test_weights import SHARED, needs_data, ours
from tests.support.marks import mark_slow

LENGTH = 9
PENALTIES = (1.0, 0.0, 2.5, -1.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return (their model, ours, our parameters, inputs [16, 7]); with 12 tokens, so that EOS is frequent."""
    path = tmp_path_factory.mktemp("models") / "hf"
    theirs = huggingface_models.model("T5 1.0", vocab_size=12, num_decoder_layers=2)
    theirs.save_pretrained(path)
    model, params = ours(path)
    rng = np.random.default_rng(0)
    inputs = rng.integers(2, 12, (16, 7)) * (np.arange(7) < rng.integers(2, 8, (16, 1)))
    return theirs, model, params, inputs.astype(np.int32)


def generate(theirs, inputs, **options):
    """Return tokens [batch, beams, LENGTH] and scores [batch, beams], best first."""
    with torch.no_grad():
        made = theirs.generate(
            input_ids=torch.from_numpy(inputs).long(), attention_mask=torch.from_numpy(inputs > 0).long(),
            max_new_tokens=LENGTH, do_sample=False, decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True, num_return_sequences=options.get("num_beams", 1),
            **options,
        )  # fmt: skip
    tokens = made.sequences.numpy()[:, 1:]
    tokens = np.where(np.cumsum(tokens == 1, axis=1) - (tokens == 1) > 0, 0, tokens)  # transformers pads with EOS
    tokens = np.pad(tokens, ((0, 0), (0, LENGTH - tokens.shape[1]))).reshape(len(inputs), -1, LENGTH)
    return tokens, None if options.get("num_beams", 1) == 1 else made.sequences_scores.numpy().reshape(len(inputs), -1)


def decoder(model, params, decode_fn, num_decodes, compiler_options=None, **static):
    model.decode_fn = lambda **options: decode_fn(**options, **static)
    run = jax.jit(
        lambda params, batch, options: model.predict_batch_with_aux(
            params, batch, decoder_params=options, return_all_decodes=True, num_decodes=num_decodes
        ),
        compiler_options=compiler_options,
    )

    def decode(inputs, length=LENGTH, **options):
        empty = np.zeros((len(inputs), length), np.int32)
        tokens, aux = run(params, {"encoder_input_tokens": inputs, "decoder_input_tokens": empty}, options)
        return np.asarray(tokens)[:, ::-1], np.asarray(aux["scores"])[:, ::-1]

    return decode


CASES = {
    "3 beams": (3, False, {}, []),
    "3 beams, first endings": (3, True, {}, []),
    "4 beams, never early": (4, "never", {}, []),
    "constrained": (
        4,
        False,
        {"min_new_tokens": 4, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2},
        [constraints.repetition_penalty(1.7), constraints.no_repeat_ngrams(2), constraints.min_length(4)],
    ),
}


@pytest.mark.parametrize(
    "beams, early_stopping, options, processors", mark_slow(CASES, slow=["3 beams", "4 beams, never early"])
)
def test_beam_search(models, beams, early_stopping, options, processors):
    theirs, model, params, inputs = models
    callback = constraints.chain(processors) if processors else None
    decode = decoder(model, params, beam_search, beams, early_stopping=early_stopping, logit_callback_fn=callback)
    found = set()
    for penalty in PENALTIES:
        expected, scores = generate(
            theirs, inputs, num_beams=beams, length_penalty=penalty, early_stopping=early_stopping, **options
        )
        tokens, our_scores = decode(inputs, length_penalty=penalty)
        np.testing.assert_array_equal(tokens, expected, err_msg=f"length penalty {penalty}")
        np.testing.assert_allclose(our_scores, scores, rtol=1e-4)
        found.add(tokens.tobytes())
    assert len(found) > 1 and (expected == 1).any(), "these weights do not distinguish the cases"


def test_greedy(models):
    theirs, model, params, inputs = models
    processors = [constraints.repetition_penalty(1.7), constraints.no_repeat_ngrams(2), constraints.min_length(4)]
    for options, callback in (
        ({}, None),
        ({"min_new_tokens": 4, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2}, constraints.chain(processors)),
    ):
        tokens, _ = decoder(model, params, greedy_decode, 1, logit_callback_fn=callback)(inputs)
        np.testing.assert_array_equal(tokens, generate(theirs, inputs, **options)[0])


@pytest.mark.slow  # inference/test_real.py
@needs_data
def test_real_weights_give_the_beams_of_hugging_face(tmp_path):
    directory = huggingface_models.real_directory(tmp_path / "titler", SHARED)
    model, params = ours(directory, scan_layers=True)
    cases = json.loads((SHARED / "flan_t5_small_titler" / "expected.json").read_text())["cases"]
    inputs = np.zeros((len(cases), max(len(case["input_ids"]) for case in cases)), np.int32)
    for row, case in enumerate(cases):
        inputs[row, : len(case["input_ids"])] = case["input_ids"]
    length = max(len(case["beam4_ids"]) for case in cases) + 4
    faster = {"xla_backend_optimization_level": 1}  # 40 rows of 32128 logits: optimizing pays off
    tokens, scores = decoder(model, params, beam_search, 4, faster)(inputs, length, length_penalty=1.0)
    assert any(case["beam4_ids"] != case["greedy_ids"] for case in cases)
    for row, case in enumerate(cases):
        output = tokens[row, 0][: int((tokens[row, 0] > 0).sum())].tolist()
        assert [0, *output] == case["beam4_ids"], case["text"]
        np.testing.assert_allclose(scores[row, 0], case["beam4_score"], rtol=1e-4)
