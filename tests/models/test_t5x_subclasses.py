"""Subclasses that decode by themselves, as projects for T5X do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from t5x import decoding, models
from tests import tiny


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


def test_decoding_by_t5x_methods_finds_what_ours_does():
    ours = tiny.model(decode_fn=decoding.beam_search)
    theirs = OwnDecoding(ours.module, ours.input_vocabulary, ours.output_vocabulary, None)
    params, batch = tiny.initial_params(), tiny.batch()
    predict = jax.jit(functools.partial(ours.predict_batch_with_aux, num_decodes=2))
    (expected, aux), (found, own_aux) = predict(params, batch), jax.jit(theirs.predict_batch_with_aux)(params, batch)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(own_aux["scores"], aux["scores"], rtol=1e-5)
