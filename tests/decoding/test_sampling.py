"""Sampling: frequencies against exact distributions, what a sample depends on, and T5X's options."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from t5x._runtime.errors import UserError
from t5x.decoding import example_keys, greedy_decode, temperature_sample
from t5x.decoding.sampling import topk_mask, topp_mask
from tests.decoding.languages import EOS, Languages
from tests.support.marks import mark_slow


def exact(table, length, *, temperature=1.0, topk=0, topp=0.0):
    """Return {sequence: probability} of a language [nodes, vocab] by definition."""
    vocab = table.shape[-1]

    def after(node):
        logits = table[node].astype(np.float64) / temperature
        probabilities = np.exp(logits - logits.max())
        order = np.argsort(-probabilities)
        keep = topk or vocab
        if topp:
            keep = 1 + int(np.searchsorted(np.cumsum(probabilities[order]) / probabilities.sum(), topp))
        kept = np.where(np.isin(np.arange(vocab), order[:keep]), probabilities, 0.0)
        return kept / kept.sum()

    found = {}
    for tokens in itertools.product(range(vocab), repeat=length):
        probability, node, output = 1.0, 0, []
        for token in tokens:
            probability *= after(node)[token]
            node = node * vocab + token + 1
            output.append(token)
            if token == EOS:
                break
        if probability > 0:
            found[tuple(output + [0] * (length - len(output)))] = probability
    return found


FILTERS = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0, "topk": 3},
    {"topk": 2},
    {"topp": 0.7},
    {"temperature": 1.7, "topp": 0.9},
]


@pytest.mark.parametrize(
    "traced, options",
    mark_slow(
        {f"{traced}-{options}": (traced, options) for traced in (False, True) for options in FILTERS},
        slow=[f"False-{options}" for options in FILTERS if options != {"temperature": 2.0, "topk": 3}],
    ),
)
def test_frequencies(options, traced):
    draws, length = 20_000, 3
    one = Languages.random(7, 1, 5, length)
    expected = exact(one.table[0], length, **options)
    given = {"temperature": 1.0, "topk": 0, "topp": 0.0} | options
    if traced:
        given = {name: np.asarray(value) for name, value in given.items()}
    else:
        given = {name: value for name, value in given.items() if name != "temperature"} | {
            "temperature": np.float32(given["temperature"])
        }
    # Many samples of one example, and one sample of many equal examples, have the same distribution.
    many = {"num_decodes": draws} if traced else {}
    made = one if traced else Languages(np.repeat(one.table, draws, 0), length)
    tokens, scores = made.decode(temperature_sample, decode_rng=jax.random.key(3), **given, **many)
    output = [tuple(row) for row in tokens.reshape(-1, length).tolist()]
    assert set(output) <= set(expected)
    observed = np.array([output.count(sequence) for sequence in expected])
    probabilities = np.array(list(expected.values()))
    common = probabilities * draws >= 5
    observed = np.append(observed[common], observed[~common].sum())
    wanted = np.append(probabilities[common], probabilities[~common].sum()) * draws
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue > 1e-3
    flat = dict(zip(output, scores.reshape(-1), strict=True))
    for sequence, score in flat.items():
        np.testing.assert_allclose(score, np.log(expected[sequence]), rtol=1e-4, atol=1e-5)


def test_a_sample_depends_only_on_its_example():
    """Not on the batch, the row, or the number of decodes."""
    made = Languages.random(8, 6, 5, 4)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(1), jnp.arange(6))
    sample = functools.partial(Languages.decode, decode_fn=temperature_sample, topk=0, rescale_log_probs=False)
    tokens, scores = sample(made, decode_rng=keys)
    assert len({tuple(row) for row in tokens[:, 0].tolist()}) > 3
    order = np.array([4, 1, 5])
    others, other_scores = sample(Languages(made.table[order], 4), decode_rng=keys[order])
    np.testing.assert_array_equal(others, tokens[order])
    np.testing.assert_array_equal(other_scores, scores[order])
    more, _ = sample(made, decode_rng=keys, num_decodes=7)
    for row in range(6):
        assert tokens[row, 0].tolist() in more[row].tolist()
        assert len({tuple(one) for one in more[row].tolist()}) > 1
    twins, _ = sample(Languages(np.repeat(made.table[:1], 6, 0), 4), decode_rng=keys)
    assert len({tuple(row) for row in twins[:, 0].tolist()}) > 1, "equal examples must have different samples"


def test_a_sample_depends_on_its_positions_not_on_where_decoding_starts():
    """Prompts that fill the cache, forced prompts and a longer buffer give the same tokens."""
    batch, vocab, length = 40, 4, 6
    made = Languages.random(14, batch, vocab, length)
    ends = np.arange(batch, dtype=np.int32) % 4
    inputs = np.where(np.arange(length) <= ends[:, None], 2, 0)
    inputs[:, 0] = 0
    node = np.zeros(batch, np.int32)  # before the last token of each prompt, which the first step feeds
    for position in range(1, 4):
        node = np.where(position < ends, node * vocab + inputs[:, position] + 1, node)

    def filled(*, cache, **options):
        cache = {**cache, "node": jnp.asarray(node)}
        return temperature_sample(cache=cache, initial_index=jnp.asarray(ends), **options)

    options = {"topk": 0, "decode_rng": jax.random.key(4), "rescale_log_probs": False}
    forced, scores = made.decode(temperature_sample, inputs=jnp.asarray(inputs), **options)
    tokens, filled_scores = made.decode(filled, inputs=jnp.asarray(inputs), **options)
    np.testing.assert_array_equal(tokens, forced)
    np.testing.assert_allclose(filled_scores, scores, rtol=1e-5)
    longer, _ = made.decode(temperature_sample, inputs=jnp.asarray(np.pad(inputs, ((0, 0), (0, 3)))), **options)
    np.testing.assert_array_equal(longer[..., :length], forced)


@pytest.mark.parametrize("one", [jax.random.key(1), jax.random.PRNGKey(1), None], ids=["new", "old", "none"])
def test_one_key_becomes_a_key_for_each_example(one):
    of = jax.random.key(0) if one is None else jax.random.key(1)
    expected = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(of, jnp.array([4, 2, 9])))
    keys = example_keys(one, jnp.array([4, 2, 9]))
    np.testing.assert_array_equal(jax.random.key_data(keys), expected)
    np.testing.assert_array_equal(jax.random.key_data(example_keys(keys, jnp.arange(3))), expected)


def test_the_default_and_temperature_zero_are_greedy():
    made = Languages.random(9, 200, 5, 4)
    greedy, scores = made.greedy()
    tokens, log_probs = made.decode(greedy_decode)
    np.testing.assert_array_equal(tokens[:, 0], greedy)
    np.testing.assert_allclose(log_probs[:, 0], scores, rtol=1e-5)
    key, whole = jax.random.key(0), np.int32(0)
    traced = [(whole, 0.0), (whole, 1e-4), (np.int32(1), 1.0)]
    for options in ({}, *({"topk": topk, "temperature": temperature} for topk, temperature in traced)):
        tokens, log_probs = made.decode(temperature_sample, decode_rng=key, **options)
        np.testing.assert_array_equal(tokens[:, 0], greedy)
        np.testing.assert_array_equal(log_probs, np.zeros_like(log_probs))
    _, log_probs = made.decode(temperature_sample, decode_rng=key, rescale_log_probs=False)
    np.testing.assert_allclose(log_probs[:, 0], scores, rtol=1e-5)


def test_options_per_example():
    made = Languages.random(10, 90, 5, 4)
    keys = jax.random.split(jax.random.key(2), 90)
    temperature = np.tile(np.float32([0.0, 0.7, 2.0]), 30)
    topk = np.tile(np.int32([0, 2, 3]), 30)
    topp = np.tile(np.float32([0.0, 0.0, 0.8]), 30)
    mixed, scores = made.decode(
        temperature_sample, decode_rng=keys, temperature=temperature, topk=topk, topp=topp, num_decodes=2
    )
    for kind in range(3):
        options = {"temperature": temperature[kind], "topk": topk[kind], "topp": topp[kind]}
        alone, alone_scores = made.decode(temperature_sample, decode_rng=keys, num_decodes=2, **options)
        np.testing.assert_array_equal(mixed[kind::3], alone[kind::3])
        np.testing.assert_allclose(scores[kind::3], alone_scores[kind::3], rtol=1e-6)
    assert (np.diff(scores, axis=1) >= 0).all()


def test_prompts_and_limits():
    length = 6
    made = Languages.random(11, 40, 4, length)
    prompts = np.zeros((40, length), np.int32)
    prompts[:20, 1:4] = [2, EOS, 3]
    options = {"inputs": jnp.asarray(prompts), "topk": 0, "decode_rng": jax.random.key(0)}
    tokens, scores = made.decode(temperature_sample, rescale_log_probs=False, **options)
    tokens = tokens[:, 0]
    assert (tokens[:20, :3] == [2, EOS, 3]).all()
    log_probs = made.log_probs()
    for row in range(40):
        total, node = 0.0, 0
        for position, token in enumerate(tokens[row]):
            forced = row < 20 and position < 3
            total += 0.0 if forced else log_probs[row, node, token]
            node = node * 4 + token + 1
            if token == EOS and not forced:
                break
        np.testing.assert_allclose(scores[row, 0], total, rtol=1e-4)
        assert (tokens[row, position + 1 :] == 0).all()
    until = np.where(np.arange(40) < 20, 3, 0)
    for steps, hard in ((np.int32(2), None), (np.full(40, 4, np.int32), 2), (100, 2)):
        short, _ = made.decode(temperature_sample, max_decode_steps=steps, max_decode_steps_hard_limit=hard, **options)
        np.testing.assert_array_equal(short[:, 0], np.where(np.arange(length) < until[:, None] + 2, tokens, 0))


@pytest.mark.parametrize("options", [{"topk": 2, "temperature": 0.5}, {"topk": 0, "topp": 0.7}])
@pytest.mark.slow
def test_results_are_the_same_without_compilation(options):
    made = Languages.random(13, 4, 4, 3)
    compiled = made.decode(temperature_sample, num_decodes=2, **options)
    with jax.disable_jit():
        tokens, scores = made.decode(temperature_sample, num_decodes=2, **options)
    np.testing.assert_array_equal(compiled[0], tokens)
    np.testing.assert_allclose(compiled[1], scores, rtol=1e-5)


def test_callbacks():
    made = Languages.random(12, 8, 4, 4)

    def no_end(logits, state):
        assert state.sequences.shape == (8, 6) and state.log_prob.shape == (8,)
        return logits.at[:, EOS].set(-1e7)

    def end_after_two(state):
        return state.replace(ended=state.ended | (state.step >= 2))

    tokens, _ = made.decode(temperature_sample, topk=0, logit_callback_fn=no_end, state_callback_fn=end_after_two)
    assert not (tokens == EOS).any() and (tokens[:, 0, 2:] == 0).all()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"topk": 4, "topp": 0.9}, "topk=4.*topp=0.9.*topk=0"),
        ({"max_decode_steps": 9}, "max_decode_steps.* 9.* 3"),
        ({"decode_rng": jax.random.split(jax.random.key(0), 5)}, "decode_rng.* 5 .* 2 "),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(UserError, match=message):
        temperature_sample(
            **Languages.random(0, 2, 3, 3).problem(),
            tokens_to_logits=lambda state: (jnp.zeros((2, 3)), state.cache),
            **options,
        )


def test_a_callback_may_write_tokens():
    """As in T5X, `sequences` has room for a token after the last one, and an EOS that is written ends the row."""

    def end_after_three(state):
        at = jnp.arange(state.sequences.shape[1]) == state.cur_index[:, None] + 1
        last = jnp.take_along_axis(state.sequences, state.cur_index[:, None], axis=1)
        return state.replace(sequences=jnp.where(at & (last == 3), 1, state.sequences))

    inputs = np.array([[0, 5, 6, 7, 0], [0, 8, 9, 0, 0]], np.int32)
    logits = jnp.array([[-1e7, -1e7, -1e7, 0.0]] * 2)
    run = lambda inputs: temperature_sample(
        inputs, {}, lambda state: (logits, {}), 1, state_callback_fn=end_after_three
    )
    tokens, _ = jax.jit(run)(inputs)
    np.testing.assert_array_equal(tokens[:, 0], [[5, 6, 7, 3, 1], [8, 9, 3, 1, 0]])


def test_steps_count_from_the_end_of_the_prompt():
    """`initial_index` may be before the end of the prompt, whose other tokens are then forced."""
    inputs = np.array([[0, 2, 0, 0, 0, 0, 0, 0], [0, 2, 2, 2, 0, 0, 0, 0]], np.int32)
    logits = jnp.array([[-1e7, -1e7, -1e7, 0.0]] * 2)
    index = jnp.array([1, 0])
    run = lambda inputs: temperature_sample(
        inputs, {}, lambda state: (logits, {}), 1, initial_index=index, max_decode_steps=4
    )
    tokens, _ = jax.jit(run)(inputs)
    np.testing.assert_array_equal(tokens[:, 0], [[2, 3, 3, 3, 3, 0, 0, 0], [2, 2, 2, 3, 3, 3, 3, 0]])


def test_masks_equal_their_definitions_and_keep_ties():
    rng = np.random.default_rng(0)
    logits = np.round(rng.normal(size=(500, 40)) * 2, 1).astype(np.float32)
    logits[:100] = rng.normal(size=(100, 40)) * 10
    ordered = -np.sort(-logits, axis=1)
    for k in (1, 2, 7, 40, 99):
        kept = np.asarray(topk_mask(logits, k)) == logits
        np.testing.assert_array_equal(kept, logits >= ordered[:, min(k, 40) - 1 : min(k, 40)])
    probabilities = np.exp(ordered.astype(np.float64))
    reached = np.cumsum(probabilities, axis=1) / probabilities.sum(1, keepdims=True)
    for p in (0.1, 0.5, 0.93):
        last = np.argmax(reached >= p, axis=1)
        clear = np.abs(reached - p).min(axis=1) > 1e-5
        kept = np.asarray(topp_mask(logits, p)) == logits
        np.testing.assert_array_equal(kept[clear], (logits >= ordered[np.arange(500), last][:, None])[clear])
    assert (np.asarray(topp_mask(logits, 1.5)) == logits).all()
