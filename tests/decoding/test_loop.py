"""The loop continues with a smaller batch, without changing any result."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.decoding import SamplingLoopState, beam_search, constraints, greedy_decode, temperature_sample
from t5x.decoding.loop import PerExampleLogits, per_example_logits
from t5x.network import T5Config, Transformer
from t5x.partitioning import axis_rules
from tests.decoding.languages import EOS, Languages
from tests.support import tiny
from tests.support.marks import mark_slow

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
QUICK = {"sampling", "beams of Hugging Face for each", "constrained"}


@functools.cache
def made() -> Languages:
    """Most examples end early, a few at the last position."""
    languages = Languages.random(1, BATCH, 4, LENGTH)
    long = np.arange(BATCH) % 13 == 5
    languages.table[:, :, EOS] += np.where(long, -9.0, 4.0)[:, None]
    return languages


def decoded(way: str, *, shrink: bool) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Return tokens, scores, and the number of rows in every step."""
    decode_fn, options = WAYS[way]()
    steps = []

    def logits(inputs, state):
        jax.debug.callback(lambda _: steps.append(state.cur_token.shape[0]), state.cur_index[0])
        return made().tokens_to_logits(inputs["table"], state)

    network = PerExampleLogits(logits, {"table": jnp.asarray(made().table)}, {"table": 0})
    plain = lambda state: network(state)
    decode = lambda problem: decode_fn(tokens_to_logits=network if shrink else plain, **problem, **options)
    tokens, scores = jax.jit(decode)(made().problem())
    jax.effects_barrier()
    return np.asarray(tokens), np.asarray(scores), sorted(steps, reverse=True)


@pytest.mark.parametrize("way", mark_slow(list(WAYS), slow=WAYS.keys() - QUICK))
def test_results_are_those_of_a_single_loop(way):
    tokens, scores, steps = decoded(way, shrink=True)
    wanted, wanted_scores, together = decoded(way, shrink=False)
    np.testing.assert_array_equal(tokens, wanted)
    np.testing.assert_allclose(scores, wanted_scores, rtol=1e-6)
    rows = together[0]
    assert together == [rows] * LENGTH
    assert len(steps) == LENGTH and steps[0] == rows and steps[-1] == rows // 4


@pytest.mark.slow
def test_third_party_modules_keep_the_whole_batch():
    """They may use the cache differently: here it has a hidden layer axis."""

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
    params = {"inner": tiny.random_params(config)}
    tokens = jax.jit(model.predict_batch)(params, batch)
    for first in (0, 20):
        part = {name: x[first : first + 20] for name, x in batch.items()}
        np.testing.assert_array_equal(tokens[first : first + 20], jax.jit(model.predict_batch)(params, part))


def test_a_state_callback_may_create_a_new_state():
    fields = [field.name for field in dataclasses.fields(SamplingLoopState)]
    again = lambda state: SamplingLoopState(**{name: getattr(state, name) for name in fields})
    tokens, _ = made().decode(temperature_sample, state_callback_fn=again)
    np.testing.assert_array_equal(tokens, made().decode(temperature_sample)[0])


def test_a_sharded_batch_is_kept_whole():
    rules = [("batch", "data"), ("embed", "model")]
    for data, shrinks in ((1, True), (2, False)):
        with axis_rules(jax.sharding.AbstractMesh((data, 4), ("data", "model")), rules):
            assert isinstance(per_example_logits(lambda inputs, state: None, {}, {}), PerExampleLogits) is shrinks


def test_per_example_logits_can_be_jitted():
    network = PerExampleLogits(lambda inputs, state: inputs["x"] + state, {"x": jnp.ones(2)}, {"x": 0})
    np.testing.assert_array_equal(jax.jit(network)(1.0), [2.0, 2.0])


def test_a_callback_that_may_depend_on_the_batch_keeps_it_whole():
    """T5X's users write callbacks over arrays of the batch."""
    forbidden = jnp.arange(BATCH) % 4
    of_batch = lambda logits, state: jnp.where(jnp.arange(4) == forbidden[:, None], -1e7, logits)
    per_row = constraints.min_length(jnp.arange(BATCH) % 3)
    for callback in (of_batch, per_row, constraints.chain([constraints.min_length(1), of_batch])):
        logits = lambda inputs, state: made().tokens_to_logits(inputs["table"], state)
        network = PerExampleLogits(logits, {"table": jnp.asarray(made().table)}, {"table": 0})
        decode = functools.partial(greedy_decode, tokens_to_logits=network, logit_callback_fn=callback)
        tokens, _ = jax.eval_shape(functools.partial(decode, **made().problem()))
        assert tokens.shape == (BATCH, 1, LENGTH)


@pytest.mark.parametrize(
    "decodes, scan",
    mark_slow(
        {"1-unrolled": (1, False), "1-scanned": (1, True), "2-unrolled": (2, False), "2-scanned": (2, True)},
        slow=["1-unrolled", "1-scanned", "2-unrolled"],
    ),
)
@pytest.mark.slow
def test_a_network_continues_with_the_remaining_rows(scan, decodes):
    config = dataclasses.replace(tiny.T5_1_1, scan_layers=scan)
    params = tiny.random_params(config, seed=4)
    head = (5 * params["decoder"]["logits_dense"]["kernel"]).at[:, 1].multiply(4)
    params = {**params, "decoder": {**params["decoder"], "logits_dense": {"kernel": head}}}
    model = tiny.model(config, decode_fn=greedy_decode if decodes == 1 else beam_search)
    batch = tiny.batch(3, rows=40, inputs=9, targets=12)
    run = jax.jit(functools.partial(model.predict_batch_with_aux, return_all_decodes=True, num_decodes=decodes))
    tokens, aux = run(params, batch)
    ends = np.where((tokens[:, -1] == 1).any(-1), (tokens[:, -1] == 1).argmax(-1), tokens.shape[-1])
    assert 0 < (ends > np.sort(ends)[-11]).sum() <= 10, "some must still be open when 30 of 40 have ended"
    for first in (0, 20):  # too few for a second loop
        part = {name: x[first : first + 20] for name, x in batch.items()}
        wanted, scores = run(params, part)
        np.testing.assert_array_equal(tokens[first : first + 20], wanted)
        np.testing.assert_allclose(aux["scores"][first : first + 20], scores["scores"], rtol=1e-5, atol=1e-5)
