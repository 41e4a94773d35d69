import collections
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from t5x import data
from t5x.data.lanes import BadExamples, LaneConfig, Order, shuffled
from t5x.data.loader import TrainLoader
from t5x.data.pipeline import derive_seed
from t5x.data.sources import BadExample

from .conftest import make_task

LENGTHS = {"inputs": 6, "targets": 4}


def keep(example):
    return example


def drop_some(example):
    return None if example["number"] % 3 == 0 else example


def drop_at_random(example, seed):
    return None if np.random.default_rng(seed).random() < 0.4 else example


def several(example):
    """Example n becomes n % 4 examples: none to three."""
    return [example | {"inputs": [example["number"] + 5, i + 5]} for i in range(example["number"] % 4)]


def several_then_noise(example, seed):
    return example | {"targets": np.random.default_rng(seed).integers(2, 99, 3)}


PIPELINES = {
    "plain": [keep],
    "drops": [drop_some],
    "drops at random": [drop_at_random, several_then_noise],
    "several": [several, several_then_noise],
    "all": [drop_some, several, drop_at_random, several_then_noise],
}


def loader(kind, size, batch_size, seed=0, shuffle=True, rows=None):
    examples = [{"number": i, "inputs": [i + 2], "targets": [1]} for i in range(size)]
    pipeline = make_task(examples, PIPELINES[kind]).pipeline("train", LENGTHS, seed)
    config = LaneConfig([pipeline], [1.0], data.EncDecFeatureConverter(), LENGTHS, batch_size, shuffle=shuffle)
    return TrainLoader(config, rows=rows)


def take(source, count):
    return [next(source) for _ in range(count)]


def assert_same(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])


@settings(max_examples=20)
@given(
    kind=st.sampled_from(list(PIPELINES)),
    size=st.integers(5, 30).map(lambda n: 2 * n + 1),  # odd: without shuffling each row comes to all examples
    seed=st.integers(0, 2**40),
    shuffle=st.booleans(),
    splits=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4),
    steps=st.lists(st.integers(0, 5), min_size=4, max_size=4),
)
def test_batches_are_the_same_for_any_processes_and_interruptions(kind, size, seed, shuffle, splits, steps):
    """A run that stops after some batches and goes on with another number of processes, several times over."""
    with loader(kind, size, 8, seed, shuffle) as undisturbed:
        expected = take(undisturbed, sum(steps[: len(splits)]))
        expected_state = undisturbed.state()
    got, state = [], None
    for processes, count in zip(splits, steps, strict=False):
        share = 8 // processes
        loaders = [loader(kind, size, 8, seed, shuffle, range(i * share, (i + 1) * share)) for i in range(processes)]
        for one in loaders:
            if state is not None:
                one.restore(state)
        for _ in range(count):
            parts = [next(one) for one in loaders]
            got.append({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})
        states = [json.loads(json.dumps(one.state())) for one in loaders]
        for one in loaders:
            one.close()
        state = data.merge_states(states)
    assert_same(got, expected)
    assert state == json.loads(json.dumps(expected_state))


@pytest.mark.parametrize("kind", PIPELINES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_resuming_at_every_step(kind, shuffle):
    with loader(kind, 31, 4, seed=3, shuffle=shuffle) as source:
        states = [source.state()]
        batches = []
        for _ in range(25):
            batches.append(next(source))
            states.append(source.state())
    for step in range(25):
        with loader(kind, 31, 4, seed=3, shuffle=shuffle) as resumed:
            resumed.restore(json.loads(json.dumps(states[step])))
            assert resumed.state() == states[step]
            assert_same(take(resumed, 3)[: 25 - step], batches[step : step + 3])


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_has_every_example_once(shuffle):
    with loader("plain", 12, 4, shuffle=shuffle) as source:
        epochs = [[batch["encoder_input_tokens"][:, 0] - 2 for batch in take(source, 3)] for _ in range(4)]
    epochs = [np.concatenate(epoch).tolist() for epoch in epochs]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    if shuffle:
        assert len({tuple(epoch) for epoch in epochs}) == 4
    else:
        assert epochs == [list(range(12))] * 4


def test_a_one_to_many_epoch_has_every_part_once():
    with loader("several", 8, 1) as source:
        parts = [tuple(batch["encoder_input_tokens"][0, :2].tolist()) for batch in take(source, 12)]
    assert sorted(parts) == sorted((n + 5, i + 5) for n in range(8) for i in range(n % 4))


def test_fewer_examples_than_rows():
    with loader("plain", 3, 8) as source:
        batches = take(source, 3)
    seen = collections.Counter(np.concatenate([batch["encoder_input_tokens"][:, 0] for batch in batches]).tolist())
    assert seen == {2: 8, 3: 8, 4: 8}


def test_the_seed_changes_the_order():
    orders = []
    for seed in (0, 1):
        with loader("plain", 50, 10, seed=seed) as source:
            orders.append(next(source)["encoder_input_tokens"][:, 0].tolist())
    assert orders[0] != orders[1]


def test_the_state_is_small_where_rows_stand_alike():
    with loader("plain", 100, 64) as source:
        take(source, 7)
        assert source.state()["lanes"] == [[0, 64, 0, 7, 0, 0, 0]]
        assert len(json.dumps(source.state())) < 250


@settings(max_examples=60)
@given(st.integers(1, 300), st.integers(0, 2**63))
def test_shuffles_are_permutations(size, key):
    assert sorted(shuffled(i, size, key) for i in range(size)) == list(range(size))


def test_shuffles_are_even():
    """Each index comes to each place equally often, and neighbours are parted, over many keys."""
    size, keys = 10, 4000
    places = np.zeros((size, size))
    adjacent = 0
    for key in range(keys):
        order = [Order(size, key, True)(i)[1] for i in range(size)]
        places[np.arange(size), order] += 1
        adjacent += sum(b == a + 1 for a, b in itertools.pairwise(order))
    expected = keys / size
    chi_squared = ((places - expected) ** 2 / expected).sum()
    assert chi_squared < 140  # 81 degrees of freedom: the 99.99 percentile is 136
    assert abs(adjacent / keys - (size - 1) / size) < 0.1


def test_saved_positions_stay_valid():
    """These numbers must never change: a run that resumes with another version reads on in the same order."""
    assert [Order(1000, 42, True)(i)[1] for i in range(5)] == [393, 656, 651, 133, 703]
    assert [Order(7, 0, True)(i) for i in range(7, 10)] == [(1, 6), (1, 2), (1, 0)]
    assert derive_seed(0, 1, 2, 3, 4) == 7758496364811927794


@settings(max_examples=60)
@given(st.integers(1, 5000), st.integers(0, 2**63 - 1), st.integers(0, 20000), st.integers(1, 300), st.booleans())
def test_blocks_of_the_order_are_the_order(size, seed, first, step, shuffle):
    order = Order(size, seed, shuffle)
    assert order.block(first, step, 40) == [order(first + step * i) for i in range(40)]


def test_the_first_bad_examples_are_logged_and_the_rest_counted(caplog):
    bad = BadExamples()
    for number in range(7):
        bad.add(BadExample(f"line {number}"))
    assert bad.count == 7 and str(bad.first) == "line 0"
    assert [record.getMessage() for record in caplog.records] == [
        *(f"skipped: line {number}" for number in range(4)),
        "skipped: line 4; further bad examples are only counted",
    ]
