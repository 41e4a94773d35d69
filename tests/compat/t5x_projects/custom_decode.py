"""Greedy decoding that writes digits only, by its own loop; and sampling with T5X's callbacks."""

import jax
import jax.numpy as jnp

from t5x import decoding

FIRST, LAST = ord("0") + 3, ord("9") + 3


def only_digits(logits, state):
    """Allow digits at first, then also EOS."""
    tokens = jnp.arange(logits.shape[-1])
    allowed = (tokens >= FIRST) & (tokens <= LAST)
    allowed = allowed | ((tokens == 1) & (state.cur_index[:, None] > 0))
    return jnp.where(allowed, logits, decoding.NEG_INF)


def count_steps(state):
    """Stop everything after three steps."""
    return state.replace(ended=state.ended | (state.step >= 3))


def sample_digits(inputs, cache, tokens_to_logits, eos_id, num_decodes=1, decode_rng=None, cache_offset=0, **kwargs):
    return decoding.temperature_sample(
        inputs, cache, tokens_to_logits, eos_id, decode_rng, num_decodes, temperature=0.5, topk=0,
        cache_offset=cache_offset, logit_callback_fn=only_digits, state_callback_fn=count_steps, **kwargs,
    )  # fmt: skip


def greedy_digits(inputs, cache, tokens_to_logits, eos_id, num_decodes=1, decode_rng=None, cache_offset=0, **kwargs):
    """The same without sampling, as a loop over T5X's DecodingState."""
    batch, length = inputs.shape
    cache = decoding.cache_map(lambda x: decoding.flat_batch_beam_expand(x, 1, offset=cache_offset), cache)

    def step(i, carry):
        sequences, ended, cache, scores = carry
        index = jnp.full((batch,), i, jnp.int32)
        token = jax.lax.dynamic_slice_in_dim(sequences, i, 1, axis=1)
        state = decoding.DecodingState(cur_index=index, sequences=sequences, cur_token=token, cache=cache)
        logits, cache = tokens_to_logits(state)
        log_probs = jax.nn.log_softmax(only_digits(logits, state))
        best = jnp.argmax(log_probs, axis=-1)
        scores += jnp.where(ended, 0.0, jnp.max(log_probs, axis=-1))
        best = jnp.where(ended, 0, best)
        sequences = jax.lax.dynamic_update_slice_in_dim(sequences, best[:, None].astype(jnp.int32), i + 1, axis=1)
        return sequences, ended | (best == eos_id), cache, scores

    sequences = jnp.zeros((batch, length + 1), jnp.int32)
    start = (sequences, jnp.zeros((batch,), bool), cache, jnp.zeros((batch,)))
    sequences, _, _, scores = jax.lax.fori_loop(0, length, step, start)
    return sequences[:, None, 1:], scores[:, None]
