import collections
import functools
import logging
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from t5x import data
from t5x._runtime.errors import UserError
from t5x.data import preprocessors
from t5x.data.pipeline import ConcatenateAndSplit, generator
from t5x.data.preprocessors import UL2_DENOISERS, Denoiser, denoising, random_spans_helper, span_corruption

SIZE = 1000
densities = st.floats(0.01, 0.95)
spans = st.floats(1.0, 80.0)
seeds = st.integers(0, 2**63 - 1)


def features(size=SIZE, extra_ids=100, **others):
    vocabulary = data.PassThroughVocabulary(size, eos_id=1)
    vocabulary.extra_ids = extra_ids
    return {"inputs": data.Feature(vocabulary), "targets": data.Feature(others.get("targets", vocabulary))}


def lengths(inputs=512, targets=114):
    return {"inputs": inputs, "targets": targets}


def text(length):
    """Distinct tokens below all sentinels, so that it shows where each one went."""
    return np.arange(length, dtype=np.int32)


def joined(inputs, targets, first_sentinel):
    """The text of which span corruption made inputs and targets, and the parts of targets that the inputs lack."""
    parts = {}
    for token in targets:
        if token >= first_sentinel:
            part = parts[token] = []
        else:
            part.append(token)
    return [t for token in inputs for t in (parts.pop(token) if token >= first_sentinel else [token])], parts


@given(st.integers(0, 700), densities, spans, seeds)
def test_inputs_and_targets_give_the_text_back(length, density, span, seed):
    mask = denoising.random_spans_noise_mask(length, generator(seed), density, span)
    made = denoising.corrupt(text(length), mask, 10**6)
    tokens, rest = joined(made["inputs"], made["targets"], 1000)
    assert tokens == list(range(length))
    # A single token is kept, and the place of its missing noise is marked all the same.
    assert rest == ({10**6: []} if length == 1 else {})


@given(st.integers(2, 3000), densities, spans, seeds)
def test_every_mask_has_the_numbers_it_should(length, density, span, seed):
    noise, runs = denoising.noise_counts(length, density, span)
    assert noise == min(max(round(length * density), 1), length - 1)
    assert 1 <= runs <= min(noise, length - noise)
    mask = denoising.random_spans_noise_mask(length, generator(seed), density, span)
    assert mask.shape == (length,)
    assert mask.sum() == noise
    assert np.sum(mask[1:] & ~mask[:-1]) == runs
    assert mask[-1] and not mask[0]


@given(st.integers(0, 200), densities, seeds)
def test_any_mask_leaves_every_token_once_and_in_order(length, density, seed):
    mask = denoising.iid_noise_mask(length, generator(seed), density)
    made = denoising.corrupt(text(length), mask, 10**6)
    for feature, expected in (("inputs", ~mask), ("targets", mask)):
        tokens = made[feature]
        assert tokens[tokens < length].tolist() == np.flatnonzero(expected).tolist()
        sentinels = tokens[tokens >= length]
        assert sentinels.tolist() == list(range(10**6, 10**6 - len(sentinels), -1))
        assert not np.any((tokens[1:] >= length) & (tokens[:-1] >= length))


def test_known_corruption():
    mask = np.array([0, 0, 1, 1, 0, 1], bool)
    made = denoising.corrupt(np.array([10, 11, 12, 13, 14, 15]), mask, 99, "encoder")
    assert {key: value.tolist() for key, value in made.items()} == {
        "encoder": [10, 11, 99, 14, 98],
        "targets": [99, 12, 13, 98, 15],
    }


def test_t5s_own_lengths():
    assert random_spans_helper(512, noise_density=0.15, mean_noise_span_length=3.0) == (568, 114)
    assert random_spans_helper(1024, noise_density=0.15, mean_noise_span_length=3.0) == (1137, 229)


@given(st.integers(4, 2000), densities, spans)
def test_a_piece_fills_the_inputs_and_no_greater_one_fits(inputs_length, density, span):
    assume(density != 0.5)
    length, targets_length = random_spans_helper(inputs_length, density, span)
    assert denoising.denoised_lengths(length, density, span)[0] <= inputs_length
    assert denoising.denoised_lengths(length, density, span)[1] == targets_length
    assert denoising.denoised_lengths(length + 1, density, span)[0] > inputs_length


def seed_of(step, seed):
    return {"draw_seed": lambda: seed} if step is preprocessors.select_random_chunk else {"seed": seed}


def run(steps, documents, seed=0):
    """What the pipeline does with the steps, in small."""
    examples = [{"targets": np.asarray(document, np.int32), "url": "x"} for document in documents]
    for step in steps:
        if isinstance(step, ConcatenateAndSplit):
            tokens = np.concatenate([example[step.feature] for example in examples])
            examples = [{step.feature: tokens[at : at + step.length]} for at in range(0, len(tokens), step.length)]
            continue
        if getattr(step, "func", step) is denoising.split_tokens:
            made = [step(example) for example in examples]
        else:
            made = [step(example, **seed_of(step, seed + at)) for at, example in enumerate(examples)]
        examples = [one for some in made if some for one in (some if isinstance(some, list) else [some])]
    return examples


@pytest.mark.parametrize("seed", range(20))
def test_span_corruption_fills_t5s_lengths_exactly(seed):
    made = run(span_corruption(lengths(), features()), [text(300)] * 20, seed)
    assert [len(one["inputs"]) for one in made[:-1]] == [511] * 10
    assert [len(one["targets"]) for one in made[:-1]] == [113] * 10
    assert {*made[0]} == {"inputs", "targets"}
    assert made[0]["inputs"].dtype == np.int32


def test_sentinels_are_the_last_ids_in_descending_order():
    (made,) = run(span_corruption(lengths(), features()), [text(568)])
    for feature in ("inputs", "targets"):
        assert [token for token in made[feature] if token > 600] == list(range(SIZE - 1, SIZE - 29, -1))
    assert made["targets"][0] == SIZE - 1


def test_a_seed_makes_one_example_and_another_seed_another():
    steps = span_corruption(lengths(), features())
    first, again, other = (run(steps, [text(568)], seed)[0]["inputs"].tolist() for seed in (1, 1, 2))
    assert first == again != other


def test_examples_of_a_seed_stay_as_they_are():
    """Whoever continues a run after an update gets the same examples."""
    mask = denoising.random_spans_noise_mask(20, generator(12345), 0.3, 2.0)
    assert np.flatnonzero(mask).tolist() == [3, 4, 5, 14, 18, 19]
    assert np.flatnonzero(denoising.iid_noise_mask(20, generator(12345), 0.3)).tolist() == [3, 7, 9, 10, 12, 16, 18]
    assert [denoising.prefix_length(100, 0.5, generator(seed)) for seed in range(5)] == [23, 20, 50, 52, 58]


def test_documents_cut_alone():
    steps = span_corruption(lengths(), features(), merge_examples_to_reduce_padding=False)
    made = run(steps, [text(600), text(0), text(1)])
    assert [len(one["inputs"]) for one in made] == [511, 32 - 5 + 2, 1]
    assert made[-1]["targets"].tolist() == [SIZE - 1]


def test_room_for_packing():
    steps = span_corruption(lengths(), features(), reserved_for_packing=256)
    assert steps[1] == ConcatenateAndSplit(random_spans_helper(256, 0.15, 3.0)[0], "targets")


def test_a_long_document_gives_one_random_chunk():
    document = text(2 * 65536 + 10)
    made = [
        preprocessors.select_random_chunk({"targets": document, "url": "x"}, lambda s=seed: s) for seed in range(60)
    ]
    assert {key for one in made for key in one} == {"targets"}
    found = collections.Counter((int(one["targets"][0]), len(one["targets"])) for one in made)
    assert set(found) == {(0, 65536), (65536, 65536), (131072, 10)}
    assert min(found.values()) > 5


def test_span_lengths_have_the_distribution_of_random_segments():
    masks = [denoising.random_spans_noise_mask(568, generator(seed), 0.15, 3.0) for seed in range(1000)]
    edges = [np.flatnonzero(np.diff(mask, prepend=False, append=False)) for mask in masks]
    found = np.concatenate([one[1::2] - one[::2] for one in edges])
    assert found.mean() == 85 / 28
    expected = np.array([math.comb(84 - n, 26) / math.comb(84, 27) for n in range(1, 60)])
    counts = np.bincount(found, minlength=60)[1:60]
    mine, theory = (np.append(one[:11], one[11:].sum()) for one in (counts, expected * len(found)))
    # Chi-square with 11 degrees of freedom, somewhat less varied here, is above 35 once in 4,000 times.
    assert np.sum((mine - theory) ** 2 / theory) < 35
    first = np.array([one[0] for one in edges])
    assert abs(first.mean() - 483 / 28) < 5 * first.std() / np.sqrt(len(first))


def test_iid_noise_density():
    steps = preprocessors.iid_denoising(lengths(), features())
    assert steps[1] == ConcatenateAndSplit(511, "targets")
    made = run(steps, [text(511)] * 200, seed=3)
    masks = [denoising.iid_noise_mask(511, generator(seed), 0.15) for seed in range(200)]
    assert abs(np.mean(masks) - 0.15) < 5 * np.sqrt(0.15 * 0.85 / (511 * 200))
    assert (
        made[0]["inputs"].tolist()
        == denoising.corrupt(text(511), denoising.iid_noise_mask(511, generator(3), 0.15), SIZE - 1)["inputs"].tolist()
    )


@given(st.integers(1, 600), st.floats(0.01, 0.5), seeds)
def test_prefix_lm_parts_the_text_in_two(length, density, seed):
    made = run(preprocessors.prefix_lm(lengths(512, 512), features(), noise_density=density), [text(length)], seed)
    assert len(made) == -(-length // 511)
    assert np.concatenate([one[feature] for one in made for feature in ("inputs", "targets")]).tolist() == [
        *range(length)
    ]
    for one in made:
        whole = len(one["inputs"]) + len(one["targets"])
        assert len(one["targets"]) >= 1
        assert len(one["inputs"]) >= min(1, whole - 1)
        assert len(one["targets"]) <= 2 * density * whole + 2


def test_prefixes_are_as_likely():
    found = collections.Counter(denoising.prefix_length(11, 0.5, generator(seed)) for seed in range(4000))
    assert set(found) == set(range(1, 11))
    assert all(abs(count - 400) < 5 * 20 for count in found.values())


def letters():
    vocabulary = data.ByteVocabulary(extra_ids=200)
    return {"inputs": data.Feature(vocabulary), "targets": data.Feature(vocabulary)}


@pytest.mark.parametrize("given_lengths", [(512, 512), (512, 114), (64, 256)])
@pytest.mark.parametrize("merge", [True, False])
def test_ul2_examples_fit_and_lose_nothing(given_lengths, merge):
    steps = preprocessors.ul2(lengths(*given_lengths), letters(), merge_examples_to_reduce_padding=merge)
    documents = [np.random.default_rng(n).integers(3, 259, 3000) for n in range(20)]
    made = run(steps, documents)
    tokens = []
    for one in made:
        assert len(one["inputs"]) < given_lengths[0] and len(one["targets"]) < given_lengths[1]
        mode, inputs = data.ByteVocabulary().decode(one["inputs"][:5]), one["inputs"][5:]
        assert mode in preprocessors.UL2_MODE_TOKENS.values()
        part = [*inputs, *one["targets"]] if mode == "[S2S]" else joined(inputs, one["targets"], 259)[0]
        tokens += part
    assert tokens == np.concatenate(documents).tolist()


def test_ul2_uses_the_room_there_is():
    """Of each denoiser's examples, the longest fill the inputs or the targets."""
    for denoiser in UL2_DENOISERS:
        steps = preprocessors.ul2(lengths(512, 512), letters(), [denoiser])
        made = run(steps, [np.full(20000, 65)])
        longest = [max(len(one[feature]) for one in made) for feature in ("inputs", "targets")]
        assert 505 <= max(longest) <= 511


def test_ul2_takes_denoisers_by_their_rates():
    denoisers = [Denoiser("R", 0.15, 3.0, rate=3.0), Denoiser("X", 0.5, 64.0), Denoiser("S", 0.25, rate=0.5)]
    steps = preprocessors.ul2(lengths(64, 64), letters(), denoisers)
    made = run(steps, [np.full(60000, 65)] * 3)
    found = collections.Counter(data.ByteVocabulary().decode(one["inputs"][:5]) for one in made)
    for mode, rate in (("[NLU]", 3 / 4.5), ("[NLG]", 1 / 4.5), ("[S2S]", 0.5 / 4.5)):
        assert abs(found[mode] / len(made) - rate) < 5 * np.sqrt(rate * (1 - rate) / len(made))


def test_ul2_without_mode_tokens():
    steps = preprocessors.ul2(lengths(64, 64), letters(), [Denoiser("anything", 0.25)], mode_tokens=None)
    made = run(steps, [text(200)])
    assert np.concatenate([one[f] for one in made for f in ("inputs", "targets")]).tolist() == [*range(200)]


def test_in_a_task():
    source = data.FunctionDataSource(lambda split: [{"text": "ab cd ef gh " * 30}] * 9, splits=("train",))
    steps = [
        functools.partial(preprocessors.rekey, key_map={"inputs": None, "targets": "text"}),
        preprocessors.tokenize,
        data.CacheDatasetPlaceholder(),
        span_corruption,
        preprocessors.append_eos_after_trim,
    ]
    task = data.Task("spans", source, letters(), steps)
    pipeline = task.pipeline("train", lengths(64, 32))
    assert pipeline.pieces.length == random_spans_helper(64, 0.15, 3.0)[0]
    (document,) = pipeline.outputs(0, 0)
    (example,) = pipeline.piece_outputs(document["targets"][: pipeline.pieces.length], (0, 0), 0)
    assert len(example["inputs"]) == 64
    assert example["inputs"][-1] == example["targets"][-1] == 1


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (functools.partial(span_corruption, None), "needs the length of 'inputs'"),
        (functools.partial(span_corruption, {"inputs": 512}), "needs the length of 'targets'"),
        (functools.partial(span_corruption, lengths(512, 113)), "targets of 114 tokens .* is 113"),
        (functools.partial(span_corruption, lengths(), reserved_for_packing=510), r"2 token\(s\)"),
        (functools.partial(span_corruption, lengths(), noise_density=1.0), "noise_density is 1.0"),
        (functools.partial(span_corruption, lengths(), mean_noise_span_length=0.5), "must be 1 or more"),
        (functools.partial(preprocessors.prefix_lm, lengths(), noise_density=0.6), "at most 0.5"),
        (functools.partial(preprocessors.prefix_lm, lengths(2)), r"1 token\(s\)"),
        (functools.partial(preprocessors.ul2, lengths(7), denoisers=[Denoiser("R", 0.15, 3.0)]), "too few for"),
        (functools.partial(preprocessors.ul2, lengths(), denoisers=[Denoiser("Q", 0.15, 3.0)]), "no mode token"),
        (functools.partial(preprocessors.ul2, lengths(), denoisers=[Denoiser("S", 0.6)]), "at most 0.5"),
        (functools.partial(preprocessors.ul2, lengths(), denoisers=[Denoiser("S", 0.2, rate=0)]), "must be positive"),
        (functools.partial(preprocessors.ul2, lengths(), denoisers=[]), "denoisers is empty"),
    ],
)
def test_invalid_objectives_raise_user_error(objective, message):
    with pytest.raises(UserError, match=message):
        objective(output_features=letters())


def test_vocabularies_that_do_not_serve():
    with pytest.raises(UserError, match="different vocabularies"):
        span_corruption(lengths(), features(targets=data.ByteVocabulary()))
    with pytest.raises(UserError, match="needs 28 sentinels"):
        span_corruption(lengths(), features(size=28))


def test_ordinary_ids_that_serve_as_sentinels_are_announced(caplog):
    with caplog.at_level(logging.WARNING):
        span_corruption(lengths(), features(extra_ids=28))
        assert not caplog.records
        span_corruption(lengths(), features(extra_ids=20))
    assert "last 8 ordinary ids" in caplog.text


def test_text_that_is_not_tokenized():
    with pytest.raises(UserError, match="not a list of token ids but 'some text'"):
        preprocessors.select_random_chunk({"targets": "some text"}, lambda: 0)
