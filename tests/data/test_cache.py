import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.cli.cache_verb import cache_tasks
from t5x.data import cache_reader, cache_writer, example_encoding, preprocessors
from t5x.data.content_hashes import fingerprint
from t5x.data.pipeline import ConcatenateAndSplit, composite, count_cacheable
from t5x.files import atomic
from t5x.files.directory import open_directory
from tests.data.conftest import byte_features
from tests.support import commands
from tests.support.paths import REPO
from tests.support.programs import environment, reference_python

LENGTHS = {"inputs": 16, "targets": 16}


pytestmark = pytest.mark.usefixtures("caches")


def drop_or_double(example):
    """None, one or two examples."""
    number = int(example["targets"])
    return [example] * (number % 3)


def shuffle_tokens(example, seed):
    return example | {"inputs": np.random.default_rng(seed).permutation(example["inputs"])}


def copy_targets(example):
    return example | {"inputs": example["targets"]}


def make_task(path, steps=None, features=None, source=None):
    steps = [drop_or_double, preprocessors.tokenize, preprocessors.append_eos_after_trim] if steps is None else steps
    return data.Task("task", source or data.JsonLinesDataSource({"train": path}), features or byte_features(), steps)


def write_cache(task, **kwargs):
    return cache_writer.write(task, "train", **{"num_workers": 0, "examples_per_shard": 20} | kwargs)


def batches(task, count=12, pack=False, **kwargs):
    kwargs = {"shuffle": True, "seed": 3, "num_workers": 0, "pack": pack} | kwargs
    cfg = data.DatasetConfig(task, LENGTHS, "train", 4, **kwargs)
    with data.train_loader(cfg, feature_converter=data.EncDecFeatureConverter(pack=pack)) as loader:
        return [{name: array.tolist() for name, array in next(loader).items()} for _ in range(count)]


def without_caches(monkeypatch, function, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setenv("T5X_TASK_CACHES", "")
        return function(*args, **kwargs)


def is_cached(task):
    return task.pipeline("train", LENGTHS, need_text=False).cached is not None


TASKS = {
    "drops and doubles": [drop_or_double, preprocessors.tokenize, preprocessors.append_eos],
    "a random step behind": [drop_or_double, preprocessors.tokenize, shuffle_tokens],
    "a placeholder": [preprocessors.tokenize, data.CacheDatasetPlaceholder(), shuffle_tokens, preprocessors.append_eos],
    "joined": [preprocessors.tokenize, preprocessors.append_eos, ConcatenateAndSplit(7), copy_targets],
}


@pytest.mark.parametrize("steps", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("pack", [False, True])
def test_batches_are_the_same_with_and_without_a_cache(lines, monkeypatch, steps, pack):
    expected = without_caches(monkeypatch, batches, make_task(lines, steps), pack=pack)
    write_cache(make_task(lines, steps))
    monkeypatch.setattr(data.JsonLinesDataSource, "example", None)  # it is not read any more
    task = make_task(lines, steps)
    assert is_cached(task)
    assert len(task.pipeline("train", LENGTHS)) == 50
    assert batches(task, pack=pack) == expected


def test_worker_processes_read_caches_too(lines, monkeypatch):
    expected = without_caches(monkeypatch, batches, make_task(lines), count=3)
    write_cache(make_task(lines))
    assert batches(make_task(lines), count=3, num_workers=2) == expected


def test_evaluation_gets_the_same_examples(lines, monkeypatch):
    def examples():
        task = make_task(lines)
        cfg = data.DatasetConfig(task, None, "train", batch_size=8, shuffle=False, seed=0)
        found = data.eval_batches(cfg, feature_converter=data.EncDecFeatureConverter())
        return [repr(example) for batch in found for example in batch.examples]

    expected = without_caches(monkeypatch, examples)
    write_cache(make_task(lines))
    assert examples() == expected and "inputs_pretokenized" in expected[0]


def test_the_cache_ends_before_the_first_nondeterministic_step():
    @composite
    def several():
        return []

    tokenize = preprocessors.tokenize
    assert count_cacheable([tokenize, tokenize]) == 2
    for end in (shuffle_tokens, preprocessors.append_eos_after_trim, ConcatenateAndSplit(4), several):
        assert count_cacheable([tokenize, end, tokenize]) == 1
    assert count_cacheable([tokenize, data.CacheDatasetPlaceholder(), tokenize]) == 1
    bound = functools.partial(preprocessors.append_eos_after_trim, sequence_length={"inputs": 4})
    assert count_cacheable([tokenize, bound, functools.partial(shuffle_tokens, seed=1)]) == 3


def test_a_task_that_begins_with_a_random_step_has_nothing_to_cache(lines):
    with pytest.raises(UserError, match=r"'task'.*CacheDatasetPlaceholder"):
        write_cache(make_task(lines, [shuffle_tokens]))


# --- Which caches are found -------------------------------------------------------------------------------------------


def prefixed(prefix):
    return lambda example: example | {"inputs": prefix + example["inputs"]}


def helper(text):
    return text.upper()


def with_helper(example):
    return example | {"inputs": helper(example["inputs"])}


def other_helper(text):
    return text.lower()


TOKENIZE = preprocessors.tokenize
PREFIX = functools.partial(preprocessors.rekey, key_map={"inputs": "inputs", "targets": "targets"})
SWAP = functools.partial(preprocessors.rekey, key_map={"inputs": "targets", "targets": "inputs"})
FUNCTION_1 = data.FunctionDataSource(lambda split: [{"inputs": "a", "targets": "1"}], ("train",))
FUNCTION_2 = data.FunctionDataSource(lambda split: [{"inputs": "a", "targets": "2"}], ("train",))


def features(**kwargs):
    return byte_features() | {"inputs": data.Feature(**{"vocabulary": data.ByteVocabulary()} | kwargs)}


CHANGES = {
    "vocabulary": ({}, {"features": features(vocabulary=data.ByteVocabulary(extra_ids=5))}, "'inputs'"),
    "add_eos": ({}, {"features": features(add_eos=False)}, "'inputs': add_eos was True and is False"),
    "features": ({}, {"features": features() | {"more": data.Feature(data.ByteVocabulary())}}, "'more'"),
    "order": ({"steps": [PREFIX, TOKENIZE]}, {"steps": [TOKENIZE, PREFIX]}, "rekey, tokenize and are tokenize, rekey"),
    "argument": ({"steps": [PREFIX, TOKENIZE]}, {"steps": [SWAP, TOKENIZE]}, "preprocessor rekey"),
    "closure": ({"steps": [prefixed("a"), TOKENIZE]}, {"steps": [prefixed("b"), TOKENIZE]}, "preprocessor <lambda>"),
    "function": ({"source": FUNCTION_1}, {"source": FUNCTION_2}, "FunctionDataSource"),
}


@pytest.mark.parametrize("before, after, words", CHANGES.values(), ids=CHANGES)
def test_a_cache_of_another_state_of_the_task_is_refused(lines, caplog, before, after, words):
    write_cache(make_task(lines, **before))
    assert is_cached(make_task(lines, **before))
    changed = make_task(lines, **after)
    assert not is_cached(changed) and not is_cached(changed)
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and words in warnings[0] and "task/train" in warnings[0]
    with pytest.raises(UserError, match="--overwrite"):
        write_cache(changed)
    write_cache(changed, overwrite=True)
    assert is_cached(changed)


def test_a_change_of_a_function_that_a_preprocessor_calls_is_noticed(lines, monkeypatch):
    steps = [with_helper, preprocessors.tokenize]
    write_cache(make_task(lines, steps))
    monkeypatch.setitem(globals(), "helper", other_helper)
    assert not is_cached(make_task(lines, steps))


@pytest.mark.parametrize("change", ["content", "time", "another file"])
def test_a_change_of_the_files_is_noticed(lines, write, caplog, change):
    pattern = lines.replace("train.jsonl", "*.jsonl")
    write_cache(make_task(pattern))
    assert is_cached(make_task(pattern))
    if change == "content":
        Path(lines).write_text(Path(lines).read_text() + '{"inputs": "a", "targets": "1"}\n')
    elif change == "time":
        os.utime(lines, ns=(1, 1))
    else:
        write("more.jsonl", [{"inputs": "a", "targets": "1"}])
    assert not is_cached(make_task(pattern))
    assert ("1 files and has 2" if change == "another file" else "train.jsonl") in caplog.text


def test_a_cache_with_hashes_of_bytecode_is_refused(lines, caches, caplog):
    write_cache(make_task(lines))
    info = caches / "task/train/info.json"
    info.write_text(info.read_text().replace('"format": 2', '"format": 1'))
    assert not is_cached(make_task(lines))
    assert "its format is 1" in caplog.text and "`t5x cache --overwrite` rewrites it" in caplog.text


def test_values_that_a_function_memoizes_are_not_hashed():
    space = {"__name__": "__main__", "_loaded": None}
    exec("def load(split):\n    global _loaded\n    _loaded = _loaded or [split]\n    return _loaded", space)
    before = fingerprint(space["load"])
    space["load"]("train")
    assert fingerprint(space["load"]) == before


def test_files_may_move(lines, tmp_path):
    write_cache(make_task(lines))
    moved = tmp_path / "elsewhere" / "train.jsonl"
    moved.parent.mkdir()
    os.rename(lines, moved)
    assert is_cached(make_task(str(moved)))


def test_without_the_source_the_cache_is_used_as_it_is(lines, caplog):
    write_cache(make_task(lines))
    os.remove(lines)
    task = make_task(lines)
    assert batches(task, count=1)
    assert "task/train" in caplog.text and "train.jsonl" in caplog.text


def test_a_missing_or_empty_directory_is_not_a_cache(lines, caches, caplog):
    assert not is_cached(make_task(lines))
    (caches / "task/train").mkdir(parents=True)
    assert not is_cached(make_task(lines))
    assert "no info.json" in caplog.text


def test_use_cached_without_a_cache_warns_and_continues(lines, caplog):
    caplog.set_level("INFO")
    assert batches(make_task(lines), count=1, use_cached=True)
    assert "use_cached=True" in caplog.text and "'task'" in caplog.text


def test_without_texts_a_cache_serves_training_only(lines, monkeypatch, caplog):
    expected = without_caches(monkeypatch, batches, make_task(lines))
    small = write_cache(make_task(lines), drop_text=True)
    task = make_task(lines)
    assert is_cached(task) and task.pipeline("train", LENGTHS).cached is None
    assert "--drop_text" in caplog.text
    assert batches(task) == expected
    with pytest.raises(UserError, match="--drop_text"):
        write_cache(make_task(lines))
    assert small.tokens == write_cache(make_task(lines), overwrite=True).tokens


# --- Writing: stopped, gone on, damaged -------------------------------------------------------------------------------


def flaky(example):
    if "FLAKY" in os.environ and example["targets"] == "47":
        raise ConnectionError("the power went")
    return example


def test_after_a_stop_finished_shards_are_kept(lines, caches, caplog, monkeypatch):
    task = make_task(lines, [drop_or_double, flaky, preprocessors.tokenize])
    expected = without_caches(monkeypatch, batches, task)
    with monkeypatch.context() as patch:
        patch.setenv("FLAKY", "1")
        with pytest.raises(ConnectionError):
            write_cache(task)
    directory = caches / "task/train"
    assert sorted(path.name for path in directory.glob("*record")) == [*map(cache_reader.shard_name, range(2))]
    assert not list(directory.glob("*.tmp-*"))
    assert not is_cached(task) and "`t5x cache` resumes" in caplog.text
    assert batches(task) == expected  # from the source

    kept = (directory / cache_reader.shard_name(1)).stat().st_ino
    Path(atomic.unique_name(directory / cache_reader.shard_name(2))).write_text("half")
    written = write_cache(task)
    assert (written.written, written.shards) == (1, 3)
    assert (directory / cache_reader.shard_name(1)).stat().st_ino == kept
    assert not list(directory.glob("*.tmp-*"))
    assert is_cached(task) and batches(task) == expected


def test_a_shard_that_is_cut_or_missing_is_refused_and_made_again(lines, caches, caplog):
    write_cache(make_task(lines))
    shard = caches / "task/train" / cache_reader.shard_name(1)
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    assert not is_cached(make_task(lines))
    assert f"has {len(whole) - 100} bytes instead of {len(whole)}" in caplog.text
    assert write_cache(make_task(lines)).written == 1
    assert is_cached(make_task(lines)) and shard.read_bytes() == whole
    shard.unlink()
    assert not is_cached(make_task(lines)) and "is missing" in caplog.text
    assert write_cache(make_task(lines)).written == 1


def test_damage_inside_a_shard_is_found(lines, caches, caplog):
    write_cache(make_task(lines))
    shard = caches / "task/train" / cache_reader.shard_name(1)
    content = bytearray(shard.read_bytes())
    place = content.index(b"inputs")
    content[place] ^= 1
    shard.write_bytes(content)
    pipeline = make_task(lines).pipeline("train", LENGTHS)
    with pytest.raises(UserError, match=r"shard-00001.array_record .*`t5x cache`"):
        for index in range(50):
            pipeline.outputs(0, index)
    assert write_cache(make_task(lines)).written == 1
    assert "shard-00001.array_record" in caplog.text
    assert write_cache(make_task(lines)).written == 0


@pytest.mark.parametrize("name", [cache_reader.INFO, cache_reader.COMPLETED, cache_reader.shard_name(1)])
@pytest.mark.parametrize("content", [None, b"[" * 100_000, b"3", b'{"format": 1}', b'{"format": 1, "shards": [3]}'])
def test_a_cache_from_anywhere_is_not_used(lines, caches, caplog, name, content):
    write_cache(make_task(lines))
    file = caches / "task/train" / name
    file.unlink()
    if content is None:
        os.mkfifo(file)  # opening it would wait for a writer
    else:
        file.write_bytes(content)
    assert not is_cached(make_task(lines))
    assert f"{caches}/task/train" in caplog.text


def test_processes_write_the_same_shards(lines, caches):
    write_cache(make_task(lines))
    completed = caches / "task/train/COMPLETED"
    alone = completed.read_text()
    written = write_cache(make_task(lines), overwrite=True, num_workers=2)
    assert completed.read_text() == alone and written.written == 3
    # By hand: 50 examples, 0, 1 or 2 times each; ids are bytes.
    kept = [i for i in range(50) for _ in range(i % 3)]
    assert written.examples == len(kept)
    assert written.tokens == sum(len(f"question {i}" * (1 + i % 3)) + len(str(i)) for i in kept)


def test_only_one_process_writes_at_a_time(lines, caches):
    (caches / "task/train").mkdir(parents=True)
    with open_directory(caches / "task/train").locked(), pytest.raises(UserError, match="Another process is writing"):
        write_cache(make_task(lines))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_examples_are_errors_or_are_counted(write, monkeypatch, num_workers, caplog):
    lines = [json.dumps({"inputs": "a", "targets": str(i)}) for i in range(30)]
    lines[27] = "{"
    path = write("train.jsonl", "\n".join(lines))
    with pytest.raises(data.BadExample, match=r"train\.jsonl:28: not JSON"):
        write_cache(make_task(path), num_workers=num_workers)
    assert write_cache(make_task(path), skip_bad_examples=True, num_workers=num_workers).bad == 1
    expected = without_caches(monkeypatch, batches, make_task(path), skip_bad_examples=True)
    task = make_task(path)
    assert is_cached(task) and batches(task) == expected
    assert caplog.text.count("1 bad example(s) of split 'train' of task") == 1


def test_unserializable_values_raise_user_error(lines):
    with pytest.raises(UserError, match=r"train\.jsonl:1: .*'odd' contains a set"):
        write_cache(make_task(lines, [lambda example: example | {"odd": {1}}]))


def test_a_full_disk_is_reported(lines, caches, monkeypatch):
    from array_record.python import array_record_module

    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    real = array_record_module.ArrayRecordWriter
    with monkeypatch.context() as patch:
        patch.setattr(array_record_module, "ArrayRecordWriter", lambda path, options: real("/dev/full", options))
        with pytest.raises(UserError, match=r"task/train \(.* free\).*--output_dir"):
            write_cache(make_task(lines))
    assert write_cache(make_task(lines)).written == 3


# --- The command ------------------------------------------------------------------------------------------------------

TASK_FILE = """
from t5x import data
from t5x.data import preprocessors

WORDS = {"one", "two", "three", "four"}

def marked(example):
    return example | {"inputs": ("known " if example["inputs"] in WORDS else "new ") + example["inputs"]}

def add(name, path):
    features = {feature: data.Feature(data.ByteVocabulary()) for feature in ("inputs", "targets")}
    source = data.JsonLinesDataSource({"train": path, "validation": path})
    data.TaskRegistry.add(name, source, preprocessors=[marked, preprocessors.tokenize], output_features=features)

add("of_a_file:1", "train.jsonl")
add("of_another", "train.jsonl")
data.MixtureRegistry.add("of_files", ["of_a_file:1", "of_another"], default_rate=1.0)
"""


def test_the_command_caches_all_tasks_of_a_mixture(lines, write, caches, capsys, monkeypatch, registries, tmp_path):
    tasks = write("cached_tasks.py", TASK_FILE)
    monkeypatch.chdir(tmp_path)
    # In another process, whose hashes of strings are others.
    command = [sys.executable, "-m", "t5x", "cache", "--import", tasks, "of_files", "--split", "train"]
    result = subprocess.run(command, env=environment(PYTHONHASHSEED="1"), cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    head, *rows = result.stdout.splitlines()
    assert head.split() == ["task", "split", "examples", "tokens", "bytes", "seconds"]
    assert [row.split()[:3] for row in rows] == [["of_a_file:1", "train", "50"], ["of_another", "train", "50"]]

    again = commands.run(capsys, "cache", "--import", tasks, "of_a_file:1", "--split", "train")
    assert again.code == 0 and "0 of 1 shard(s) written now" in again.err
    assert is_cached(data.TaskRegistry.get("of_another"))
    commands.run(capsys, "cache", "of_a_file:1", "--split", "test").refused("has no split 'test'")


def test_missing_beam_raises_user_error(lines, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(UserError, match="pip install apache-beam"):
        write_cache(make_task(lines), runner="DirectRunner")


@pytest.mark.slow
def test_beam_writes_the_same_shards(lines, tmp_path):
    program = Path(__file__).parent / "programs/beam_cache.py"
    command = [reference_python(), program, lines, tmp_path]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(REPO)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    alone, beam = ({path.name: path.read_bytes() for path in (tmp_path / name / "task/train").iterdir()}
                   for name in ("alone", "beam"))  # fmt: skip
    assert sum("array_record" in name for name in alone) == 3
    assert beam == alone


# --- Records ----------------------------------------------------------------------------------------------------------


def test_records_keep_every_value_and_type():
    ids = np.arange(300, dtype=np.int32)
    example = {
        "ids": ids, "small": ids[:5], "negative": -ids.astype(np.int64), "empty": ids[:0], "none": None, "float": 0.1,
        "matrix": np.ones((2, 3), np.float32), "scalar": np.float32(2.5), "text": "é\ud800", "bytes": b"\0\xff",
        "nested": [ids[:2], ids[:3]], "tuple": (1, ("a", [2])), "map": {1: True, "x": np.bool_(False)}, "large": 2**70,
        "texts": np.array(["ab", "c"]), "objects": np.array(["ab", None], object), "big_endian": np.array([1], ">i4"),
    }  # fmt: skip
    (found,) = example_encoding.decode(example_encoding.encode([example]))
    assert list(found) == list(example)
    for name, value in example.items():
        assert type(found[name]) is type(value) and repr(found[name]) == repr(value), name
        if isinstance(value, np.ndarray):
            assert found[name].dtype == value.dtype and found[name].shape == value.shape
            assert found[name].flags.writeable
            np.testing.assert_array_equal(found[name], value)
    assert example_encoding.decode(example_encoding.encode([])) == []
    assert len(example_encoding.encode([{"ids": ids}])) < 2 * len(ids) + 20


def test_caches_are_written_to_another_directory(lines, caches, tmp_path, capsys):
    cache_tasks(make_task(lines), splits=["train"], output_dir=str(tmp_path / "other"), num_workers=0)
    assert (tmp_path / "other/task/train" / cache_reader.COMPLETED).is_file()
    assert not is_cached(make_task(lines))
    assert "train" in capsys.readouterr().out
