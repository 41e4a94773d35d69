"""Options of decoding that mean nothing, or need more memory than there is, are refused before anything is compiled."""

import dataclasses
import functools
import math
import re

import jax
import numpy as np
import pytest

from t5x import decoding
from t5x._runtime.errors import UserError
from t5x.data import PassThroughVocabulary
from t5x.decoding import limits
from t5x.models import DecoderOnlyModel
from t5x.network import DecoderWrapper, TransformerConfig
from tests.support import tiny

DECODER_ONLY = TransformerConfig(vocab_size=31, emb_dim=12, num_heads=3, head_dim=5, mlp_dim=20, num_layers=1)
ENCODER_DECODER = dataclasses.replace(tiny.T5_1_1, num_decoder_layers=1)
ROWS = 4


def encoder_decoder(**options):
    return tiny.model(ENCODER_DECODER, **options)


def decoder_only(**options):
    vocabulary = PassThroughVocabulary(DECODER_ONLY.vocab_size, eos_id=1)
    return DecoderOnlyModel(DecoderWrapper(DECODER_ONLY), vocabulary, None, **options)


@functools.cache
def abstract_params(make):
    model = make()
    shapes = model.input_shapes({"inputs": 3, "targets": 3})
    return jax.eval_shape(lambda key: model.get_initial_variables(key, shapes)["params"], jax.random.key(0))


def predict(model, length=8, rows=ROWS, num_decodes=1, **decoder_params):
    """Traces `predict_batch_with_aux`, as compiling does first; nothing is computed."""
    tokens = jax.ShapeDtypeStruct((rows, length), np.int32)
    inputs = jax.ShapeDtypeStruct((rows, 3), np.int32)
    batch = {"encoder_input_tokens": inputs, "decoder_input_tokens": tokens, "decoder_target_tokens": tokens}
    params = abstract_params(decoder_only if isinstance(model, DecoderOnlyModel) else encoder_decoder)
    options = {"num_decodes": num_decodes, "decoder_params": decoder_params}
    return jax.eval_shape(functools.partial(model.predict_batch_with_aux, **options), params, batch)


@pytest.mark.parametrize(
    "decode_fn, name, value",
    [
        (decoding.beam_search, "alpha", math.nan),
        (decoding.beam_search, "length_penalty", math.nan),
        (decoding.beam_search, "length_penalty", -math.inf),
        (decoding.beam_search, "length_penalty", 1e30),  # finite, but length ** 1e30 is not
        (decoding.beam_search, "min_log_prob", math.nan),
        (decoding.temperature_sample, "temperature", math.nan),
        (decoding.temperature_sample, "temperature", -1.0),
        (decoding.temperature_sample, "temperature", math.inf),
        (decoding.temperature_sample, "topp", math.nan),
        (decoding.temperature_sample, "topp", 1.5),
        (decoding.temperature_sample, "topk", -1),
        (decoding.temperature_sample, "num_decodes", 0),
    ],
)
def test_numbers_without_a_meaning_are_refused(decode_fn, name, value):
    options = {"topk": 0} if name == "topp" else {}
    with pytest.raises(UserError, match=f"^{name} is {re.escape(str(value))}"):
        predict(encoder_decoder(decode_fn=decode_fn), **options | {name: value})


@pytest.mark.parametrize("make", [encoder_decoder, decoder_only])
@pytest.mark.parametrize(
    "asked, names",
    [({"num_decodes": 100_000}, ["100000", "--beams"]), ({"length": 10**9}, ["1000000000", "--max_length"])],
    ids=["beams", "length"],
)
def test_too_large_options_are_refused_with_those_that_fit(make, asked, names, monkeypatch):
    monkeypatch.setattr(limits, "available_memory", lambda: 5e7)
    model = make(decode_fn=decoding.beam_search)
    with pytest.raises(UserError, match=r"50\.0 MB of memory are free") as error:
        predict(model, **asked)
    for name in names:
        assert name in str(error.value)
    largest = int(re.search(rf"\({names[1]}[^)]*\) to at most (\d+)", str(error.value))[1])
    (option,) = asked
    predict(model, **{option: largest})
    with pytest.raises(UserError):
        predict(model, **{option: largest + 1})


def test_a_batch_that_does_not_fit_names_the_largest_that_does(monkeypatch):
    monkeypatch.setattr(limits, "available_memory", lambda: 1e6)
    with pytest.raises(UserError, match=r"the batch size to at most (\d+)") as error:
        predict(encoder_decoder(), rows=1024)
    predict(encoder_decoder(), rows=int(re.search(r"batch size to at most (\d+)", str(error.value))[1]))


def test_no_ngram_is_longer_than_the_output():
    predict(
        encoder_decoder(decode_fn=decoding.temperature_sample),
        logit_callback_fn=decoding.constraints.no_repeat_ngrams(10**12),
    )
