"""`--gin.NAME=VALUE`: gin values, strings and mistakes."""

import logging

import pytest

from t5x import configuration


def test_split_keeps_other_arguments_and_the_order():
    argv = ["--a", "--gin.X=1", "--gin_bindings=Y=2", "--gin_bindings", "Z=3", "b", "--gin.W=a=b", "--", "--gin.V=1"]
    rest, bindings = configuration.split_gin_args(argv)
    assert rest == ["--a", "b", "--", "--gin.V=1"]
    assert bindings == ["X = 1", "Y=2", "Z=3", "W = a=b"]


def test_rewrite_as_t5x_does():
    argv = ["prog", '--gin.MODEL_DIR="/x"', "--gin.train/utils.DatasetConfig.batch_size=64", "--other=1"]
    assert configuration.rewrite_gin_args(argv) == [
        "prog",
        '--gin_bindings=MODEL_DIR = "/x"',
        "--gin_bindings=train/utils.DatasetConfig.batch_size = 64",
        "--other=1",
    ]


@pytest.mark.parametrize(
    ("function", "argument", "fix"),
    [
        (configuration.split_gin_args, "--gin.X", "--gin.X=VALUE"),
        (configuration.rewrite_gin_args, "--gin.X", "--gin.X=VALUE"),
        (configuration.split_gin_args, "--gin_bindings", "--gin_bindings='NAME = VALUE'"),
    ],
)
def test_argument_without_a_value(function, argument, fix):
    with pytest.raises(configuration.ConfigurationError) as caught:
        function([argument])
    assert fix in str(caught.value)
    assert isinstance(caught.value, ValueError)  # as in T5X and gin


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


def test_gin_values(project, caplog):
    with caplog.at_level(logging.INFO, logger="t5x"):
        project.parse(bindings=[f"X{i} = {value}" for i, value in enumerate(GIN_VALUES)])
    text = configuration.config_str()
    for i, printed in enumerate(GIN_VALUES.values()):
        assert f"X{i} = {printed}\n" in text
    assert not caplog.records


STRINGS = [
    *("/x", "./x-y", "gs://bucket/a b", "wmt_t2t_ende_v003", "a.b", "", "it's", 'say "hi"', "2024-01-01", "1,2", "007"),
    *("foo#bar", "C:\\new", "naïve/日本", "a\nb", "a=b", "-x", "$HOME"),
]


def test_other_values_are_strings_and_logged(project, caplog):
    with caplog.at_level(logging.INFO, logger="t5x"):
        project.parse(bindings=[f"X{i} = {value}" for i, value in enumerate(STRINGS)])
    project.parse(bindings=[f"train.model = [{', '.join(f'%X{i}' for i in range(len(STRINGS)))}]"])
    rest = dict.fromkeys(["train_dataset_cfg", "infer_eval_dataset_cfg", "trainer_cls", "model_dir", "total_steps"])
    assert project.call(**rest)["model"] == STRINGS
    assert [record.args[1] for record in caplog.records] == STRINGS


WRONG = {
    **dict.fromkeys(["X={'a': 1", "X='a", 'X="a', "X=@f(", "X=[1", "X=(1, 2"], "quotes and brackets"),
    **dict.fromkeys(["MODEL-DIR=1", "1X=1", "a//b.c=1", "a..b=1"], "--gin.NAME=VALUE"),
    "X=true": "--gin.X=True",
    "X=FALSE": "--gin.X=False",
    "X=null": "--gin.X=None",
}


@pytest.mark.parametrize("argument", WRONG)
def test_wrong_arguments(project, argument):
    with pytest.raises(configuration.ConfigurationError) as caught:
        project.parse(bindings=[argument.replace("=", " = ", 1)])
    assert str(caught.value).startswith(f"--gin.{argument}: ")
    assert WRONG[argument] in str(caught.value)


def test_text_without_an_equals_sign(project):
    with pytest.raises(configuration.ConfigurationError) as caught:
        project.parse(bindings=["what is this"])
    assert "what is this" in str(caught.value) and "--gin.NAME=VALUE" in str(caught.value)


def test_an_include_as_a_binding(project):
    project.write("more.gin", "X = 5\n")
    project.parse(bindings=["include 'more.gin'"])
    assert "X = 5\n" in configuration.config_str()


def test_all_wrong_arguments_are_reported(project):
    with pytest.raises(configuration.ConfigurationError) as caught:
        project.parse(bindings=["X = {", "train.model_dirr = 1", "nothing.here = 1", "Y = true"])
    message = str(caught.value)
    assert "4 problems" in message
    assert "--gin.train.model_dirr=1: `train` has no parameter `model_dirr`. Did you mean `model_dir`" in message
    assert "--gin.nothing.here=1: `nothing`" in message
