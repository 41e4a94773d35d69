"""What is checked before anything is computed."""

import dataclasses
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.partitioning import consistency, distributed
from t5x.trainer.checks import ContentCheck, require_same_data, verify_matching_vocabs
from tests.support import tiny

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


def test_processes_compare_examples_from_the_whole_split(monkeypatch):
    """The end of the data counts as much as its beginning, and so does the number of examples."""
    compared = []
    monkeypatch.setattr(consistency, "require_same", lambda name, describe: compared.append(describe()))
    for cfg in (config(), config(), config(change=0), config(change=299 * 255 // 256), config(examples=301)):
        require_same_data(cfg, None)
    first, again, *others = compared
    assert first == again and len(first) == 3
    assert all(other != first for other in others)


def fingerprint(**sources):
    future = Future()
    future.set_result({"tasks": {name: {"source": source} for name, source in sources.items()}})
    return future


def content_check(monkeypatch, mine, other_has, size=0):
    """A check in process 0 of two processes, and what it compares."""
    compared = []
    monkeypatch.setattr(distributed, "process_count", lambda: 2)
    monkeypatch.setattr(distributed, "decide", lambda name, function: function())
    monkeypatch.setattr(distributed, "exchange", lambda name, value: [value, other_has.pop(0)])
    monkeypatch.setattr(consistency, "require_same", lambda name, describe: compared.append(sorted(describe())))
    loader = SimpleNamespace(content_bytes=lambda: size)
    return ContentCheck(loader, mine), compared


def test_content_is_compared_once_for_tasks_that_every_process_has_hashed(monkeypatch):
    files = {"class": "Files", "files": [["a.jsonl", 3, "12ab"], ["b.jsonl", 4, "34cd"]]}
    mine = fingerprint(files=files, here_only={"content": "56"}, unknown=None)
    check, compared = content_check(monkeypatch, mine, [["files", "other"]])
    check.require_same(), check.require_same()
    names = ["content of a.jsonl, file 1 of files", "content of b.jsonl, file 2 of files", "source of files"]
    assert compared == [names]


def test_content_that_some_process_has_not_hashed_is_compared_later(monkeypatch):
    source = {"class": "Function", "examples": 2, "content": "12ab"}
    check, compared = content_check(monkeypatch, fingerprint(one=source), [None, ["one"]])
    check.require_same(5)
    assert compared == []
    check.require_same()
    assert compared == [["source of one"]]
    check, compared = content_check(monkeypatch, Future(), [["one"]])
    check.require_same(0)
    assert compared == []


def test_training_waits_for_the_hashes_of_less_than_a_gigabyte(monkeypatch):
    assert content_check(monkeypatch, fingerprint(), [], 2**30 - 1)[0].is_quick
    assert not content_check(monkeypatch, fingerprint(), [], 2**30)[0].is_quick
