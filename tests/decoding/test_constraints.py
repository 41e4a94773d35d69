"""Every constraint by its definition, in every decoding function."""

import functools
import itertools

import jax
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.data import ByteVocabulary
from t5x.decoding import NEG_INF, DecodingState, beam_search, constraints, greedy_decode, temperature_sample
from tests.decoding import languages
from tests.decoding.languages import EOS, Languages
from tests.support.marks import mark_slow

DECODERS = {
    "greedy": (greedy_decode, {}),
    "beam": (beam_search, {"num_decodes": 3}),
    "Hugging Face beam": (beam_search, {"num_decodes": 3, "length_penalty": 1.0}),
    "sample": (temperature_sample, {"num_decodes": 3, "topk": 0}),
}
decoders = pytest.mark.parametrize("decode_fn, options", DECODERS.values(), ids=DECODERS)


@decoders
def test_constraints_hold(decode_fn, options):
    length = 7
    made = Languages.random(0, 300, 4, length)
    free, _ = made.greedy()
    bound = constraints.chain(
        [constraints.no_repeat_ngrams(2), constraints.min_length(4), constraints.forced_tokens([2, 3, 2])]
    )
    tokens, scores = made.decode(decode_fn, logit_callback_fn=bound, **options)
    tokens = tokens[scores > NEG_INF]
    assert len(tokens) > 250 and (tokens[:, :3] == [2, 3, 2]).all() and not (tokens[:, :4] == EOS).any()
    assert not repeats(tokens).any()
    assert repeats(free).any() and (free[:, :4] == EOS).any(), "unconstrained output already satisfies the constraints"


def repeats(tokens):
    """Return whether a bigram occurs twice in each sequence, including the start token."""
    found = []
    for sequence in tokens.tolist():
        sequence = [0, *sequence[: sequence.index(EOS) + 1 if EOS in sequence else None]]
        pairs = list(itertools.pairwise(sequence))
        found.append(len(pairs) != len(set(pairs)))
    return np.array(found)


def test_only_ngrams_of_the_given_size_are_not_repeated():
    made = Languages.random(8, 100, 3, 7)
    made.table[:, :, EOS] -= 4.0
    tokens, _ = made.decode(greedy_decode, logit_callback_fn=constraints.no_repeat_ngrams(3))
    forbidden = repeated_pairs = 0
    for row in range(100):
        node, sequence = 0, [0]
        for token in tokens[row, 0].tolist():
            seen = set(zip(sequence, sequence[1:], sequence[2:], strict=False))
            allowed = [t for t in range(3) if (*sequence[-2:], t) not in seen]
            assert token == max(allowed, key=made.table[row, node].__getitem__)
            forbidden += token != np.argmax(made.table[row, node])
            node = node * 3 + token + 1
            sequence.append(token)
            if token == EOS:
                break
        pairs = list(itertools.pairwise(sequence))
        repeated_pairs += len(pairs) != len(set(pairs))
    assert forbidden and repeated_pairs


def test_constraints_count_from_the_end_of_each_prompt():
    made = Languages.random(9, 60, 4, 6)
    made.table[:, :, EOS] += 3.0
    sizes = np.arange(60) % 3
    inputs = np.where(np.arange(6) <= sizes[:, None], 2, 0)
    inputs[:, 0] = 0
    bound = constraints.chain([constraints.min_length(3), constraints.forced_tokens([3, 0])])
    tokens, _ = made.decode(greedy_decode, inputs=inputs, logit_callback_fn=bound)
    chosen, _ = made.decode(greedy_decode, inputs=inputs, logit_callback_fn=constraints.choices([[3, 0]]))
    for row, size in enumerate(sizes):
        output = tokens[row, 0, size:].tolist()
        assert output[:2] == [3, 0] and output[2] != EOS
        assert chosen[row, 0, size : size + 3].tolist() == [3, 0, EOS]


def test_repetition_penalty_by_its_definition():
    made = Languages.random(1, 200, 4, 5)
    tokens, _ = made.decode(greedy_decode, logit_callback_fn=constraints.repetition_penalty(3.0))
    changed = 0
    for row in range(200):
        node, seen = 0, {0}
        for token in tokens[row, 0]:
            logits = made.table[row, node].astype(np.float64)
            now = [x if t not in seen else x / 3 if x > 0 else x * 3 for t, x in enumerate(logits)]
            assert token == np.argmax(now)
            changed += np.argmax(logits) != np.argmax(now)
            if token == EOS:
                break
            seen.add(int(token))
            node = node * 4 + token + 1
    assert changed


CHOICES = [[2, 3], [2], [3, 3, 0, 2], [0], [3, 2, 2], [2, 0, 3], [2, 3]]


# Others in test_models.py and inference: a single choice greedily, the most likely ones with beams.
@pytest.mark.parametrize("decode_fn, options", mark_slow(DECODERS, slow=["greedy", "beam", "sample"]))
def test_only_choices_are_generated(decode_fn, options):
    made = Languages.random(2, 400, 4, 6)
    tokens, scores = made.decode(decode_fn, logit_callback_fn=constraints.choices(CHOICES), **options)
    allowed = {(*choice, EOS, *[0] * (5 - len(choice))) for choice in CHOICES}
    output = {tuple(one) for one in tokens.reshape(-1, 6).tolist()}
    assert output <= allowed and len(output) > 3 and (scores > NEG_INF).all()


def test_beam_search_finds_the_most_likely_choices():
    """Scores are the network's, not renormalized over the allowed tokens."""
    made = Languages.random(3, 300, 4, 6)
    log_probs = made.log_probs()
    tokens, scores = made.decode(beam_search, num_decodes=6, alpha=0.0, logit_callback_fn=constraints.choices(CHOICES))
    for row in range(300):
        expected = {}
        for choice in {tuple(choice) for choice in CHOICES}:
            node, total = 0, 0.0
            for token in (*choice, EOS):
                total += log_probs[row, node, token]
                node = node * 4 + token + 1
            expected[(*choice, EOS, *[0] * (5 - len(choice)))] = total
        best = sorted(expected, key=expected.get)
        assert [tuple(one) for one in tokens[row].tolist()] == best
        np.testing.assert_allclose(scores[row], [expected[one] for one in best], rtol=1e-5)


@pytest.mark.slow
def test_many_text_choices():
    vocabulary = ByteVocabulary()
    rng = np.random.default_rng(0)
    texts = sorted({"".join(rng.choice(list("abcdef"), rng.integers(1, 6))) for _ in range(2000)})
    made = Languages(rng.normal(size=(50, 1, vocabulary.vocab_size)).astype(np.float32), 7)
    options = {"topk": 0, "num_decodes": 20, "decode_rng": jax.random.key(0)}
    only = constraints.text_choices(texts, vocabulary)
    tokens, _ = made.decode(temperature_sample, logit_callback_fn=only, **options)
    output = {vocabulary.decode(one) for one in tokens.reshape(-1, 7).tolist()}
    assert output <= set(texts) and len(output) > 300


def test_a_single_choice_is_always_generated():
    made = Languages.random(5, 20, 4, 6)
    only = constraints.choices([[3, 2, 0]])
    for decode_fn in (greedy_decode, beam_search):
        tokens, _ = made.decode(decode_fn, num_decodes=1, logit_callback_fn=only)
        assert (tokens == [3, 2, 0, EOS, 0, 0]).all()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: constraints.choices([]), "choices.*at least one"),
        (lambda: constraints.choices([[]]), "choices.*at least one"),
        (lambda: constraints.choices([[2, 9]]), "choices.* 9.* 3"),
        (lambda: constraints.choices([[2] * 6]), "choice has 6 .* 6"),
        (lambda: constraints.forced_tokens([-1]), "forced_tokens.* -1"),
        (lambda: constraints.forced_tokens([]), r"forced_tokens.*\[\]"),
        (lambda: constraints.repetition_penalty(0.0), "repetition_penalty is 0.0"),
        (lambda: constraints.no_repeat_ngrams(0), "no_repeat_ngrams.*at least 1"),
    ],
)
def test_invalid_constraints_are_rejected(make, message):
    made = Languages.random(0, 2, 4, 6)
    with pytest.raises(UserError, match=message):
        greedy_decode(
            **made.problem(),
            tokens_to_logits=functools.partial(made.tokens_to_logits, made.table),
            logit_callback_fn=make(),
        )


def test_beams_without_a_choice_are_empty():
    made = Languages.random(6, 30, 4, 4)
    tokens, scores = made.decode(beam_search, num_decodes=5, logit_callback_fn=constraints.choices([[2], [3, 3]]))
    assert (tokens[:, :3] == 0).all() and (scores[:, :3] == NEG_INF).all() and (scores[:, 3:] > NEG_INF).all()
    assert languages.EOS in tokens[:, 3:]


def test_state_without_prompt_end_counts_from_the_start():
    """T5X's decode functions create states without `prompt_end`."""
    state = DecodingState(np.array([1]), np.zeros((1, 4), np.int32), np.zeros((1, 1), np.int32), None, eos_id=EOS)
    logits = np.zeros((1, 5), np.float32)
    assert constraints.forced_tokens([3, 2])(logits, state).argmax() == 2
    assert constraints.min_length(2)(logits, state)[0, EOS] == NEG_INF
    assert constraints.min_length(1)(logits, state)[0, EOS] == 0  # one token is generated: that is enough
    assert constraints.choices([[0, 4]])(logits, state).argmax() == 4
