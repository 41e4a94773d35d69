"""Batches of a user's own function, and the rows of a process."""

import dataclasses

import numpy as np
import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.trainer.datasets import ExternalBatches, ShardInfo, get_dataset, get_training_eval_datasets


def batches(*rows):
    return ExternalBatches([{"decoder_target_tokens": np.full((n, 3), i)} for i, n in enumerate(rows)])


def test_a_position_is_taken_and_gone_on_from():
    first = batches(2, 2, 2)
    assert first.peek()["decoder_target_tokens"][0, 0] == 0
    next(first)
    again = batches(2, 2, 2)
    again.restore(first.state())
    assert next(again)["decoder_target_tokens"][0, 0] == next(first)["decoder_target_tokens"][0, 0] == 1


def test_the_end_and_other_shapes_are_explained():
    few = batches(2)
    next(few)
    with pytest.raises(UserError, match=r"1 batches.*TRAIN_STEPS"):
        next(few)
    uneven = batches(2, 2, 1)
    next(uneven), next(uneven)
    with pytest.raises(UserError, match=r"Batch 3 .*\(1, 3\).*\(2, 3\)"):
        next(uneven)
    assert uneven.state()["batches"] == 2


def test_a_batch_that_was_only_peeked_at_is_not_read():
    source = batches(2, 2, 2)
    source.peek()
    assert source.state()["batches"] == 0
    source.restore({"own": True, "batches": 2})
    assert next(source)["decoder_target_tokens"][0, 0] == 2


def dataset(batch_size=4):
    features = {name: data.Feature(data.PassThroughVocabulary(100), add_eos=False) for name in ("inputs", "targets")}
    examples = [{"inputs": [n + 1], "targets": [n + 1]} for n in range(11)]
    source = data.FunctionDataSource(lambda split: examples, splits=("train",))
    task = data.Task("numbers", source, features, [])
    return data.DatasetConfig(task, {"inputs": 2, "targets": 2}, "train", batch_size, shuffle=True, seed=1)


def test_the_shards_of_a_batch_are_the_batch():
    cfg, converter = dataset(), data.EncDecFeatureConverter
    firsts = lambda batch: batch["encoder_input_tokens"][:, 0].tolist()
    with get_dataset(cfg, 0, 1, converter) as whole:
        expected = [firsts(next(whole)) for _ in range(3)]
    shards = [get_dataset(cfg, number, 2, converter) for number in range(2)]
    assert [firsts(next(shards[0])) + firsts(next(shards[1])) for _ in range(3)] == expected
    for shard in shards:
        shard.close()
    assert [list(ShardInfo(number, 2).rows(4)) for number in range(2)] == [[0, 1], [2, 3]]


def test_the_shards_of_an_evaluation_cover_every_example_once():
    firsts = lambda batch: batch["encoder_input_tokens"][:, 0].tolist()
    seen = []
    for number in range(2):
        sets = get_training_eval_datasets(dataset(), number, 2, None, data.EncDecFeatureConverter)
        evaluated = list(sets["numbers"])
        assert len(evaluated) == 3, "all processes have as many batches"
        seen += [first for batch in evaluated for first in firsts(batch) if first]
        assert list(map(firsts, sets["numbers"])) == list(map(firsts, evaluated)), "every evaluation reads the same"
    assert sorted(seen) == list(range(1, 12))
    limited = get_training_eval_datasets(dataset(), 0, 2, 2, data.EncDecFeatureConverter)
    assert len(list(limited["numbers"])) == 2


def test_evaluation_never_packs_so_that_every_row_is_one_example():
    cfg = dataclasses.replace(dataset(), pack=True, task_feature_lengths={"inputs": 8, "targets": 8})
    sets = get_training_eval_datasets(cfg, 0, 1, None, data.EncDecFeatureConverter)
    evaluated = list(sets["numbers"])
    assert len(evaluated) == 3 and not any("segment_ids" in name for name in evaluated[0])
    with get_dataset(cfg, 0, 1, data.EncDecFeatureConverter) as training:
        assert "encoder_segment_ids" in next(training)
