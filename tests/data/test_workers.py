"""Worker processes change nothing but the speed."""

import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

from t5x import data
from t5x._runtime.errors import TemporaryError, UserError
from t5x.data.dataset_config import import_task_module
from t5x.data.lanes import BadExamples, LaneConfig
from t5x.data.loader import TrainLoader
from tests.support.programs import train

from .conftest import make_task

LENGTHS = {"inputs": 8, "targets": 6}


def noisy(example, seed):
    rng = np.random.default_rng(seed)
    return [example | {"inputs": rng.integers(2, 99, 3)} for _ in range(rng.integers(0, 3))]


def loader(task=None, workers=0, rows=None, bad=None):
    examples = [{"inputs": [i % 90 + 3], "targets": [7, i % 50 + 3]} for i in range(101)]
    task = make_task(examples, [noisy]) if task is None else task
    pipeline = task.pipeline("train", LENGTHS, seed=5)
    config = LaneConfig(
        [pipeline], [1.0], data.EncDecFeatureConverter(), LENGTHS, 8, bad=bad or BadExamples(skip=False)
    )
    return TrainLoader(config, rows=rows, num_workers=workers)


def take(source, count):
    return [next(source) for _ in range(count)]


def assert_same(batches, others):
    for batch, other in zip(batches, others, strict=True):
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])


def test_batches_and_states_do_not_depend_on_the_number_of_workers():
    with loader() as alone:
        expected = take(alone, 9)
        state = alone.state()
    with loader(workers=2) as two:
        assert_same(take(two, 4), expected[:4])
        middle = two.state()
        assert_same(take(two, 5), expected[4:])
        assert two.state() == state
        two.restore(middle)  # back, while the workers run ahead
        assert_same(take(two, 5), expected[4:])
    with loader(workers=1) as one, loader() as none:
        for other in (one, none):
            other.restore(middle)
            assert_same(take(other, 5), expected[4:])


def test_half_the_rows():
    with loader() as whole, loader(workers=2, rows=range(4, 8)) as half:
        for batch, part in zip(take(whole, 3), take(half, 3), strict=True):
            np.testing.assert_array_equal(part["encoder_input_tokens"], batch["encoder_input_tokens"][4:])


def bad(example):
    if example["number"] == 17:
        raise data.BadExample("number 17 is broken")
    return {"inputs": [example["number"] + 3], "targets": [1] * (example["number"] % 9)}


def test_skipped_and_truncated_examples_of_workers_are_counted():
    task = make_task([{"number": i} for i in range(40)], [bad])
    with loader(task, workers=2, bad=BadExamples()) as source:
        seen = {int(x) - 3 for batch in take(source, 10) for x in batch["encoder_input_tokens"][:, 0]}
        assert 17 not in seen and len(seen) == 39
        assert source.counts.bad == 2  # two epochs
        trimmed = source.counts.trimmed["targets"]
    with loader(task, workers=0, bad=BadExamples()) as alone:
        take(alone, 3)
        state = alone.state()
        alone.restore(state)  # what was made ahead is made, but not counted, again
        take(alone, 7)
        assert alone.counts.bad == 2 and alone.counts.trimmed["targets"] == trimmed > 5


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_example_is_one_clear_error(workers):
    task = make_task([{"number": i} for i in range(40)], [bad])
    with loader(task, workers=workers) as source, pytest.raises(data.BadExample, match="number 17 is broken"):
        take(source, 10)


def test_a_bug_of_a_preprocessor_shows_where_it_is():
    def broken(example):
        return {"inputs": 1 // 0}

    task = make_task([{"number": 1}], [broken])
    with loader(task, workers=1) as source, pytest.raises(RuntimeError, match=r"(?s)in broken.*ZeroDivisionError"):
        next(source)


def test_a_killed_worker_is_reported():
    with loader(workers=2) as source:
        next(source)
        os.kill(source._source._workers[1]._process.pid, signal.SIGKILL)
        with pytest.raises(TemporaryError, match=r"worker process 1 .*signal 9.*num_workers=0"):
            take(source, 2000)


def ends(example):
    os._exit(3)


def test_a_worker_that_ends_by_itself_is_an_error_that_stays():
    with (
        loader(make_task([{"number": 1}], [ends]), workers=1) as source,
        pytest.raises(UserError, match="exit code 3") as error,
    ):
        next(source)
    assert error.value.exit_code == 2


KILLED = """
import os, signal
from t5x import data

def killed(example):
    os.kill(os.getpid(), signal.SIGKILL)

features = {name: data.Feature(data.ByteVocabulary()) for name in ("inputs", "targets")}
source = data.FunctionDataSource(lambda split: [{"inputs": "a", "targets": "b"}] * 10_001, ["train"])
data.TaskRegistry.add("killed", source, features, [killed, data.preprocessors.tokenize])
"""


@pytest.mark.parametrize("verb", ["cache", "train"])
def test_a_killed_worker_ends_the_program_with_the_code_for_a_retry(verb, tmp_path, run_here, registries):
    (tmp_path / "killed.py").write_text(KILLED)
    arguments = {
        "cache": ["killed", "--num_workers=2", f"--output_dir={tmp_path}"],
        "train": [
            *train(tmp_path / "run", 2)[1:],
            "--gin.MIXTURE_OR_TASK_NAME='killed'",
            "--gin.train/utils.DatasetConfig.num_workers=1",
        ],
    }
    done = run_here(verb, *arguments[verb], f"--import={tmp_path / 'killed.py'}")
    assert done.code == 75, done.err
    assert done.err.count("error: ") == 1 and "killed by signal 9" in done.err and "Traceback" not in done.err


def sleepy(example):
    if example["number"] == 3:
        time.sleep(1000)
    return {"inputs": [example["number"] + 3], "targets": [1]}


def test_a_loader_closes_though_a_worker_is_stuck():
    source = loader(make_task([{"number": i} for i in range(5)], [sleepy]), workers=2)
    process = source._source._workers[0]._process

    def read():
        with pytest.raises(UserError):
            take(source, 3)

    threading.Thread(target=read, daemon=True).start()
    time.sleep(2)  # until the worker sleeps
    source.close()
    assert process.poll() is not None


def test_workers_end_with_a_loader_that_is_forgotten():
    source = loader(workers=1)
    next(source)
    process = source._source._workers[0]._process
    del source
    gc.collect()
    assert process.wait(20) is not None


def test_after_an_error_another_place_can_be_read():
    task = make_task([{"number": i} for i in range(40)], [bad])
    with loader(task, workers=1) as source:
        start = source.state()
        with pytest.raises(data.BadExample):
            take(source, 10)
        source.restore(start)
        next(source)


def test_packed_examples_that_are_all_empty_are_an_error():
    task = make_task([{"inputs": [], "targets": []}] * 5, [])
    converter = data.EncDecFeatureConverter(pack=True)
    made = TrainLoader(LaneConfig([task.pipeline("train", LENGTHS)], [1.0], converter, LENGTHS, 2))
    with made, pytest.raises(UserError, match="Every example of task 'task' is empty"):
        next(made)


def test_workers_end_with_the_loader_and_outlive_ctrl_c():
    source = loader(workers=1)
    next(source)
    process = source._source._workers[0]._process
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    take(source, 20)
    source.close()
    assert process.poll() is not None


def test_a_task_of_a_file_that_cannot_be_imported_by_name(tmp_path, registries):
    path = tmp_path / "my-tasks.py"
    path.write_text(
        "from t5x import data\n"
        "WORD = 41\n"
        "def change(example):\n"
        "    return {'inputs': [WORD], 'targets': [example['n'] + 3]}\n"
        "data.TaskRegistry.add('mine', data.FunctionDataSource(lambda split: [{'n': i} for i in range(9)],\n"
        "    splits=('train',)), {'inputs': data.Feature(data.ByteVocabulary()),\n"
        "    'targets': data.Feature(data.ByteVocabulary())}, [change])\n"
    )
    import_task_module(str(path))
    task = data.TaskRegistry.get("mine")
    with loader(task, workers=2) as source, loader(task) as alone:
        assert_same(take(source, 3), take(alone, 3))
