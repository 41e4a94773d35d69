"""Our tasks under the names of the package t5, compared with t5's own."""

import json
from pathlib import Path

import pytest

from t5x import configuration
from t5x._runtime import imports
from t5x._runtime.errors import UserError
from t5x.data import tasks
from t5x.data.dataset_config import import_task_module
from t5x.examples import t5_tasks
from tests.support.programs import reference_answers

PROGRAM = Path(__file__).parent / "programs/t5_task_examples.py"
PAIRS = {
    "mrpc": ("sentence1", "sentence2"), "qqp": ("question1", "question2"), "stsb": ("sentence1", "sentence2"),
    "qnli": ("question", "sentence"), "rte": ("sentence1", "sentence2"), "wnli": ("sentence1", "sentence2"),
}  # fmt: skip


def raw_example(name: str) -> dict:
    if name.startswith("wmt"):
        return {"en": "It is good.", "de": "Es ist gut.", "fr": "C'est bon.", "ro": "E bine."}
    if name.startswith("c4"):
        return {"text": "A document."}
    benchmark = name.split("_", 1)[1].removesuffix("_v002")
    fields = PAIRS.get(benchmark, ("sentence",) if benchmark in ("cola", "sst2") else ("hypothesis", "premise"))
    label = 3.15 if benchmark == "stsb" else 1
    return {field: f"The {field}." for field in fields} | {"label": label, "idx": 7}


@pytest.fixture(scope="module")
def theirs() -> dict:
    jobs = {name: raw_example(name) for name in t5_tasks.names()}
    found = json.loads(reference_answers(PROGRAM, jobs, "answers.json").read_text())
    if found is None:
        pytest.skip("t5 needs packages that are not installed: see docs/seqio.md")
    return found


@pytest.mark.parametrize("name", t5_tasks.names())
@pytest.mark.nightly
def test_a_task_is_that_of_t5(theirs, name):
    recipe, expected = t5_tasks._RECIPES[name], theirs[name]
    assert recipe.dataset.partition(":")[0] == expected["dataset"]
    made = recipe.preprocessors[0](raw_example(name))
    assert {key: made[key] for key in ("inputs", "targets") if made.get(key) is not None} == expected["texts"]
    if recipe.postprocess_fn is not None:
        found = [recipe.postprocess_fn(text, example=None) for text in (expected["texts"]["targets"], "nothing")]
        assert found == expected["postprocessed"]
    assert len(recipe.metric_fns) == expected["metrics"]
    assert expected["required"] == {"inputs": False, "targets": True}


@pytest.mark.parametrize("module", ["t5.data.mixtures", "t5.data.tasks"])
def test_without_t5_the_tasks_of_the_package_are_used(module):
    """This environment does not have t5."""
    assert import_task_module(module) is t5_tasks
    with pytest.raises(ModuleNotFoundError):
        imports.import_module("t5.models")


def test_gin_files_import_them(tmp_path):
    (tmp_path / "a.gin").write_text("from __gin__ import dynamic_registration\nimport t5.data.mixtures\n")
    (tmp_path / "b.gin").write_text("from __gin__ import dynamic_registration\nfrom t5.data import mixtures\n")
    configuration.clear()
    try:
        configuration.parse(gin_files=[str(tmp_path / "a.gin"), str(tmp_path / "b.gin")], entry_points={})
    finally:
        configuration.clear()


def test_a_task_without_its_package_names_the_remedy():
    with pytest.raises(UserError, match="tensorflow-datasets"):  # which this environment does not have either
        tasks.get_mixture_or_task("wmt_t2t_ende_v003")
    with pytest.raises(UserError, match="pip install --no-deps t5"):
        tasks.get_mixture_or_task("super_glue_boolq_v102")
