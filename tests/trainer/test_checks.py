"""What is checked before anything is computed."""

import dataclasses

import pytest

from t5x import data
from t5x.errors import UserError
from t5x.partitioning import consistency
from t5x.trainer.checks import require_same_data, verify_matching_vocabs
from tests import tiny

SIZE = tiny.T5_1_1.vocab_size


def config(vocabulary=None, features=("inputs", "targets"), examples=300, change=None):
    vocabulary = vocabulary or data.PassThroughVocabulary(SIZE, eos_id=1)
    rows = [{name: [n % 20 + 2] for name in features} for n in range(examples)]
    if change is not None:
        rows[change] = {name: [25] for name in features}
    source = data.FunctionDataSource(lambda split: rows, splits=("train",))
    task = data.Task("numbers", source, {name: data.Feature(vocabulary, add_eos=False) for name in features}, [])
    return data.DatasetConfig(task, dict.fromkeys(features, 4), "train", 2, shuffle=False, seed=0)


def test_vocabularies_of_the_task_and_the_model_must_be_equal_and_fit_the_network():
    model = tiny.model()
    verify_matching_vocabs(config(), model)
    with pytest.raises(UserError, match=r"no feature 'targets'.*it has inputs"):
        verify_matching_vocabs(config(features=("inputs",)), model)
    with pytest.raises(UserError, match="vocabulary of 'inputs' differs"):
        verify_matching_vocabs(config(data.PassThroughVocabulary(SIZE + 1, eos_id=1)), model)
    small = tiny.model()
    small.module = small.module.clone(config=dataclasses.replace(tiny.T5_1_1, vocab_size=SIZE - 1))
    with pytest.raises(UserError, match=f"has {SIZE} tokens, but vocab_size of the network is {SIZE - 1}"):
        verify_matching_vocabs(config(), small)


def test_what_processes_compare_covers_examples_from_the_whole_split(monkeypatch):
    """The end of the data counts as much as its beginning, and so does the number of examples."""
    compared = []
    monkeypatch.setattr(consistency, "require_same", lambda name, describe: compared.append(describe()))
    for cfg in (config(), config(), config(change=0), config(change=299 * 255 // 256), config(examples=301)):
        require_same_data(cfg, None)
    first, again, *others = compared
    assert first == again and len(first) == 3
    assert all(other != first for other in others)
