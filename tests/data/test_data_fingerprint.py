"""What belongs to a position in the data: a change of it is noticed, and nothing else is."""

import functools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.data import cache_writer, content_hashes, preprocessors, seqio_bridge
from t5x.data.dataset_config import import_task_module
from t5x.data.file_tasks import pair
from t5x.data.lanes import BadExamples, LaneConfig
from t5x.data.loader import TrainLoader
from tests.support import programs

from .conftest import byte_features, make_task

LENGTHS = {"inputs": 8, "targets": 8}
PAIRS = [{"inputs": f"number {i:03}", "targets": str(i)} for i in range(50)]


def loader(*tasks, lengths=LENGTHS, pack=False, batch_size=4, rows=None, num_workers=0, **options):
    pipelines = [task.pipeline("train", lengths, runtime_preprocessors=None) for task in tasks]
    converter = data.EncDecFeatureConverter(pack=pack)
    config = LaneConfig(pipelines, [1.0] * len(tasks), converter, lengths, batch_size, **options)
    return TrainLoader(config, rows=rows, num_workers=num_workers)


def saved(source):
    """The position with its fingerprint, as a checkpoint holds them."""
    return json.loads(json.dumps(source.state() | {"fingerprint": source.start_fingerprint().result(60)}))


def changes(before, now):
    return now.changes(saved(before), now.start_fingerprint().result(60))


def file_task(path, prefix="", features=None, steps=()):
    as_pair = functools.partial(pair, inputs="inputs", targets="targets", prefix=prefix)
    kinds = {".jsonl": data.JsonLinesDataSource, ".tsv": data.TsvDataSource}
    source = kinds[os.path.splitext(path.removesuffix(".gz"))[1]]({"train": path, "validation": path})
    return data.Task("task", source, features or byte_features(), [as_pair, *steps, preprocessors.tokenize])


# --- Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train.jsonl", "moved/train.jsonl", "renamed.jsonl", "train.jsonl.gz"])
def test_the_same_content_is_the_same_wherever_it_lies(write, name):
    first = loader(file_task(write("first/train.jsonl", PAIRS)))
    path = write(name, PAIRS)
    os.utime(path, (1, 1))
    assert changes(first, loader(file_task(path))) == []


@pytest.mark.parametrize("keep_times", [False, True])
def test_an_edited_line_is_noticed(write, keep_times):
    path = write("train.jsonl", PAIRS)
    before = loader(file_task(path))
    state, times = saved(before), os.stat(path)
    write("train.jsonl", [*PAIRS[:25], {"inputs": "number 9Z5", "targets": "25"}, *PAIRS[26:]])
    if keep_times:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert os.path.getsize(path) == times.st_size
    now = loader(file_task(path))
    (change,) = now.changes(state, now.start_fingerprint().result(60))
    assert "train.jsonl" in change and "2,090 bytes, now 2,090" in change


def test_files_that_were_added_or_reordered_are_noticed(write, tmp_path):
    halves = [write("a/1.jsonl", PAIRS[:25]), write("a/2.jsonl", PAIRS[25:])]
    before = loader(file_task(str(tmp_path / "a/*.jsonl")))
    write("b/1.jsonl", PAIRS[25:]), write("b/2.jsonl", PAIRS[:25])
    assert len(changes(before, loader(file_task(str(tmp_path / "b/*.jsonl"))))) == 2
    shutil.copy(halves[0], tmp_path / "a/3.jsonl")
    (count, found) = changes(before, loader(file_task(str(tmp_path / "a/*.jsonl"))))
    assert "num_examples is 75, not 50" in count and "2 files and has 3" in found


def test_a_stored_digest_is_of_the_content_even_if_mtimes_are_restored(write, tmp_path, monkeypatch):
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(content_hashes, "_WORTH_KEEPING", 1)
    monkeypatch.setattr(content_hashes, "_SETTLED", 0)
    path = write("train.jsonl", PAIRS)
    stamp = os.stat(path)
    copy = content_hashes.LocalCopy(path, path, "")
    first = content_hashes.hash_data_files([copy])
    (kept,) = (tmp_path / "cache/data/digests").iterdir()
    when = kept.stat().st_mtime_ns
    assert (
        content_hashes.hash_data_files([copy]) == first and kept.stat().st_mtime_ns == when
    )  # it was not hashed again
    time.sleep(0.02)
    with open(path, "r+b") as file:
        file.write(b'{"inputs": "NUMBER')
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert os.stat(path).st_mtime_ns == stamp.st_mtime_ns and os.stat(path).st_ino == stamp.st_ino
    assert content_hashes.hash_data_files([copy]) != first
    kept.write_text("{")
    assert content_hashes.hash_data_files([copy]) != first


def test_samples_of_very_large_files_are_hashed(tmp_path, monkeypatch):
    monkeypatch.setattr(content_hashes, "_ALWAYS_WHOLE", 1000)
    monkeypatch.setattr(content_hashes, "_ALL_WHOLE", 10_000)
    monkeypatch.setattr(content_hashes, "_BLOCK", 10)
    large, small = tmp_path / "large", tmp_path / "small"
    large.write_bytes(bytes(100_000)), small.write_bytes(bytes(1000))
    copies = [content_hashes.LocalCopy(str(path), path.name, "") for path in (large, small)]

    def digests_after(path, at):
        content = bytearray(path.read_bytes())
        content[at] ^= 1
        path.write_bytes(content)
        return [digest for _, _, digest in content_hashes.hash_data_files(copies)]

    first = [digest for _, _, digest in content_hashes.hash_data_files(copies)]
    assert digests_after(large, 500) == first  # between the blocks
    ends = digests_after(large, 99_999)
    assert ends[0] != first[0] and ends[1] == first[1]
    assert digests_after(small, 500)[1] != first[1]  # always in full


def test_very_many_files_share_one_digest(tmp_path, monkeypatch):
    monkeypatch.setattr(content_hashes, "_LISTED", 3)
    for name in "abcd":
        (tmp_path / name).write_text(name)
    copies = [content_hashes.LocalCopy(str(tmp_path / name), name, "") for name in "abcd"]
    (before,) = content_hashes.hash_data_files(copies)
    (tmp_path / "c").write_text("C")
    (after,) = content_hashes.hash_data_files(copies)
    assert before[:2] == after[:2] == ["a and 3 more", 4] and before[2] != after[2]


# --- Preprocessing ----------------------------------------------------------------------------------------------------


def test_changed_preprocessing_is_noticed(write):
    path = write("train.jsonl", PAIRS)
    before = loader(file_task(path, "old: "))
    assert changes(before, loader(file_task(path, "old: "))) == []
    (change,) = changes(before, loader(file_task(path, "new: ")))
    assert "pair" in change and "prefix was 'old: ' and is 'new: '" in change
    (change,) = changes(before, loader(file_task(path, "old: ", steps=[preprocessors.append_eos])))
    assert "pair, tokenize and are pair, append_eos, tokenize" in change
    (change,) = changes(before, loader(file_task(path, "old: "), lengths={"inputs": 9, "targets": 8}))
    assert "inputs was 8 and is 9" in change
    (change,) = changes(before, loader(file_task(path, "old: "), pack=True))
    assert "pack was False and is True" in change
    extra = {name: data.Feature(data.ByteVocabulary(extra_ids=10)) for name in LENGTHS}
    assert ["vocabulary" in one for one in changes(before, loader(file_task(path, "old: ", extra)))] == [True, True]
    without = {name: data.Feature(data.ByteVocabulary(), add_eos=False) for name in LENGTHS}
    assert all("add_eos" in one for one in changes(before, loader(file_task(path, "old: ", without))))


def test_allowed_changes_are_not_reported(write):
    path = write("train.jsonl", PAIRS)
    before = loader(file_task(path))
    for options in ({"batch_size": 6}, {"rows": range(2)}, {"trim": False}, {"bad": BadExamples()}):
        assert changes(before, loader(file_task(path), **options)) == []
    with loader(file_task(path), num_workers=1) as now:
        assert changes(before, now) == []


def test_each_task_of_a_mixture_is_compared(write):
    def tasks(content):
        return [file_task(write("one.jsonl", PAIRS)), make_task(content, name="other")]

    before = loader(*tasks(PAIRS))
    assert changes(before, loader(*tasks(PAIRS))) == []
    (change,) = changes(before, loader(*tasks([*PAIRS[:7], *PAIRS[:43]])))
    assert change.startswith("task other: ") and "examples" in change


def test_a_users_source_is_compared_by_its_examples():
    examples = [{"inputs": str(i), "targets": ""} for i in range(20_000)]
    task = lambda examples: make_task(examples)
    before = loader(task(examples))
    assert changes(before, loader(make_task(tuple(examples)))) == []
    edited = [*examples[:12_345], {"inputs": "other", "targets": ""}, *examples[12_346:]]
    (change,) = changes(before, loader(task(edited)))
    assert "the examples of the source FunctionDataSource" in change


class Slow(data.DataSource):
    splits = ("train",)

    def __init__(self, path, numbers):
        self.path, self.numbers = path, numbers

    def num_examples(self, split):
        return len(self.numbers)

    def example(self, split, index):
        if self.numbers[index] < 0:
            raise data.BadExample("negative")
        return {"inputs": np.array([self.numbers[index]]), "targets": [object]}

    def location(self, split, index):
        return f"{self.path}: {index}"


def test_a_source_class_of_the_users_own_is_compared_by_its_examples():
    task = lambda path, numbers: data.Task("slow", Slow(path, numbers), byte_features())
    before = loader(task("here", [3, -1, 5]))
    assert changes(before, loader(task("there", [3, -1, 5]))) == []
    assert len(changes(before, loader(task("here", [3, -1, 6])))) == 1


def test_a_source_that_cannot_be_hashed_is_not_compared(caplog):
    class Broken(Slow):
        def content_fingerprint(self, split):
            raise RuntimeError("no connection")

    caplog.set_level("INFO")
    task = data.Task("slow", Broken("x", [3]), byte_features())
    assert changes(loader(task), loader(task)) == []
    assert "no connection" in caplog.text and "'slow': no fingerprint" in caplog.text


TASKS = """
import os
import random
import re

import numpy as np
from t5x import data

WORDS = {{"one", "two", "three", "four"}}
NUMBER = {{word: len(word) for word in WORDS}}  # in any order
RANDOM, GENERATOR, ENVIRON = random.Random(), np.random.default_rng(), os.environ
PATTERN = re.compile("a+")
MEMO = {{}}

class Prefix:
    def __init__(self, prefix):
        self.prefix = prefix

    def __call__(self, example):
        return example | {{"inputs": self.prefix + example["inputs"]}}

def marked(example, mark={mark!r}):
    if RANDOM.random() < 0 or GENERATOR.random() < 0 or "NOWHERE" in ENVIRON or not PATTERN:
        return None
    MEMO[example["inputs"]] = len(MEMO)
    return example | {{"inputs": mark + helped(example["inputs"])}}

def helped(text):
    return text + {helped!r} if text in WORDS else text + str(NUMBER.get(text, 0))

suffix = {suffix!r}
features = {{name: data.Feature(data.ByteVocabulary()) for name in ("inputs", "targets")}}
source = data.FunctionDataSource(lambda split: [{{"inputs": "a", "targets": "b"}}] * 9, ["train"])
steps = [marked, Prefix({prefix!r}), lambda example: example | {{"targets": example["targets"] + suffix}}]
data.TaskRegistry.add(
    "mine", source, preprocessors=[*steps, data.preprocessors.tokenize], output_features=features
)
"""
GIVEN = {"mark": "m", "helped": "h", "suffix": "s", "prefix": "p"}
PROGRAM = """
import json, sys
from t5x import data
from t5x.data.dataset_config import import_task_module
from t5x.data.lanes import LaneConfig
from t5x.data.loader import TrainLoader
import_task_module(sys.argv[1])
lengths = {"inputs": 8, "targets": 8}
pipeline = data.TaskRegistry.get("mine").pipeline("train", lengths)
source = TrainLoader(LaneConfig([pipeline], [1.0], data.EncDecFeatureConverter(), lengths, 4))
print(json.dumps(source.state() | {"fingerprint": source.start_fingerprint().result(60)}))
"""


def own_loader(write, **given):
    data.TaskRegistry.reset()
    path = write(f"own_tasks_{'_'.join(given.values())}.py", TASKS.format(**(GIVEN | given)))
    import_task_module(path)
    return loader(data.TaskRegistry.get("mine"))


def test_functions_of_the_users_are_compared_by_their_code(write, registries):
    before = own_loader(write)
    assert changes(before, own_loader(write, mark="m")) == []  # a copy of the module
    for given, name in (({"mark": "M"}, "marked"), ({"helped": "H"}, "marked"), ({"suffix": "S"}, "<lambda>"),
                        ({"prefix": "P"}, "Prefix")):  # fmt: skip
        (change,) = changes(before, own_loader(write, **given))
        assert name in change


def test_another_process_with_other_hashes_and_random_states_computes_the_same(write, registries):
    now = own_loader(write)
    path = write("of_another_process.py", TASKS.format(**GIVEN))
    for seed in ("1", "2"):
        env = programs.environment(PYTHONHASHSEED=seed, SOMETHING=seed)
        done = subprocess.run([sys.executable, "-c", PROGRAM, path], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert now.changes(json.loads(done.stdout), now.start_fingerprint().result(60)) == []


def test_memoized_values_of_functions_are_not_hashed(write, registries):
    with own_loader(write) as before:
        state = saved(before)
        next(before)
        with loader(data.TaskRegistry.get("mine")) as now:  # in the same process: MEMO is filled
            assert now.changes(state, now.start_fingerprint().result(60)) == []


def test_a_fingerprint_of_another_format_is_not_compared(write, caplog):
    """An earlier version of t5x wrote format 1."""
    caplog.set_level("INFO")
    path = write("train.jsonl", PAIRS)
    state = saved(loader(file_task(path, "old: ")))
    state["fingerprint"]["format"] = 1
    now = loader(file_task(path, "new: "))
    assert now.changes(state, now.start_fingerprint().result(60)) == []
    assert "another version of t5x" in caplog.text


def test_code_without_source_is_not_compared_between_versions_of_python():
    def task(result):
        exec(f"def step(example):\n    return example | {{'inputs': {result!r}}}", space := {"__name__": "__main__"})
        return make_task(PAIRS, [space["step"], preprocessors.tokenize])

    state = saved(loader(task("a")))
    assert changes(loader(task("a")), loader(task("a"))) == []
    assert len(changes(loader(task("a")), loader(task("b")))) == 1
    (step, _) = state["fingerprint"]["tasks"]["task"]["preprocessors"]
    step["hash"] = "another 3.9"
    now = loader(task("a"))
    assert now.changes(state, now.start_fingerprint().result(60)) == []


# --- Caches and copies ------------------------------------------------------------------------------------------------


def test_a_cache_is_of_the_same_data_even_without_its_source(write, tmp_path, monkeypatch):
    path = write("train.jsonl", PAIRS)
    before = loader(file_task(path))
    monkeypatch.setenv("T5X_TASK_CACHES", str(tmp_path / "caches"))
    cache_writer.write(file_task(path), "train", num_workers=0)
    now = loader(file_task(path))
    assert now._config.pipelines[0].cached is not None
    assert changes(before, now) == []
    state = saved(before)
    os.remove(path)
    now = loader(file_task(path))
    assert now._config.pipelines[0].cached is not None
    assert now.changes(state, now.start_fingerprint().result(60)) == []


def test_a_cache_of_an_earlier_version_is_not_compared(write, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    path = write("train.jsonl", PAIRS)
    before = loader(file_task(path))
    monkeypatch.setenv("T5X_TASK_CACHES", str(tmp_path / "caches"))
    info = Path(cache_writer.write(file_task(path), "train", num_workers=0).path) / "info.json"
    info.write_text(json.dumps({k: v for k, v in json.loads(info.read_text()).items() if k != "content"}))
    assert changes(before, loader(file_task(path))) == []
    assert "'task': no fingerprint" in caplog.text


def test_a_seqio_task_that_is_copied_again_is_the_same(tmp_path):
    examples = [{"inputs": np.array([i, 1], np.int32), "targets": np.array([1], np.int32)} for i in range(300)]

    def copied(place, examples):
        seqio_bridge._stage(str(tmp_path / place), {}, "task", iter(examples))
        path = str(tmp_path / place / "examples.array_record")
        source = data.ArrayRecordDataSource({"train": path}, decode_fn=seqio_bridge._decode)
        return loader(data.Task("task", source, byte_features()))

    before = copied("here", examples)
    assert changes(before, copied("there", examples)) == []
    assert len(changes(before, copied("other", [*examples[:-1], examples[0]]))) == 1


# --- Positions --------------------------------------------------------------------------------------------------------


def test_a_position_without_fingerprint_is_compared_as_before(caplog):
    caplog.set_level("INFO")
    state = loader(make_task(PAIRS)).state()
    now = loader(make_task([*PAIRS[1:], PAIRS[0]]))
    fingerprint = now.start_fingerprint().result(60)
    assert now.changes(state, fingerprint) == []
    assert "has no fingerprint" in caplog.text
    assert now.changes(state | {"seed": 7}, fingerprint) == ["seed is 0, not 7"]


def test_a_position_can_be_taken_by_changed_data():
    with loader(make_task(PAIRS)) as before:
        next(before), next(before)
        state = before.state()
    with loader(make_task(PAIRS[:40]), batch_size=6) as now:
        with pytest.raises(UserError, match="num_examples is 40, not 50"):
            now.restore(state)
        now.restore(state, changed_data=True)
        assert now.state()["batches"] == 2 and now.state()["lanes"] == [[0, 6, 0, 2, 0, 0, 0]]
        next(now)
    two = loader(make_task(PAIRS), make_task(PAIRS, name="other"))
    with pytest.raises(UserError, match=r"another number of tasks.*restart"):
        two.restore(state, changed_data=True)


def test_unhashable_values_count_by_their_name(caplog):
    caplog.set_level("INFO")

    def task(number):
        deep = [number]
        for _ in range(100_000):
            deep = [deep]
        return make_task(PAIRS, [lambda example: example if deep else None, preprocessors.tokenize])

    assert changes(loader(task(1)), loader(task(2))) == []
    assert "<lambda>" in caplog.text and "name only" in caplog.text
