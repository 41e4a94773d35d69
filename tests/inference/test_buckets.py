"""Which examples are computed together."""

import numpy as np

from t5x.inference import engine


def test_every_example_is_in_one_batch_that_it_fits_into():
    rng = np.random.default_rng(0)
    sizes = {"inputs": rng.integers(0, 300, 1000).tolist(), "targets": rng.integers(1, 70, 1000).tolist()}
    planned = list(engine.plan_batches(1000, sizes, {"inputs": 300, "targets": None}, 16))
    assert sorted(i for batch in planned for i in batch.positions) == list(range(1000))
    for batch in planned:
        for feature in sizes:
            assert max(sizes[feature][i] for i in batch.positions) <= batch.lengths[feature]
        assert batch.lengths["inputs"] <= 300
    assert [len(batch.positions) for batch in planned] == [16] * 62 + [8]
    padding = sum(batch.lengths["inputs"] * len(batch.positions) for batch in planned) / sum(sizes["inputs"])
    assert padding < 1.25
    assert len({batch.lengths["inputs"] for batch in planned}) <= 12


def test_features_that_are_not_bucketed_have_their_full_length():
    (batch,) = engine.plan_batches(2, {"inputs": [3, 9]}, {"inputs": 64, "targets": 20}, 4)
    assert batch.lengths == {"inputs": 12, "targets": 20} and batch.positions == [1, 0]


def test_excluded_examples_leave_neither_a_gap_nor_their_length():
    asked = []

    def includes(position):
        asked.append(position)
        return position % 4 != 0

    sizes = {"inputs": [100 if i % 4 == 0 else 7 for i in range(40)]}
    planned = engine.plan_batches(40, sizes, {"inputs": 512}, 8, includes=includes)
    assert asked == []
    first = next(planned)
    assert first == ([1, 2, 3, 5, 6, 7, 9, 10], {"inputs": 8}) and len(asked) == 10 + 8
    assert [len(batch.positions) for batch in planned] == [8, 8, 6] and sorted(asked) == list(range(40))


def test_a_length_of_exactly_a_bucket_is_not_padded_further():
    assert [engine.coarse_bucket(length) for length in (127, 128, 129, 512, 513)] == [128, 128, 512, 512, 2048]
    assert [engine.bucket(length) for length in (8, 12, 16, 48, 49)] == [8, 12, 16, 48, 64]
    assert [engine.row_count(count, 32) for count in (1, 2, 4, 5, 32, 33)] == [1, 2, 4, 8, 32, 32]
    assert engine.coarse_shape({"inputs": [128]}, {"inputs": 512}) == (1, {"inputs": 128})
