"""Subclasses that decode by themselves, and networks with T5X's call convention, as projects for T5X have them."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x import decoding, models
from t5x.data import PassThroughVocabulary
from tests.support import tiny


class OwnDecoding(models.EncoderDecoderModel):
    def predict_batch_with_aux(self, params, batch, rng=None, decoder_params=None, return_all_decodes=None,
                               num_decodes=None, prompt_with_targets=False):  # fmt: skip
        num_decodes = num_decodes or 2
        inputs, zeros = batch["encoder_input_tokens"], jnp.zeros_like(batch["decoder_input_tokens"])
        _, variables = self.module.apply(
            {"params": params}, inputs, zeros, zeros, decode=True, enable_dropout=False, mutable=["cache"]
        )
        expand = functools.partial(decoding.flat_batch_beam_expand, beam_size=num_decodes)
        encoded = self.module.apply({"params": params}, inputs, enable_dropout=False, method=self.module.encode)
        tokens_to_logits = functools.partial(
            self._compute_logits_from_slice,
            params=params,
            encoded_inputs=expand(encoded),
            raw_inputs=expand(inputs),
            max_decode_length=zeros.shape[1],
        )
        decodes, scores = self._decode_fn(
            inputs=zeros, cache=variables["cache"], tokens_to_logits=tokens_to_logits, decode_rng=rng,
            eos_id=self.output_vocabulary.eos_id, num_decodes=num_decodes, cache_offset=0,
        )  # fmt: skip
        return decodes[:, -1], {"scores": scores[:, -1]}


@pytest.mark.slow
def test_decoding_by_t5x_methods_gives_the_same_results():
    ours = tiny.model(tiny.BYTES, decode_fn=decoding.beam_search)
    theirs = OwnDecoding(ours.module, ours.input_vocabulary, ours.output_vocabulary, None)
    params, batch = tiny.random_params(tiny.BYTES), tiny.batch()
    predict = jax.jit(functools.partial(ours.predict_batch_with_aux, num_decodes=2))
    (expected, aux), (found, own_aux) = predict(params, batch), jax.jit(theirs.predict_batch_with_aux)(params, batch)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(own_aux["scores"], aux["scores"], rtol=1e-5)


class BiasedDecoding(models.EncoderDecoderModel):
    def _compute_logits_from_slice(self, decoding_state, params, encoded_inputs, raw_inputs, max_decode_length):
        logits, cache = super()._compute_logits_from_slice(
            decoding_state, params, encoded_inputs, raw_inputs, max_decode_length
        )
        return logits.at[:, 9].add(1e4), cache


def test_an_override_of_the_logits_of_a_slice_is_used():
    ours = tiny.model(tiny.BYTES)
    biased = BiasedDecoding(ours.module, ours.input_vocabulary, ours.output_vocabulary, None)
    predict = jax.jit(functools.partial(biased.predict_batch_with_aux, num_decodes=2))
    assert (np.asarray(predict(tiny.random_params(tiny.BYTES), tiny.batch())[0]) == 9).all()


VOCABULARY = PassThroughVocabulary(4, eos_id=1)
# Row 0 decodes to 2, 2, …; row 1 to 3, 3, …
LOGITS = jnp.array([[[-1e7, -1e7, 0, -1e7]], [[-1e7, -1e7, -1e7, 0]]])


def network(**methods):
    """A network that records how it is called; every call returns LOGITS and an empty cache."""
    return mock.Mock(apply=mock.Mock(return_value=(LOGITS, {"cache": {}})), scan_layers=False, config=None, **methods)


@pytest.mark.parametrize("decode_fn", [decoding.beam_search, functools.partial(decoding.temperature_sample, topk=4)])
def test_an_encoder_decoder_network_is_called_as_by_t5x(decode_fn):
    made = network()
    made.apply.side_effect = lambda *args, method=None, **kwargs: (
        jnp.zeros((2, 3, 5)) if method is made.encode else (LOGITS, {"cache": {}})
    )
    model = models.EncoderDecoderModel(made, VOCABULARY, VOCABULARY, None, decode_fn=decode_fn)
    batch = {"encoder_input_tokens": np.zeros((2, 3), np.int32), "decoder_input_tokens": np.zeros((2, 4), np.int32)}
    np.testing.assert_array_equal(model.predict_batch({}, batch), [[2] * 4, [3] * 4])
    (variables, inputs, *targets), options = made.apply.call_args_list[0]
    assert variables == {"params": {}} and inputs.shape == (2, 3) and [x.shape for x in targets] == [(2, 4)] * 2
    assert options == {"decode": True, "enable_dropout": False, "mutable": ["cache"]}
    model.get_initial_variables(
        "key", {"encoder_input_tokens": (1, 3), "decoder_input_tokens": (1, 4), "decoder_positions": (1, 4)}
    )
    (rng, *tokens), options = made.init.call_args
    assert rng == "key" and [x.shape for x in tokens] == [(1, 3), (1, 4), (1, 4)]
    assert options.pop("decoder_positions").shape == (1, 4)
    names = ("encoder_segment_ids", "decoder_segment_ids", "encoder_positions")
    assert options == dict.fromkeys(names) | {"decode": False, "enable_dropout": False}


def test_a_decoder_only_network_is_called_as_by_t5x():
    made = network()
    decode_fn = functools.partial(decoding.temperature_sample, topk=4)
    model = models.DecoderOnlyModel(made, VOCABULARY, None, decode_fn=decode_fn)
    batch = {
        "decoder_input_tokens": np.array([[0, 3, 4, 5, 6, 0, 0], [0, 7, 8, 9, 0, 0, 0]], np.int32),
        "decoder_causal_attention": np.array([[1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0]], np.int32),
    }
    np.testing.assert_array_equal(model.predict_batch({}, batch), [[2] * 5 + [0] * 2, [3] * 6 + [0]])
    assert made.apply.call_args_list[0][1] == {"decode": True, "enable_dropout": False, "mutable": ["cache"]}
    (variables,), prefill = made.apply.call_args_list[1]
    assert variables.keys() == {"params", "cache"} and prefill["prefill"]
    np.testing.assert_array_equal(prefill["prefill_lengths"], [2, 1])
    np.testing.assert_array_equal(prefill["decoder_input_tokens"][0], [0, 3, 4, 0, 0, 0, 0])
    np.testing.assert_array_equal(prefill["decoder_target_tokens"], batch["decoder_causal_attention"])


def test_the_key_is_passed_once_and_only_if_given():
    decode_fn = mock.Mock(return_value=(np.zeros((2, 1, 2), np.int32), np.zeros((2, 1))))
    made = network()
    made.apply.side_effect = lambda *args, method=None, **kwargs: (
        jnp.zeros((2, 3, 5)) if method is made.encode else (LOGITS, {"cache": {}})
    )
    model = models.EncoderDecoderModel(made, VOCABULARY, VOCABULARY, None, decode_fn=decode_fn)
    batch = {"encoder_input_tokens": np.zeros((2, 3), np.int32), "decoder_input_tokens": np.zeros((2, 2), np.int32)}
    for given, expected in ({}, None), ({"rng": 4}, 4), ({"decoder_params": {"decode_rng": 3}}, 3):
        model.predict_batch_with_aux({}, batch, **given)
        assert decode_fn.call_args[1].get("decode_rng") == expected
        assert ("decode_rng" in decode_fn.call_args[1]) == (expected is not None)
    with pytest.raises(ValueError, match="`rng` or decoder_params"):
        model.predict_batch_with_aux({}, batch, rng=4, decoder_params={"decode_rng": 3})


def test_float_tokens_are_cast():
    model, params, batch = tiny.model(tiny.BYTES), tiny.random_params(tiny.BYTES), tiny.batch()
    floats = {name: x.astype(np.float32) for name, x in batch.items()}
    score = jax.jit(model.score_batch)
    np.testing.assert_array_equal(score(params, floats), score(params, batch))
