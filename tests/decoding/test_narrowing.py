"""Rows that have ended leave the loop, and nobody's result changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.decoding import OfExamples, beam_search, constraints, greedy_decode, temperature_sample
from tests import tiny
from tests.decoding.languages import EOS, Languages

BATCH, LENGTH = 40, 6
WAYS = {
    "greedy": (greedy_decode, {}),
    "sampling": (temperature_sample, {"topk": 3, "num_decodes": 3, "decode_rng": jax.random.key(5)}),
    "for each": (temperature_sample, {"topk": np.arange(BATCH) % 3 + 1, "decode_rng": jax.random.key(5)}),
    "beams": (beam_search, {"num_decodes": 3}),
    "beams of Hugging Face": (beam_search, {"num_decodes": 3, "length_penalty": 1.0}),
    "constrained": (
        beam_search,
        {"num_decodes": 2, "logit_callback_fn": constraints.chain([constraints.min_length(1)])},
    ),
}


@functools.cache
def made() -> Languages:
    """Most end soon, a few at the last position."""
    drawn = Languages.random(1, BATCH, 4, LENGTH)
    long = np.arange(BATCH) % 13 == 5
    drawn.table[:, :, EOS] += np.where(long, -9.0, 4.0)[:, None]
    return drawn


def decoded(way: str, *, narrow: bool) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Tokens, scores, and the number of rows in every step that was taken."""
    decode_fn, options = WAYS[way]
    steps = []

    def logits(seen, state):
        jax.debug.callback(lambda _: steps.append(state.cur_token.shape[0]), state.cur_index[0])
        return made().tokens_to_logits(seen["table"], state)

    network = OfExamples(logits, {"table": jnp.asarray(made().table)}, {"table": 0})
    plain = lambda state: network(state)
    tokens, scores = decode_fn(tokens_to_logits=network if narrow else plain, **made().problem(), **options)
    jax.effects_barrier()
    return np.asarray(tokens), np.asarray(scores), steps


@pytest.mark.parametrize("way", WAYS)
def test_all_get_what_they_get_in_one_loop(way):
    tokens, scores, steps = decoded(way, narrow=True)
    wanted, wanted_scores, together = decoded(way, narrow=False)
    np.testing.assert_array_equal(tokens, wanted)
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-6)
    rows = together[0]
    assert together == [rows] * LENGTH
    assert len(steps) == LENGTH and steps[0] == rows and steps[-1] == rows // 4


def test_a_callback_that_may_know_the_batch_keeps_it_whole():
    """T5X's users write functions over arrays of the batch."""
    forbidden = jnp.arange(BATCH) % 4
    of_batch = lambda logits, state: jnp.where(jnp.arange(4) == forbidden[:, None], -1e7, logits)
    per_row = constraints.min_length(jnp.arange(BATCH) % 3)
    for callback in (of_batch, per_row, constraints.chain([constraints.min_length(1), of_batch])):
        network = OfExamples(
            lambda seen, state: made().tokens_to_logits(seen["table"], state), {"table": jnp.asarray(made().table)},
            {"table": 0},
        )  # fmt: skip
        tokens, _ = greedy_decode(tokens_to_logits=network, **made().problem(), logit_callback_fn=callback)
        assert tokens.shape == (BATCH, 1, LENGTH)


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
@pytest.mark.parametrize("decodes", [1, 2])
def test_a_network_goes_on_with_the_rows_that_are_left(scan, decodes):
    config = dataclasses.replace(tiny.T5_1_1, scan_layers=scan)
    params = tiny.initial_params(config, seed=4)
    head = (5 * params["decoder"]["logits_dense"]["kernel"]).at[:, 1].multiply(4)
    params = {**params, "decoder": {**params["decoder"], "logits_dense": {"kernel": head}}}
    model = tiny.model(config, decode_fn=greedy_decode if decodes == 1 else beam_search)
    batch = tiny.batch(3, rows=24, inputs=9, targets=12)
    run = jax.jit(functools.partial(model.predict_batch_with_aux, return_all_decodes=True, num_decodes=decodes))
    tokens, aux = run(params, batch)
    ends = np.where((tokens[:, -1] == 1).any(-1), (tokens[:, -1] == 1).argmax(-1), tokens.shape[-1])
    assert 0 < (ends > np.sort(ends)[-7]).sum() <= 6, "some must still be open when 18 of 24 have ended"
    for first in range(0, 24, 8):  # too few to be narrowed
        part = {name: x[first : first + 8] for name, x in batch.items()}
        wanted, scores = run(params, part)
        np.testing.assert_array_equal(tokens[first : first + 8], wanted)
        np.testing.assert_allclose(aux["scores"][first : first + 8], scores["scores"], rtol=1e-5, atol=1e-5)
