"""Which template a checkpoint is read with, and that it is said why."""

import dataclasses
import json

import pytest

from t5x._runtime.errors import UserError
from t5x.apps.ranking.templates import DUOT5, MONOT5, Template, template_of, with_changes
from t5x.checkpoints.formats import Source

RANKERS = {
    "castorini/monot5-base-msmarco": ("true", "false"),
    "castorini/monot5-3b-med-msmarco": ("true", "false"),
    "unicamp-dl/mt5-base-mmarco-v2": ("yes", "no"),
    "unicamp-dl/mt5-base-en-msmarco": ("yes", "no"),
    "unicamp-dl/ptt5-base-pt-msmarco-100k-v2": ("sim", "não"),
    "unicamp-dl/mt5-13b-mmarco-100k": ("▁true", "▁"),
    "unicamp-dl/mt5-3B-mmarco-en-pt": ("▁true", "▁"),
    "unicamp-dl/monoptt5-base": ("Sim", "Não"),
    "google/flan-t5-small": ("true", "false"),
}


def source(path):
    return Source("Hugging Face", str(path), None, {})


TEXTS = {"unicamp-dl/monoptt5-base": "Pergunta: {query} Documento: {document} Relevante:"}


@pytest.mark.parametrize("name", RANKERS)
@pytest.mark.parametrize("place", ["config", "directory", "cache"])
def test_public_rankers_are_known_by_their_names(name, place, tmp_path):
    owner, short = name.split("/")
    inside = {"config": "m", "directory": short, "cache": f"models--{owner}--{short}/snapshots/0f3a"}[place]
    (tmp_path / inside).mkdir(parents=True)
    config = {"_name_or_path": name} if place == "config" else {}
    (tmp_path / inside / "config.json").write_text(json.dumps(config))
    template, why = template_of(source(tmp_path / inside), object())
    assert (template.relevant, template.irrelevant) == RANKERS[name]
    text = TEXTS.get(name, "Query: {query} Document: {document} Relevant:")
    assert (template.text, template.max_length) == (text, 512)
    assert (short in why) == (owner != "google") and ("the default" in why) == (owner == "google")


def test_the_checkpoints_own_template_comes_first(tmp_path):
    class Model:
        template = Template("{query} {document}", relevant="a", irrelevant=None)

    found = template_of(source(tmp_path / "monot5"), Model())
    assert found == (Model.template, "the checkpoint's own")


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"text": 3}, "text is '3'"), ({"max_length": "x"}, "max_length is 'x'"), ({"x": 1}, "{'x': 1}")],
)
def test_an_invalid_stored_template_is_an_error_with_its_path(tmp_path, fields, words):
    with pytest.raises(UserError, match=words) as error:
        template_of(dataclasses.replace(source(tmp_path), template=fields), object())
    assert str(tmp_path) in str(error.value)


def test_pairwise_and_pointwise_rankers_are_distinguished(tmp_path):
    (tmp_path / "duot5-base-msmarco").mkdir()
    (tmp_path / "monot5-base-msmarco").mkdir()
    assert template_of(source(tmp_path / "duot5-base-msmarco"), object(), pairwise=True)[0] == DUOT5
    with pytest.raises(UserError, match=r"is a pairwise ranker\. Pass it as --pairwise"):
        template_of(source(tmp_path / "duot5-base-msmarco"), object())
    with pytest.raises(UserError, match="is a pointwise ranker"):
        template_of(source(tmp_path / "monot5-base-msmarco"), object(), pairwise=True)


def test_a_name_does_not_contradict_a_template_that_is_given(tmp_path):
    template, why = template_of(source(tmp_path / "against-duot5"), object(), has_text=True)
    assert template == MONOT5 and "the default" in why
    assert template_of(source(tmp_path / "mt5-mmarco"), object(), has_text=True)[0].relevant == "yes"


def test_options_of_the_user_override_the_stored_template():
    change = lambda **given: with_changes(MONOT5, "why", **{"text": None, "labels": None, "max_length": None} | given)
    assert change() == (MONOT5, "why")
    assert change(text="mt5")[0].relevant == "yes"
    template, why = change(text="{query}: {document}", labels="▁true,▁", max_length=64)
    assert template == Template("{query}: {document}", "▁true", "▁", 64)
    assert all(flag in why for flag in ("--template", "--labels", "--max_length"))
    assert change(labels="x")[0].irrelevant is None
    for labels in ("", "a,", "a,b,c"):
        with pytest.raises(UserError, match="--labels"):
            change(labels=labels)
