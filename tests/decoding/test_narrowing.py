"""Rows that have ended leave the loop, and nobody's result changes."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.decoding import SamplingLoopState, beam_search, constraints, greedy_decode, temperature_sample
from t5x.decoding.narrowing import OfExamples, of_examples
from t5x.network import T5Config, Transformer
from t5x.partitioning import axis_rules
from tests import tiny
from tests.decoding.languages import EOS, Languages

BATCH, LENGTH = 40, 6
EACH = np.arange(BATCH) / BATCH
WAYS = {
    "greedy": lambda: (greedy_decode, {}),
    "sampling": lambda: (temperature_sample, {"topk": 3, "num_decodes": 3, "decode_rng": jax.random.key(5)}),
    "sampling for each": lambda: (temperature_sample, {"topk": np.arange(BATCH) % 3 + 1, "temperature": 1 + EACH}),
    "beams": lambda: (beam_search, {"num_decodes": 3}),
    "beams for each": lambda: (beam_search, {"alpha": EACH, "min_log_prob": -9 * EACH[:, None, None] - 50}),
    "beams of Hugging Face": lambda: (beam_search, {"num_decodes": 3, "length_penalty": 1.0}),
    "beams of Hugging Face for each": lambda: (beam_search, {"length_penalty": EACH, "early_stopping": "never"}),
    "constrained": lambda: (beam_search, {"logit_callback_fn": constraints.chain([constraints.min_length(1)])}),
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
    decode_fn, options = WAYS[way]()
    steps = []

    def logits(seen, state):
        jax.debug.callback(lambda _: steps.append(state.cur_token.shape[0]), state.cur_index[0])
        return made().tokens_to_logits(seen["table"], state)

    network = OfExamples(logits, {"table": jnp.asarray(made().table)}, {"table": 0})
    plain = lambda state: network(state)
    tokens, scores = decode_fn(tokens_to_logits=network if narrow else plain, **made().problem(), **options)
    jax.effects_barrier()
    return np.asarray(tokens), np.asarray(scores), sorted(steps, reverse=True)


@pytest.mark.parametrize("way", WAYS)
def test_all_get_what_they_get_in_one_loop(way):
    tokens, scores, steps = decoded(way, narrow=True)
    wanted, wanted_scores, together = decoded(way, narrow=False)
    np.testing.assert_array_equal(tokens, wanted)
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-6)
    rows = together[0]
    assert together == [rows] * LENGTH
    assert len(steps) == LENGTH and steps[0] == rows and steps[-1] == rows // 4


def test_what_is_built_around_our_networks_keeps_its_batch_whole():
    """It may use the cache in its own way: here nobody can see that layers stand before the rows."""

    class Around(nn.Module):
        inner_config: T5Config

        def setup(self):
            self.inner = Transformer(self.inner_config)

        def encode(self, *args, **options):
            return self.inner.encode(*args, **options)

        def decode(self, *args, **options):
            return self.inner.decode(*args, **options)

        def __call__(self, *args, **options):
            return self.inner(*args, **options)

    config = dataclasses.replace(tiny.T5_1_1, scan_layers=True)
    batch = tiny.batch(3, rows=40, inputs=9, targets=12)
    model = tiny.model(config, decode_fn=greedy_decode)
    model.module = Around(config)
    params = model.module.init(
        jax.random.key(0), *(batch[f"{name}_tokens"] for name in ("encoder_input", "decoder_input", "decoder_target")),
        enable_dropout=False,
    )["params"]  # fmt: skip
    tokens = jax.jit(model.predict_batch)(params, batch)
    for first in (0, 20):
        part = {name: x[first : first + 20] for name, x in batch.items()}
        np.testing.assert_array_equal(tokens[first : first + 20], jax.jit(model.predict_batch)(params, part))


def test_a_state_callback_may_make_its_own_state():
    fields = [field.name for field in dataclasses.fields(SamplingLoopState)]
    again = lambda state: SamplingLoopState(**{name: getattr(state, name) for name in fields})
    tokens, _ = made().decode(temperature_sample, state_callback_fn=again)
    np.testing.assert_array_equal(tokens, made().decode(temperature_sample)[0])


def test_devices_that_share_a_batch_keep_it_whole():
    rules = [("batch", "data"), ("embed", "model")]
    for data, narrows in ((1, True), (2, False)):
        with axis_rules(jax.sharding.AbstractMesh((data, 4), ("data", "model")), rules):
            assert isinstance(of_examples(lambda seen, state: None, {}, {}), OfExamples) is narrows


def test_it_is_a_function_for_jax():
    network = OfExamples(lambda seen, state: seen["x"] + state, {"x": jnp.ones(2)}, {"x": 0})
    np.testing.assert_array_equal(jax.jit(network)(1.0), [2.0, 2.0])


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
    batch = tiny.batch(3, rows=40, inputs=9, targets=12)
    run = jax.jit(functools.partial(model.predict_batch_with_aux, return_all_decodes=True, num_decodes=decodes))
    tokens, aux = run(params, batch)
    ends = np.where((tokens[:, -1] == 1).any(-1), (tokens[:, -1] == 1).argmax(-1), tokens.shape[-1])
    assert 0 < (ends > np.sort(ends)[-11]).sum() <= 10, "some must still be open when 30 of 40 have ended"
    for first in (0, 20):  # too few to be narrowed
        part = {name: x[first : first + 20] for name, x in batch.items()}
        wanted, scores = run(params, part)
        np.testing.assert_array_equal(tokens[first : first + 20], wanted)
        np.testing.assert_allclose(aux["scores"][first : first + 20], scores["scores"], rtol=1e-5, atol=1e-5)
