import functools
import sys

import numpy as np
import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.data import preprocessors
from t5x.data.content_hashes import fingerprint
from t5x.data.pipeline import count_cacheable
from t5x.data.tasks import task_rates

from .conftest import byte_features, make_task

LENGTHS = {"inputs": 8, "targets": 8}


def add(name, **kwargs):
    source = data.FunctionDataSource(lambda split: [{"inputs": "a", "targets": "b"}], splits=("train",))
    return data.TaskRegistry.add(name, source=source, output_features=byte_features(), **kwargs)


def outputs(task, epoch=0, index=0, **kwargs):
    return task.pipeline("train", LENGTHS, **kwargs).outputs(epoch, index)


def test_a_registered_task_is_found(registries):
    metric = len
    task = add("sum", metric_fns=[metric], shuffle_buffer_size=1000)
    assert data.get_mixture_or_task("sum") is data.TaskRegistry.get("sum") is task
    assert data.get_mixture_or_task(task) is task
    assert "sum" in data.TaskRegistry.names()
    assert (task.splits, task.num_input_examples("train"), task.metric_fns) == (("train",), 1, (metric,))
    data.TaskRegistry.remove("sum")
    assert "sum" not in data.TaskRegistry.names()


def test_a_name_is_taken_once(registries):
    add("sum")
    with pytest.raises(UserError, match=r"'sum'.*TaskRegistry\.remove"):
        add("sum")
    with pytest.raises(UserError, match="'sum'"):
        data.MixtureRegistry.add("sum", ["sum"], default_rate=1)


def test_an_unknown_name_lists_similar_ones_and_explains_registration(registries):
    add("wmt14_ende_v003")
    with pytest.raises(UserError) as error:
        data.get_mixture_or_task("wmt_ende_v003")
    assert "wmt14_ende_v003" in str(error.value)
    assert "MIXTURE_OR_TASK_MODULE" in str(error.value)


def test_postprocessing(registries):
    plain = add("plain")
    assert plain.postprocess_fn("3", example={}, is_target=False) == "3"
    task = add("number", postprocess_fn=lambda text, example, is_target: (int(text), is_target))
    assert task.postprocess_fn("3", example={}, is_target=True) == (3, True)


def test_mixtures(registries):
    for name in "abc":
        add(name)
    data.MixtureRegistry.add("ab", [("a", 2.0), "b"], default_rate=1.0)
    mixture = data.MixtureRegistry.add("all", ["ab", "c", "a"], default_rate=lambda task: 1.0)
    assert [task.name for task in data.get_subtasks(mixture)] == ["a", "b", "c"]
    assert (mixture.splits, mixture.num_input_examples("train")) == (("train",), 3)
    assert mixture.output_features == byte_features()
    assert data.get_subtasks(data.get_mixture_or_task("c")) == [data.TaskRegistry.get("c")]


@pytest.mark.parametrize(
    ("tasks", "rate", "complaint"),
    [
        (["a"], None, "no rate"),
        ([("a", 0.0)], None, "rates are positive"),
        ([("a", -1)], None, "rates are positive"),
        ([("a", float("nan"))], None, "rates are positive"),
        ([("a", "2")], None, "the rate of 'a' is '2'"),
        (["a", "a"], 1, "twice"),
        ([], 1, "no tasks"),
        (["nowhere"], 1, "no task or mixture 'nowhere'"),
    ],
)
def test_bad_mixtures(registries, tasks, rate, complaint):
    add("a")
    with pytest.raises(UserError, match=complaint):
        data.MixtureRegistry.add("mixture", tasks, default_rate=rate)
    assert "mixture" not in data.MixtureRegistry.names()


def test_rates_may_be_numbers_of_numpy(registries):
    for name in "ab":
        add(name)
    mixture = data.MixtureRegistry.add("ab", [("a", np.float32(3)), ("b", lambda task: np.int64(1))])
    rates = {task.name: rate for task, rate in task_rates(mixture).items()}
    assert rates == {"a": 3, "b": 1} and all(type(rate) is float for rate in rates.values())


def test_mixture_of_unlike_features(registries):
    add("a")
    features = {"inputs": data.Feature(data.ByteVocabulary(extra_ids=3))}
    source = data.FunctionDataSource(lambda split: [{}], splits=("train",))
    data.TaskRegistry.add("b", source, features)
    with pytest.raises(UserError, match="'a' and 'b' differ"):
        _ = data.MixtureRegistry.add("ab", ["a", "b"], default_rate=1).output_features


def test_finished_examples():
    task = make_task([{"inputs": "ab", "targets": "c", "id": 1}], [preprocessors.tokenize_and_append_eos])
    (example,) = outputs(task)
    assert example["inputs"].tolist() == [100, 101, 1]
    assert example["inputs"].dtype == np.int32
    assert (example["inputs_pretokenized"], example["id"]) == ("ab", 1)


def test_dropping_and_multiplying():
    def split_and_filter(example):
        return ({"inputs": [int(c)], "targets": [int(c)]} for c in example["inputs"] if c != "0")

    task = make_task([{"inputs": "102"}, {"inputs": "000"}], [split_and_filter, data.CacheDatasetPlaceholder()])
    assert [example["inputs"].tolist() for example in outputs(task)] == [[1], [2]]
    assert outputs(task, index=1) == []
    assert outputs(make_task([{"inputs": "x"}], [lambda example: None])) == []


def test_preprocessors_get_what_they_ask_for_unless_it_is_bound():
    seen = {}

    def asks(example, output_features, sequence_length, seed, other="own"):
        seen.update(output_features=output_features, sequence_length=sequence_length, seed=seed, other=other)
        return example

    task = make_task([{"inputs": [1], "targets": [1]}], [asks])
    outputs(task)
    assert (seen["output_features"], seen["sequence_length"], seen["other"]) == (task.output_features, LENGTHS, "own")
    assert isinstance(seen["seed"], int)
    outputs(make_task([{"inputs": [1], "targets": [1]}], [functools.partial(asks, sequence_length=None, seed=5)]))
    assert (seen["sequence_length"], seen["seed"]) == (None, 5)


def test_seeds_are_a_function_of_everything_that_matters():
    def note_seed(example, seed):
        return example | {"seeds": [*example.get("seeds", []), seed]}

    def twice(example):
        return [dict(example), dict(example)]

    task = make_task([{"inputs": [1], "targets": [1]}] * 2, [note_seed, note_seed, twice, note_seed])

    def seeds(**kwargs):
        return [example["seeds"] for example in outputs(task, **kwargs)]

    assert seeds() == seeds()
    runs = [seeds(), seeds(epoch=1), seeds(index=1), seeds(seed=1)]
    distinct = {seed for run in runs for example in run for seed in example}
    assert len(distinct) == 4 * (2 + 2)  # two before the split, one for each half after it
    assert all(0 <= seed < 2**63 for seed in distinct)


def test_runtime_preprocessors_come_last():
    task = make_task([{"inputs": "a", "targets": "b"}])
    (example,) = outputs(task, runtime_preprocessors=[lambda example: example | {"inputs": example["inputs"][:1]}])
    assert example["inputs"].tolist() == [100]


def test_a_missing_field_is_named_with_its_place(write):
    path = write("x.jsonl", [{"question": "a", "answer": "b"}, {"question": "a", "reply": "b"}])
    source = data.JsonLinesDataSource({"train": path})
    step = functools.partial(preprocessors.rekey, key_map={"inputs": "question", "targets": "answer"})
    task = data.Task("qa", source, byte_features(), [step, preprocessors.tokenize])
    assert len(outputs(task)) == 1
    with pytest.raises(data.BadExample) as error:
        outputs(task, index=1)
    for part in (f"{path}:2", "'answer'", "question, reply", "rekey", "qa"):
        assert part in str(error.value)


def test_a_key_error_of_the_preprocessors_own_is_left_alone_with_a_note():
    def label(example):
        return {"targets": {"yes": 1}[example["inputs"]]}

    with pytest.raises(KeyError, match="maybe") as error:
        outputs(make_task([{"inputs": "maybe"}], [label]))
    assert "label of task task" in error.value.__notes__[0]


@pytest.mark.parametrize(
    ("made", "complaint"),
    [
        ({"inputs": [1]}, "task task .*'targets'.* only inputs.*rekey"),
        ({"inputs": [1], "targets": "text"}, "'targets' of task task .*'text'.*tokenize"),
        ({"inputs": [1], "targets": [[1]]}, "has 2 dimension"),
        ({"inputs": [1], "targets": [1.5]}, "float64 .*int32"),
        ({"inputs": [1], "targets": [7, 2**33]}, "8589934592.* int32"),
        ({"inputs": [1], "targets": [[1], [2, 3]]}, "feature 'targets'"),
        (True, "returned a bool"),
        ("text", "returned a str"),
        ([3], "returned a list"),
    ],
)
def test_bad_outputs(made, complaint):
    with pytest.raises(data.BadExample, match=complaint) as error:
        outputs(make_task([{}], [lambda example: made]))
    assert "example 0 of" in str(error.value)


def test_a_function_of_a_tf_data_dataset_raises_user_error():
    def lower(dataset):
        return dataset.map(lambda example: example)

    with pytest.raises(UserError, match=r"lower of task task .*method map") as error:
        outputs(make_task([{"inputs": "A"}], [lower]))
    assert "docs/seqio.md" in str(error.value) and not isinstance(error.value, data.BadExample)

    def own_fault(example):
        return None.map

    with pytest.raises(AttributeError, match="map"):
        outputs(make_task([{"inputs": "A"}], [own_fault]))


def test_the_decorator_of_seqio():
    @data.map_over_dataset
    def ids(example, output_features):
        return {name: [len(name)] for name in output_features}

    @data.map_over_dataset(num_seeds=1)
    def one(example, seed, below=2**31):
        assert len(seed) == 2 and all(0 <= number < below for number in seed)
        return example | {"inputs": seed}

    @data.map_over_dataset(num_seeds=2)
    def two(example, seeds):
        first, second = seeds
        assert first != second
        return example | {"targets": [*first, *second]}

    task = make_task([{}], [ids, functools.partial(one, below=2**31), two])
    found = [[example[name].tolist() for name in ("inputs", "targets")] for e in (0, 1) for example in outputs(task, e)]
    assert found[0] != found[1] and list(map(len, found[0])) == [2, 4]
    assert found[0] == [outputs(task)[0][name].tolist() for name in ("inputs", "targets")]
    assert count_cacheable(task.preprocessors) == 1
    made = [data.map_over_dataset(f, num_seeds=1) for f in (lambda e, seed: {"a": 1}, lambda e, seed: {"a": 2})]
    assert fingerprint(made[0]) != fingerprint(made[1])
    with pytest.raises(UserError, match="has no parameter 'seed'"):
        data.map_over_dataset(lambda example: example, num_seeds=1)


def test_features_that_need_not_be_there():
    features = byte_features() | {"targets": data.Feature(data.ByteVocabulary(), required=False, dtype=np.int64)}
    source = data.FunctionDataSource(lambda split: [{"inputs": "a"}, {"inputs": "a", "targets": ""}], ("train",))
    task = data.Task("task", source, features, [preprocessors.tokenize])
    assert "targets" not in outputs(task)[0]
    assert outputs(task, index=1)[0]["targets"].dtype == np.int64


def test_an_unknown_split_is_named(registries):
    with pytest.raises(UserError, match=r"'sum' has no split 'test'.*'train'"):
        add("sum").pipeline("test")


def test_a_missing_vocabulary_is_not_a_bad_example(tmp_path):
    features = {"inputs": data.Feature(data.SentencePieceVocabulary(str(tmp_path / "none.model")))}
    source = data.FunctionDataSource(lambda split: [{"inputs": "a"}], ("train",))
    with pytest.raises(UserError, match=r"none\.model") as error:
        data.Task("task", source, features, [preprocessors.tokenize]).pipeline("train")
    assert not isinstance(error.value, data.BadExample)


def test_wrong_sources_and_features():
    with pytest.raises(UserError, match=r"not a t5x\.data source"):
        data.Task("task", [{"inputs": "a"}], byte_features())
    with pytest.raises(UserError, match="not a Feature"):
        data.Task("task", make_task([]).source, {"inputs": data.ByteVocabulary()})


@pytest.fixture
def imports(registries):
    modules, path = dict(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]


TASKS_PY = """
from t5x import data
data.TaskRegistry.add(
    "from_file",
    source=data.FunctionDataSource(lambda split: [{"inputs": "a"}], splits=["train"]),
    output_features={"inputs": data.Feature(data.ByteVocabulary())},
)
"""


@pytest.mark.parametrize("name", ["my_own_tasks.py", "json.py"])
def test_tasks_from_a_file(write, imports, name):
    import json

    path = write(name, TASKS_PY)
    module = data.import_task_module(path)
    assert "from_file" in data.TaskRegistry.names()
    assert data.import_task_module(path) is module
    assert sys.modules["json"] is json


def test_tasks_from_a_module_here(write, imports, tmp_path, monkeypatch):
    write("some_tasks/inner.py", TASKS_PY)
    monkeypatch.chdir(tmp_path)
    cfg = data.DatasetConfig("from_file", {"inputs": 4}, "train", 2, True, 0, module="some_tasks.inner")
    assert cfg.mixture_or_task().name == "from_file"


def test_task_modules_that_cannot_be_imported(write, imports, tmp_path):
    with pytest.raises(UserError, match="no module 'no_such_module'"):
        data.import_task_module("no_such_module.tasks")
    with pytest.raises(UserError, match=r"no file .*\.py"):
        data.import_task_module(str(tmp_path / "none.py"))
    with pytest.raises(UserError, match=r"no module 'no_such_package' \(.*needs.py:1\)"):
        data.import_task_module(write("needs.py", "import no_such_package"))
    with pytest.raises(UserError, match=r"fails.py .*ZeroDivisionError: .*fails.py:1"):
        data.import_task_module(write("fails.py", "1 / 0"))
    (tmp_path / "link.py").symlink_to(write("text.txt", ""))
    with pytest.raises(UserError, match=r"text\.txt cannot be imported"):
        data.import_task_module(str(tmp_path / "link.py"))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": None}, "batch_size is None"),
        ({"task_feature_lengths": {"inputs": 0}}, r"task_feature_lengths\['inputs'\] is 0"),
        ({"task_feature_lengths": {"inputs": "512"}}, r"task_feature_lengths\['inputs'\] is '512'"),
    ],
)
def test_bad_configurations(changes, complaint):
    good = {"mixture_or_task_name": "x", "task_feature_lengths": LENGTHS, "split": "train", "batch_size": 4}
    with pytest.raises(UserError, match=complaint):
        data.DatasetConfig(**(good | {"shuffle": True, "seed": None} | changes))
