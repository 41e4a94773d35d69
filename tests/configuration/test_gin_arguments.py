"""`--gin.NAME=VALUE`: what is gin, what is a string, what is a mistake."""

import logging

import pytest

from t5x import configuration


def test_split_keeps_the_rest_and_the_order():
    argv = [
        "--a",
        "--gin.X=1",
        "--gin_bindings=Y = 2",
        "--gin_bindings",
        "Z = 3",
        "b",
        "--gin.W=a=b",
        "--",
        "--gin.V=1",
    ]
    rest, bindings = configuration.split_gin_args(argv)
    assert rest == ["--a", "b", "--", "--gin.V=1"]
    assert bindings == ["X = 1", "Y = 2", "Z = 3", "W = a=b"]


def test_rewrite_is_t5x_s():
    argv = ["prog", '--gin.MODEL_DIR="/x"', "--gin.train/utils.DatasetConfig.batch_size=64", "--other=1"]
    assert configuration.rewrite_gin_args(argv) == [
        "prog",
        '--gin_bindings=MODEL_DIR = "/x"',
        "--gin_bindings=train/utils.DatasetConfig.batch_size = 64",
        "--other=1",
    ]


@pytest.mark.parametrize("function", [configuration.split_gin_args, configuration.rewrite_gin_args])
def test_argument_without_value(function):
    with pytest.raises(configuration.ConfigurationError, match=r"--gin.X: a value is missing. Write --gin.X=VALUE"):
        function(["--gin.X"])


def test_bindings_flag_without_value():
    with pytest.raises(configuration.ConfigurationError, match="--gin_bindings needs a value"):
        configuration.split_gin_args(["--gin_bindings"])


GIN_VALUES = {
    '"/x"': "'/x'",
    "'a b'": "'a b'",
    "1_000": "1000",
    "-3": "-3",
    "1e-3": "0.001",
    "None": "None",
    "True": "True",
    "('relu',)": "('relu',)",
    "{'inputs': 64}": "{'inputs': 64}",
    "[1, 2]": "[1, 2]",
    "%OTHER": "%OTHER",
    "r'.*\\d'": "'.*\\\\d'",
}


@pytest.mark.parametrize(("given", "printed"), GIN_VALUES.items())
def test_gin_values_are_read_as_gin(project, caplog, given, printed):
    with caplog.at_level(logging.INFO, logger="t5x"):
        project.parse(bindings=[f"X = {given}"])
    assert f"X = {printed}\n" in configuration.config_str()
    assert "as the string" not in caplog.text


STRINGS = [
    "/x",
    "./x-y",
    "gs://bucket/a b",
    "wmt_t2t_ende_v003",
    "a.b",
    "",
    "it's",
    'say "hi"',
    "2024-01-01",
    "1,2",
    "007",
    "foo#bar",
    "C:\\new",
    "naïve/日本",
    "a\nb",
    "a=b",
    "-x",
    "$HOME",
]


@pytest.mark.parametrize("given", STRINGS)
def test_anything_else_is_a_string_and_the_log_says_so(project, caplog, given):
    with caplog.at_level(logging.INFO, logger="t5x"):
        project.parse(bindings=[f"train.model_dir = {given}"])
    got = configuration.configured(project.train)(
        model=0, train_dataset_cfg=0, infer_eval_dataset_cfg=0, trainer_cls=0, total_steps=0
    )
    assert got["model_dir"] == given
    assert [r.getMessage() for r in caplog.records if "as the string" in r.getMessage()] == [
        f"--gin.train.model_dir={given}: read as the string {given!r}"
    ]


@pytest.mark.parametrize("given", ["{'a': 1", "'a", '"a', "@f(", "[1", "(1, 2"])
def test_broken_gin_is_not_taken_as_a_string(project, given):
    with pytest.raises(configuration.ConfigurationError) as caught:
        project.parse(bindings=[f"X = {given}"])
    assert str(caught.value).startswith(f"--gin.X={given}: the value is not valid gin")


@pytest.mark.parametrize(("given", "meant"), [("true", "True"), ("FALSE", "False"), ("none", "None"), ("null", "None")])
def test_words_that_mean_a_python_constant(project, given, meant):
    with pytest.raises(configuration.ConfigurationError, match=f"write --gin.X={meant}, or "):
        project.parse(bindings=[f"X = {given}"])


@pytest.mark.parametrize("name", ["MODEL-DIR", "1X", "a//b.c", "a..b"])
def test_bad_names(project, name):
    with pytest.raises(configuration.ConfigurationError) as caught:
        project.parse(bindings=[f"{name} = 1"])
    assert str(caught.value).startswith(f"--gin.{name}=1: {name!r} is not a name")


def test_text_that_is_no_binding(project):
    with pytest.raises(configuration.ConfigurationError, match="not a gin statement"):
        project.parse(bindings=["what is this"])


def test_an_include_as_a_binding(project):
    project.write("more.gin", "X = 5\n")
    project.parse(bindings=["include 'more.gin'"])
    assert "X = 5\n" in configuration.config_str()


def test_wrong_arguments_are_all_reported(project):
    with pytest.raises(configuration.ConfigurationError) as caught:
        project.parse(bindings=["X = {", "train.model_dirr = 1", "nothing.here = 1", "Y = true"])
    message = str(caught.value)
    assert "4 problems" in message
    assert "--gin.train.model_dirr=1: `train` has no parameter `model_dirr`. It has: model_dir, " in message
    assert "--gin.nothing.here=1: `nothing` is not known" in message
