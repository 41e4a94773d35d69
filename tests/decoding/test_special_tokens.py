"""Padding that is not token 0, start tokens, and several EOS, on a language with one continuation of every token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.decoding import beam_search, constraints, greedy_decode, temperature_sample
from t5x.decoding.loop import with_constraint

PAD, EOS = 3, (1, 9)
NEXT = {2: 4, 4: 0, 0: 5, 5: 0, 6: 7, 7: 9, 8: 8, 9: 9, 1: 1, 3: 3}  # 2 4 0 5 0 5 …, 6 7 9
SEARCHES = {
    "greedy": greedy_decode,
    "sample": functools.partial(temperature_sample, topk=0, num_decodes=2),
    "beams": functools.partial(beam_search, num_decodes=3, length_penalty=1.0),
}


def logits_after(state):
    following = jnp.array([NEXT[i] for i in range(10)])[state.cur_token[:, 0]]
    return 30.0 * jax.nn.one_hot(following, 10), state.cache


def decode(name, prompts, tokens_to_logits=logits_after):
    search = functools.partial(SEARCHES[name], cache={}, eos_id=EOS, pad_id=PAD)
    return np.asarray(search(inputs=jnp.array(prompts, jnp.int32), tokens_to_logits=tokens_to_logits)[0])[
        :, -1
    ].tolist()


@pytest.mark.parametrize("name", SEARCHES)
def test_outputs_are_padded_with_the_padding_token(name):
    outputs = decode(name, [[2, PAD, PAD, PAD, PAD], [6, PAD, PAD, PAD, PAD], [8, 0, PAD, PAD, PAD]])
    assert outputs == [[4, 0, 5, 0, 5], [7, 9, PAD, PAD, PAD], [0, 5, 0, 5, 0]]  # the last one has a prompt, token 0


@pytest.mark.parametrize("name", SEARCHES)
def test_constraint_before_all_others(name):
    forced = with_constraint(logits_after, constraints.forced_tokens([8]))
    assert decode(name, [[2, PAD, PAD], [6, PAD, PAD]], forced) == [[8, 8, 8], [8, 8, 8]]


def test_min_length_forbids_every_eos():
    callback = constraints.min_length(2)
    outputs, _ = greedy_decode(
        inputs=jnp.array([[6, PAD, PAD], [9, PAD, PAD]]), cache={}, tokens_to_logits=logits_after, eos_id=EOS,
        pad_id=PAD, logit_callback_fn=callback,
    )  # fmt: skip
    assert not np.isin(outputs[:, 0, :2], EOS).any()


def test_a_choice_may_end_with_every_eos():
    only_choice = with_constraint(logits_after, constraints.choices([[7]]))
    assert decode("greedy", [[6, PAD, PAD]], only_choice) == [[7, 9, PAD]]
