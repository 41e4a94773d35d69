"""Beam search against exhaustive search and against its definition, on hundreds of small languages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.decoding import NEG_INF, beam_search
from tests.decoding import languages
from tests.decoding.languages import EOS, Languages
from tests.support.marks import mark_slow


def padded(tokens, length):
    return list(tokens) + [0] * (length - len(tokens))


@functools.cache
def beam_search_of_the_table():
    """Beam search over the unnormalized table, so that sums and ties are exact."""

    def search(*, tokens_to_logits, **options):
        table = tokens_to_logits.inputs["table"]
        return beam_search(
            tokens_to_logits=tokens_to_logits,
            logit_callback_fn=functools.partial(languages.raw, table=table),
            **options,
        )

    return search


@pytest.mark.parametrize(
    "ties, alpha",
    mark_slow(
        {f"{kind}-{alpha}": (kind == "ties", alpha) for kind in ("random", "ties") for alpha in (0.0, 0.6, 2.0, -0.7)},
        slow=["random-0.0", "random-0.6", "random--0.7", "ties-0.0", "ties-0.6", "ties-2.0"],
    ),
)
def test_a_wide_beam_finds_what_exhaustive_search_finds(alpha, ties):
    batch, vocab, length, beams = 500, 4, 4, 54  # 2 * 54 = 108 candidates in the last step: none is dropped
    made = (Languages.with_ties if ties else Languages.random)(0, batch, vocab, length)
    log_probs = made.table.astype(np.float64) if ties else made.log_probs()
    search = beam_search_of_the_table() if ties else beam_search
    tokens, scores = made.decode(search, num_decodes=beams, alpha=alpha)
    for row in range(batch):
        every = [
            (totals[-1] / ((5 + len(output)) / 6) ** alpha, output)
            for output, totals in languages.all_sequences(log_probs[row], length)
        ]
        best = [(NEG_INF, [])] * (beams - len(every)) + sorted(every)
        np.testing.assert_allclose(scores[row], [score for score, _ in best], rtol=1e-5)
        expected = [(round(score, 4), padded(output, length)) for score, output in best]
        found = [(round(score, 4), output) for (score, _), output in zip(best, tokens[row].tolist(), strict=True)]
        assert (sorted(found) if ties else found) == (sorted(expected) if ties else expected)


@pytest.mark.parametrize(
    "ties, beams",
    mark_slow(
        {f"{kind}-{beams}": (kind == "ties", beams) for kind in ("random", "ties") for beams in (1, 2, 5)},
        slow=["random-1", "random-2", "ties-1", "ties-5"],
    ),
)
def test_stopping_early_never_changes_the_result(beams, ties):
    """Compare with a search that always runs to the last position; some examples never end.

    Ties are in T5X's order, which depends on the step at which T5X stops.
    """
    batch, vocab, length = 500, 3, 6
    made = (Languages.with_ties if ties else Languages.random)(1, batch, vocab, length)
    table = made.table.copy()
    table[: batch // 4, :, EOS] -= 8.0  # EOS is rare, and never a candidate in some examples
    made = Languages(table, length)
    log_probs = table.astype(np.float64) if ties else made.log_probs()
    steps = []
    for alpha in (0.0, 0.6, -1.0)[: 2 if ties else 3]:  # T5X stops too early if alpha is negative
        search = beam_search_of_the_table() if ties else beam_search
        tokens, scores = made.decode(search, num_decodes=beams, alpha=alpha)
        for row in range(batch):
            expected = languages.search(log_probs[row], beams, length, alpha, stop_early=ties)
            missing = beams - len(expected)
            expected = [(NEG_INF, [])] * missing + expected
            assert tokens[row].tolist() == [padded(output, length) for _, output in expected], (alpha, row)
            np.testing.assert_allclose(scores[row], [score for score, _ in expected], rtol=1e-5)
        steps.append(int((np.asarray(tokens)[:, -1] != 0).sum()))
    assert len(set(steps)) > 1, "alpha changes nothing here"


def test_the_loop_ends_when_every_example_has_ended():
    table = np.zeros((2, 40, 3), np.float32)
    table[..., EOS] = 50.0
    made = Languages(table, 30)
    counted = []

    def search(*, tokens_to_logits, **options):
        def counting(state):
            jax.debug.callback(lambda: counted.append(1))
            return tokens_to_logits(state)

        return beam_search(tokens_to_logits=counting, **options)

    tokens, _ = made.decode(search, num_decodes=1)
    jax.effects_barrier()
    assert tokens[:, 0, 0].tolist() == [EOS, EOS] and len(counted) == 1


@pytest.mark.slow
def test_prompts_are_forced_and_not_scored():
    batch, vocab, length = 300, 3, 6
    made = Languages.random(2, batch, vocab, length)
    rng = np.random.default_rng(0)
    prompts = np.zeros((batch, length), np.int32)
    for row in range(batch):
        size = rng.integers(0, 4)
        prompts[row, 1 : 1 + size] = rng.integers(1, vocab, size)  # an EOS in the prompt does not end the row
    tokens, scores = made.decode(beam_search, num_decodes=3, alpha=0.6, inputs=jnp.asarray(prompts))
    limited, _ = made.decode(beam_search, num_decodes=3, alpha=0.6, inputs=jnp.asarray(prompts), max_decode_step=2)
    log_probs = made.log_probs()
    for row in range(batch):
        prompt = [token for token in prompts[row].tolist() if token]
        expected = languages.search(log_probs[row], 3, length, 0.6, prompt)[-1]
        assert tokens[row, -1].tolist() == padded(expected[1], length)
        np.testing.assert_allclose(scores[row, -1], expected[0], rtol=1e-5)
        expected = languages.search(log_probs[row], 3, min(length, len(prompt) + 2), 0.6, prompt)[-1]
        assert limited[row, -1].tolist() == padded(expected[1], length)


def test_a_cache_filled_with_the_prompts_gives_the_same_result():
    """Every row continues from its own position."""
    batch, vocab, length = 300, 3, 6  # as above: the same program
    made = Languages.random(3, batch, vocab, length)
    rng = np.random.default_rng(0)
    ends = rng.integers(0, 5, batch).astype(np.int32)
    prompts = np.where(np.arange(length) <= ends[:, None], rng.integers(1, vocab, (batch, length)), 0).astype(np.int32)
    prompts[:, 0] = 0
    node = np.zeros(batch, np.int64)
    for row in range(batch):
        for token in prompts[row, 1 : ends[row]]:  # the first step feeds the last prompt token
            node[row] = node[row] * vocab + token + 1

    def filled(*, inputs, cache, **options):
        cache = {**cache, "node": jnp.asarray(node, jnp.int32)}
        return beam_search(inputs=inputs, cache=cache, initial_index=jnp.asarray(ends), **options)

    options = {"inputs": jnp.asarray(prompts), "num_decodes": 3, "alpha": 0.6}
    for ours, theirs in zip(made.decode(filled, **options), made.decode(beam_search, **options), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_one_beam_with_early_stopping_is_greedy_decoding():
    made = Languages.random(4, 500, 5, 5)
    output, scores = made.greedy()
    tokens, normalised = made.decode(beam_search, num_decodes=1, length_penalty=1.0, early_stopping=True)
    np.testing.assert_array_equal(tokens[:, 0], output)
    lengths = np.where((output == EOS).any(1), np.argmax(output == EOS, axis=1) + 1, 5)
    np.testing.assert_allclose(normalised[:, 0], scores / lengths, rtol=1e-5)


def test_one_beam_of_t5x_differs_from_greedy_decoding_when_eos_comes_second():
    """It takes the best-scored ending among the top two tokens of every step on the greedy path."""
    length = 5
    table = Languages.random(8, 600, 5, length).table.copy()
    table[:200, :, EOS] -= 9.0  # never ends
    table[200:400, :, EOS] *= 20.0  # EOS is certain or impossible
    made = Languages(table, length)
    greedy, log_prob = made.greedy()
    tokens, scores = made.decode(beam_search, num_decodes=1, alpha=0.6)
    log_probs = made.log_probs()
    for row in range(600):
        total, node, output, found = 0.0, 0, [], []
        for position in range(1, length + 1):
            first, second = np.argsort(-log_probs[row, node])[:2]
            if EOS in (first, second):
                score = (total + log_probs[row, node, EOS]) / ((5 + position) / 6) ** 0.6
                found.append((score, [*output, EOS]))
            token = second if first == EOS else first
            total, node = total + log_probs[row, node, token], node * 5 + token + 1
            output.append(token)
        score, expected = max(found, default=(total, output))
        assert tokens[row, 0].tolist() == padded(expected, length)
        np.testing.assert_allclose(scores[row, 0], score, rtol=1e-4, atol=1e-6)
    same = (tokens[:, 0] == greedy).all(axis=1)
    assert same[:200].all() and (tokens[:200, 0, -1] != 0).any()
    np.testing.assert_allclose(scores[:200, 0], log_prob[:200], rtol=1e-5)  # unfinished sequences have no penalty
    assert same[200:400].mean() > 0.9 and same[400:].mean() < 0.8


def test_unlikely_beams_are_dropped():
    made = Languages.random(5, 400, 4, 5)
    searched = [languages.search(log_probs, 4, 5, 0.0) for log_probs in made.log_probs()]
    scores = np.array([[score for score, _ in [(NEG_INF, [])] * (4 - len(found)) + found] for found in searched])
    tokens, kept = made.decode(beam_search, num_decodes=4, alpha=0.0, min_log_prob=-2.5)
    some = (scores > -2.5).any(axis=1)  # no sequence ends in the other rows, which return live beams
    assert some.any() and not some.all()
    np.testing.assert_allclose(kept[some], np.where(scores > -2.5, scores, NEG_INF)[some], rtol=1e-5)
    assert (tokens[kept == NEG_INF] == 0).all() and (kept[~some] > -2.5).any()


def test_a_beam_exactly_at_the_minimum_is_dropped():
    log_probs = jnp.array([[-1.0, -2.0, -8.0]] * 2)  # EOS has -2

    @jax.jit
    def search(min_log_prob):
        return beam_search(
            jnp.zeros((1, 1), jnp.int32), {}, lambda state: (log_probs, {}), EOS, num_decodes=2, alpha=0.0,
            logit_callback_fn=lambda _, state: log_probs, min_log_prob=min_log_prob,
        )  # fmt: skip

    tokens, scores = search(-2.25)
    assert tokens[0, -1].tolist() == [EOS] and scores[0].tolist() == [NEG_INF, -2.0]
    tokens, scores = search(-2.0)
    assert tokens[0, -1].tolist() == [0] and scores[0].tolist() == [NEG_INF, -1.0]


def test_a_length_penalty_counts_generated_tokens_only():
    vocab, length, prompt = 3, 6, [2, 2]
    made = Languages.random(15, 60, vocab, length)
    inputs = jnp.tile(jnp.array([0, *prompt, 0, 0, 0], jnp.int32), (60, 1))
    tokens, scores = made.decode(beam_search, num_decodes=3, length_penalty=1.5, inputs=inputs)
    log_probs, lengths = made.log_probs(), set()
    for row in range(60):
        output = tokens[row, -1].tolist()
        output = output[: output.index(EOS) + 1] if EOS in output else output
        node, total = 0, 0.0
        for position, token in enumerate(output):
            total += log_probs[row, node, token] if position >= len(prompt) else 0.0
            node = node * vocab + token + 1
        generated = len(output) - len(prompt)
        np.testing.assert_allclose(scores[row, -1], total / generated**1.5, rtol=1e-5)
        lengths.add(generated)
    assert len(lengths) > 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"max_decode_len": 9}, "max_decode_len.*9.* 3"),
        ({"num_decodes": 0}, "num_decodes.*0.*at least 1"),
        ({"early_stopping": True}, "length_penalty"),
        ({"early_stopping": "soon", "length_penalty": 1.0}, "'soon'.*never"),
    ],
)
def test_invalid_options_are_rejected(options, message):
    with pytest.raises(UserError, match=message):
        Languages.random(0, 1, 3, 3).decode(beam_search, **options)


def test_a_shorter_output():
    made = Languages.random(6, 50, 3, 5)
    tokens, scores = made.decode(beam_search, num_decodes=1, alpha=0.6, max_decode_len=3)
    expected = [languages.search(log_probs, 1, 3, 0.6)[-1] for log_probs in made.log_probs()]
    assert tokens[:, 0].tolist() == [padded(output, 3) for _, output in expected]
    np.testing.assert_allclose(scores[:, 0], [score for score, _ in expected], rtol=1e-5)
