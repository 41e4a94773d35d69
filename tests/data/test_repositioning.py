"""A stream that is moved to a saved position reads on from there: nothing of the old position remains."""

import itertools
import json
import random
import threading

import numpy as np
import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.data.lanes import LaneConfig, Position, resized_states
from t5x.data.loader import TrainLoader
from t5x.data.pipeline import ConcatenateAndSplit

LENGTHS = {"targets": 12}
VOCABULARY = data.PassThroughVocabulary(100_000)


def split_in_three(example):
    """A piece of 12 tokens becomes three examples, so that two are outstanding after the first."""
    return [{"targets": example["targets"][start : start + 4]} for start in (0, 4, 8)]


def split_in_two(example):
    """An example becomes two, told apart by their last token."""
    return [{"targets": [*example["targets"], part]} for part in (1, 2)]


def add_noise(example, seed):
    return {"targets": [*example["targets"], 1 + np.random.default_rng(seed).integers(90_000)]}


TASKS = {
    "pieces": [ConcatenateAndSplit(12), split_in_three],
    "noisy pieces": [add_noise, ConcatenateAndSplit(12), split_in_three, add_noise],
    "several": [split_in_two],
    "random": [add_noise],
}


def pipeline(name, size=17):
    """Return a pipeline of `size` examples of 3 to 7 tokens."""
    examples = [{"targets": [1000 * (n + 1) + i for i in range(3 + n % 5)]} for n in range(size)]
    source = data.FunctionDataSource(lambda split: examples, splits=("train",))
    features = {"targets": data.Feature(VOCABULARY, add_eos=False)}
    return data.Task(name, source, features, TASKS[name]).pipeline("train", LENGTHS, seed=3)


def lane_config(*names, pack=False, batch_size=2, **options):
    converter = data.DecoderFeatureConverter(pack=pack)
    return LaneConfig([pipeline(name) for name in names], [1.0] * len(names), converter, LENGTHS, batch_size, **options)


def tokens_of(row):
    return row["decoder_target_tokens"].tolist()


def record(lane, count):
    """Return the next `count` rows of a lane and its states before each of them."""
    rows, states = [], []
    for _ in range(count):
        states.append(json.loads(json.dumps(lane.state())))
        rows.append(tokens_of(lane.next_row()))
    return rows, states


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("names", [("pieces",), ("noisy pieces",), ("several",), ("pieces", "several", "random")])
def test_a_lane_reads_the_same_rows_after_moving_from_anywhere_to_anywhere(names, pack):
    (lane,) = lane_config(*names, pack=pack).lanes([1])
    rows, states = record(lane, 24)
    rng = random.Random(0)
    for _ in range(40):
        step, count = rng.randrange(20), rng.randint(1, 3)
        lane.seek(states[step])
        assert lane.state() == states[step]
        assert [tokens_of(lane.next_row()) for _ in range(count)] == rows[step : step + count]
        assert lane.state() == states[step + count]


def test_seeking_drops_the_rest_of_a_half_read_piece():
    (lane,) = lane_config("pieces", batch_size=1, shuffle=False).lanes([0])
    first = [tokens_of(lane.next_row()) for _ in range(3)]  # the first piece
    lane.next_row()  # the first of three examples of the second piece
    lane.seek([0, *Position()])
    assert [tokens_of(lane.next_row()) for _ in range(3)] == first


def test_seeking_drops_the_example_held_for_the_next_row():
    (lane,) = lane_config("random", pack=True, batch_size=1, shuffle=False).lanes([0])
    first = tokens_of(lane.next_row())
    lane.seek([0, *Position()])
    assert tokens_of(lane.next_row()) == first


def test_a_position_excludes_the_example_held_for_the_next_row():
    """That example is not read yet: the next row starts with it, in this process and after a restart."""
    (lane,) = lane_config("random", pack=True, batch_size=1, shuffle=False).lanes([0])
    row = lane.next_row()
    examples_in_row = int(row["decoder_segment_ids"].max())
    assert lane.state() == [0, *Position(cursor=examples_in_row)]
    following = tokens_of(lane.next_row())
    (restarted,) = lane_config("random", pack=True, batch_size=1, shuffle=False).lanes([0])
    restarted.seek([0, *Position(cursor=examples_in_row)])
    assert tokens_of(restarted.next_row()) == following


@pytest.mark.parametrize("workers", [0, 1])
def test_a_saved_position_is_that_of_the_batches_returned_while_others_are_prefetched(workers):
    """The prefetcher has filled its queue before the position is saved, and before it is restored."""
    config = lane_config("pieces", "several", pack=True, batch_size=4)
    with TrainLoader(config) as reference:
        states, batches = [], []
        for _ in range(12):
            states.append(json.loads(json.dumps(reference.state())))
            batches.append(next(reference))
    with TrainLoader(config, num_workers=workers) as loader:
        for step in (5, 0, 7, 2):
            loader.restore(states[step])
            for number in (step, step + 1):
                assert loader.state() == states[number] and loader.state()["batches"] == number
                np.testing.assert_array_equal(
                    next(loader)["decoder_target_tokens"], batches[number]["decoder_target_tokens"]
                )
            wait_until_full(loader)
            assert loader.state() == states[step + 2]
            np.testing.assert_array_equal(
                loader.peek()["decoder_target_tokens"], batches[step + 2]["decoder_target_tokens"]
            )
            assert loader.state() == states[step + 2]


def wait_until_full(loader):
    """Wait until batches are prefetched."""
    for _ in range(2000):
        if loader._prefetcher._results.full():
            return
        threading.Event().wait(0.005)
    raise AssertionError("no batches are prefetched")


def test_a_position_that_is_refused_leaves_the_loader_where_it_was():
    config = lane_config("several", batch_size=4)
    with TrainLoader(config) as reference:
        expected = [tokens_of(next(reference)) for _ in range(3)]
    with TrainLoader(config) as loader:
        assert tokens_of(next(loader)) == expected[0]
        state = loader.state()
        with pytest.raises(UserError, match="lacks row"):
            loader.restore(state | {"lanes": [[0, 2, *state["lanes"][0][2:]]], "batches": 9})
        assert loader.state() == state
        assert [tokens_of(next(loader)) for _ in range(2)] == expected[1:]


def test_each_epoch_and_each_row_has_random_numbers_of_its_own():
    """The noise of an example differs in every epoch; that of a piece by its position."""
    drawn = pipeline("random")
    noise = [drawn.outputs(epoch, index)[0]["targets"][-1] for epoch in range(4) for index in range(len(drawn))]
    assert len(set(noise)) == len(noise)
    other_seed = data.Task("random", drawn._source, drawn.output_features, TASKS["random"]).pipeline(
        "train", LENGTHS, seed=4
    )
    assert other_seed.outputs(0, 0)[0]["targets"][-1] != noise[0]

    pieces = lane_config("noisy pieces", batch_size=2, shuffle=False).lanes([0, 1])
    lasts = [[tokens_of(lane.next_row())[4] for _ in range(12)] for lane in pieces]
    assert len(set(itertools.chain.from_iterable(lasts))) == 24


def test_rows_choose_their_tasks_independently():
    """Each row of a mixture has its own draws."""
    lanes = lane_config("several", "random", batch_size=8).lanes(range(8))
    chosen = []
    for lane in lanes:
        before = lane.state()
        sequence = []
        for _ in range(16):
            lane.next_row()
            after = lane.state()
            sequence.append(int(after[1:5] == before[1:5]))  # the first stream did not move: the second was read
            before = after
        chosen.append(tuple(sequence))
    assert len(set(chosen)) == len(lanes)


@pytest.mark.parametrize(
    ("first", "second", "next_position"),
    [
        (Position(), Position(), 0),
        (Position(cursor=3), Position(cursor=2), 5),  # rows 0 and 1 of a batch of 2 have read positions 0 2 4 and 1 3
        (Position(cursor=2), Position(cursor=2), 4),
        (Position(cursor=3, used=1), Position(cursor=2), 7),  # one of several examples of position 6
        (Position(cursor=2), Position(cursor=2, offset=5), 6),  # some tokens of position 5
        (Position(cursor=2), Position(cursor=2, returned=2), 6),  # some examples of the piece that starts at position 5
    ],
)
def test_another_batch_size_resumes_after_the_last_example_that_a_row_started(first, second, next_position):
    lanes = [[0, 1, 4, *first], [1, 1, 9, *second]]
    for size in (1, 3):
        cursor = -(-next_position // size)
        assert resized_states(lanes, 2, size) == [[0, size, 9, *Position(cursor)]]


def restored_with(saved, **changes):
    with TrainLoader(saved) as loader:
        state = loader.state()
    with TrainLoader(saved._replace(**changes)) as loader:
        loader.restore(state)
        return loader.state() == state


def test_a_position_is_refused_with_other_packing_lengths_or_rates():
    """They decide which examples a row has read."""
    plain, packed = lane_config("pieces", "random"), lane_config("pieces", "random", pack=True)
    assert restored_with(packed)
    for saved, changes, difference in (
        (packed, {"converter": plain.converter}, "pack is False, not True"),
        (packed, {"lengths": {"targets": 16}}, "lengths is .*16.*not .*12"),
        (plain, {"rates": [1.0, 2.0]}, "tasks is .*2.0"),
        (plain, {"shuffle": False}, "shuffle is False, not True"),
        (plain, {"pipelines": plain.pipelines[::-1]}, "tasks is"),
    ):
        with pytest.raises(UserError, match=difference):
            restored_with(saved, **changes)


def test_a_position_of_another_number_of_tasks_is_refused_even_if_other_data_is_accepted():
    with TrainLoader(lane_config("several")) as one:
        state = one.state()
    with TrainLoader(lane_config("several", "random")) as two:
        with pytest.raises(UserError, match="another number of tasks"):
            two.restore(state, changed_data=True)
        with pytest.raises(UserError, match="another number of tasks"):
            two.restore(two.state() | {"version": 1}, changed_data=True)


def test_truncated_features_are_counted_with_the_batches_returned_not_with_those_prefetched():
    config = lane_config("random", batch_size=1, shuffle=False)._replace(lengths={"targets": 5})
    with TrainLoader(config) as loader:
        counts = []
        for _ in range(5):
            next(loader)
            wait_until_full(loader)
            counts.append(loader.counts.trimmed["targets"])
    assert counts == [0, 0, 1, 2, 3]  # examples of 4 to 8 tokens
