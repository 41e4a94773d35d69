"""Mixtures, packing and joined documents at once: a batch is the same after any interruption, on any machine."""

import collections
import functools
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.data.lanes import BadExamples, LaneConfig
from t5x.data.loader import TrainLoader, train_loader
from t5x.data.tasks import rate_num_examples, task_rates
from tests.support.programs import environment

from .conftest import byte_features
from .programs import mixed_batches
from .programs.mixed_batches import BATCH, LENGTHS, loader

PROGRAM = Path(mixed_batches.__file__)


@pytest.fixture
def mixture(registries):
    return mixed_batches.register()


def digest(batch):
    return {name: array.tobytes() for name, array in batch.items()}


def take(source, count):
    return [digest(next(source)) for _ in range(count)]


def joined(parts):
    """Batches of several processes as one."""
    return [{name: b"".join(part[name] for part in batch) for name in batch[0]} for batch in zip(*parts, strict=True)]


@pytest.mark.parametrize("pack", [False, True])
def test_the_same_batches_on_any_number_of_processes(mixture, pack):
    with loader(pack=pack) as whole:
        expected = take(whole, 30)
    assert len({batch["encoder_input_tokens"] for batch in expected}) == 30
    for processes in (2, 4, 8):
        size = BATCH // processes
        parts = []
        for number in range(processes):
            with loader(rows=range(number * size, (number + 1) * size), pack=pack) as part:
                parts.append(take(part, 30))
        assert joined(parts) == expected


@pytest.mark.parametrize("count", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_processes_resume_exactly(mixture, count):
    """Each process is killed (SIGKILL) while it makes batches; the next resumes from the last state written."""
    rng = random.Random(1)
    found, state = [], None
    for number in range(count):
        command = [sys.executable, PROGRAM, str(2 * (number % 5 == 1))]  # workers, now and then
        with subprocess.Popen(
            command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            process.stdin.write(json.dumps(state))
            process.stdin.close()
            for _ in range(rng.randint(1, 15)):
                digest, state = json.loads(process.stdout.readline())
                found.append(digest)
            process.kill()
    with loader() as whole:
        assert found == [mixed_batches.digest(next(whole)) for _ in found]
        assert state == json.loads(json.dumps(whole.state()))


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_interruptions_with_other_numbers_of_processes_and_workers(mixture, count):
    """At random places the state goes through JSON into a loader with other numbers of processes and workers."""
    batches = 4 * count
    with loader() as whole:
        expected = take(whole, batches)
        final = whole.state()
    rng = random.Random(0)
    places = sorted(rng.sample(range(1, batches), count))
    state, done = None, 0
    for stop in [*places, batches]:
        processes = rng.choice([1, 2, 4])
        size = BATCH // processes
        parts, states = [], []
        for number in range(processes):
            workers = 2 if stop in places[:: len(places) // 2] else 0  # starting processes is slow
            with loader(rows=range(number * size, (number + 1) * size), workers=workers) as part:
                if state is not None:
                    part.restore(json.loads(json.dumps(state)))
                parts.append(take(part, stop - done))
                states.append(part.state())
        assert joined(parts) == expected[done:stop], f"after {done} batches with {processes} processes"
        state, done = data.merge_states(states), stop
    assert state == final
    assert len(json.dumps(state)) < 4000


def test_rows_hold_whole_examples_at_the_rates_of_the_mixture(mixture):
    with loader() as source:
        batches = [next(source) for _ in range(60)]
    vocabulary = data.ByteVocabulary(extra_ids=100)
    found = collections.Counter()
    for batch in batches:
        for inputs, segments in zip(batch["encoder_input_tokens"], batch["encoder_segment_ids"], strict=True):
            assert segments.max() >= 1 and (segments > 0).sum() == (inputs > 0).sum()
            for segment in range(1, segments.max() + 1):
                ids = inputs[segments == segment]
                found["documents" if (ids >= 259).any() else "pairs"] += 1
                if not (ids >= 259).any():
                    assert ids[-1] == vocabulary.eos_id
    share = found["documents"] / found.total()
    # Of six examples two are corrupted documents.
    np.testing.assert_allclose(share, 1 / 3, atol=4 * (1 / 3 * 2 / 3 / found.total()) ** 0.5)


def test_joined_documents_lose_and_repeat_nothing(registries):
    documents = [list(range(100 * i + 10, 100 * i + 10 + 7 * i % 23)) for i in range(1, 12)]
    features = {"targets": data.Feature(data.PassThroughVocabulary(2000), add_eos=False)}
    source = data.FunctionDataSource(lambda split: [{"targets": d} for d in documents], splits=("train",))
    task = data.Task("plain", source, features, [data.pipeline.ConcatenateAndSplit(5)])
    pipeline, converter = task.pipeline("train", {"targets": 5}, 0), data.DecoderFeatureConverter()
    made = TrainLoader(LaneConfig([pipeline], [1.0], converter, {"targets": 5}, 1, shuffle=False))
    tokens = [token for document in documents for token in document]
    with made:
        read = np.concatenate([next(made)["decoder_target_tokens"][0] for _ in range(3 * len(tokens) // 5)])
    np.testing.assert_array_equal(read, (tokens * 4)[: len(read)])
    cfg = data.DatasetConfig(task, {"targets": 5}, "train", batch_size=4, shuffle=False, seed=0)
    batches = data.eval_batches(cfg, feature_converter=data.DecoderFeatureConverter())
    read = np.concatenate([batch.batch["decoder_target_tokens"][batch.mask].ravel() for batch in batches])
    np.testing.assert_array_equal(read[read > 0], tokens)


def test_bad_documents_are_skipped_in_their_turn(write):
    """Documents are read ahead; those that cannot be read are counted, or refused, when their turn comes."""
    lines = [f'{{"targets": [{i + 10}, {i + 10}, {i + 10}]}}\n' for i in range(40)]
    lines[25] = "{broken\n"
    source = data.JsonLinesDataSource({"train": write("x.jsonl", "".join(lines))})
    features = {"targets": data.Feature(data.PassThroughVocabulary(100), add_eos=False)}
    pipeline = data.Task("plain", source, features, [data.pipeline.ConcatenateAndSplit(15)]).pipeline("train")
    config = LaneConfig([pipeline], [1.0], data.DecoderFeatureConverter(), {"targets": 15}, 1, shuffle=False)
    made = lambda skip: TrainLoader(config._replace(bad=BadExamples(skip)))
    with made(True) as loader:
        read = [next(loader)["decoder_target_tokens"][0].tolist() for _ in range(5)]
        assert loader.counts.bad == 0
        read += [next(loader)["decoder_target_tokens"][0].tolist() for _ in range(2)]
        assert loader.counts.bad == 1
    assert [token for row in read for token in row] == [i + 10 for i in range(36) if i != 25 for _ in range(3)]
    with made(False) as loader:
        assert [next(loader)["decoder_target_tokens"][0].tolist() for _ in range(5)] == read[:5]
        with pytest.raises(data.BadExample, match=r"x.jsonl:26: not JSON"):
            next(loader)


def test_every_example_of_every_task_is_read_once_an_epoch(registries):
    """Lanes divide each task among them, whatever the draws."""
    features = {"targets": data.Feature(data.PassThroughVocabulary(5000), add_eos=False)}
    for name, first in (("a", 100), ("b", 1000)):
        source = data.FunctionDataSource(
            lambda split, f=first: [{"targets": [f + i]} for i in range(64)], splits=("train",)
        )
        data.TaskRegistry.add(name, source, output_features=features, preprocessors=[])
    data.MixtureRegistry.add("both", ["a", "b"], default_rate=1.0)
    cfg = data.DatasetConfig("both", {"targets": 1}, "train", 4, shuffle=True, seed=1, num_workers=0)
    with train_loader(cfg, feature_converter=data.DecoderFeatureConverter()) as source:
        seen = collections.Counter(int(x) for _ in range(24) for x in next(source)["decoder_target_tokens"][:, 0])
    assert set(seen.values()) == {1}, "in less than an epoch nothing comes twice"


# --- Rates ------------------------------------------------------------------------------------------------------------


def add(name, count=4):
    source = data.FunctionDataSource(lambda split: [{"inputs": "a", "targets": "b"}] * count, splits=("train",))
    return data.TaskRegistry.add(
        name, source, output_features=byte_features(), preprocessors=[data.preprocessors.tokenize]
    )


def test_rates(registries):
    add("small", 10), add("large", 1000), add("other", 40)
    by_size = functools.partial(rate_num_examples, maximum=160)
    data.MixtureRegistry.add("sized", ["small", "large", "other"], default_rate=by_size)
    names = lambda mixture: {task.name: rate for task, rate in task_rates(mixture).items()}
    assert names(data.MixtureRegistry.get("sized")) == {"small": 10, "large": 160, "other": 40}
    warm = functools.partial(rate_num_examples, temperature=2.0)
    hot = data.MixtureRegistry.add("hot", ["small", "large"], default_rate=warm)
    np.testing.assert_allclose(list(names(hot).values()), [10**0.5, 1000**0.5])
    nested = data.MixtureRegistry.add("nested", [("sized", 2.0), ("small", 1.0)])
    rates = names(nested)
    np.testing.assert_allclose([rates[n] for n in ("small", "large", "other")], [1 + 20 / 210, 320 / 210, 80 / 210])
    bad = data.MixtureRegistry.add("bad", [("small", lambda task: -1.0)])
    with pytest.raises(UserError, match=r"the rate of 'small' is -1\.0"):
        task_rates(bad)
    for rate in (0, -2.5):
        with pytest.raises(UserError, match="rates are positive"):
            data.MixtureRegistry.add("zero", [("small", rate)])


def test_tasks_with_other_vocabularies_are_not_mixed(registries):
    add("bytes")
    features = {name: data.Feature(data.ByteVocabulary(extra_ids=5)) for name in ("inputs", "targets")}
    data.TaskRegistry.add("more", data.TaskRegistry.get("bytes").source, output_features=features)
    data.MixtureRegistry.add("mixed", ["bytes", "more"], default_rate=1)
    cfg = data.DatasetConfig("mixed", LENGTHS, "train", 2, shuffle=False, seed=0)
    with pytest.raises(UserError, match=r"'bytes' and 'more': .* 'inputs'"):
        train_loader(cfg, feature_converter=data.EncDecFeatureConverter())


def test_a_mixture_without_the_split_lists_its_splits(registries):
    add("one")
    data.MixtureRegistry.add("some", ["one"], default_rate=1)
    cfg = data.DatasetConfig("some", LENGTHS, "validation", 2, shuffle=False, seed=0)
    with pytest.raises(UserError, match=r"no split 'validation'.*'train'"):
        train_loader(cfg, feature_converter=data.EncDecFeatureConverter())


def test_the_order_of_a_mixture_never_changes(mixture):
    """Saved positions depend on it: the first rows, written down once."""
    with loader(pack=False) as source:
        first = next(source)
    texts = [data.ByteVocabulary(extra_ids=100).decode(row) for row in first["decoder_target_tokens"]]
    assert texts == ["54 7 94", "72 92 71", " 21  75", "29 51 65", "80", "11 84", "8 213 5", "46"]
