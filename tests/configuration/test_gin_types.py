"""Values of the wrong type are named before anything runs; nothing that could be right is refused."""

import collections.abc
import enum
import inspect
import typing

import pytest

from t5x import configuration
from t5x.configuration import annotations


class Color(enum.Enum):
    RED = "r"


class Mine:
    pass


UserId = typing.NewType("UserId", int)

FIT = [
    (3, int),
    (3, float),
    (1e-3, float),
    (True, bool),
    (1, bool),
    ("a", str),
    (None, typing.Optional[int]),  # noqa: UP045
    (None, int | None),
    (None, str),
    (None, typing.Mapping[str, int]),
    (3, int | str),
    ("NUM_REAL_TARGET_TOKENS", float | int | str | None),
    ([1, 2], typing.Sequence[int]),
    ((1, 2), list[int]),
    ([1, 2], tuple[int, int]),
    ((), tuple[int, ...]),
    (["a"], collections.abc.Iterable[str]),
    ("abc", typing.Sequence[str]),
    ([1.0, 2], typing.Sequence[float]),
    (["a"], set[str]),
    ({"a": 1}, typing.Mapping[str, int]),
    ({"a": [1]}, dict[str, list[int]]),
    ({}, dict),
    ("a", typing.Literal["a", "b"]),
    (None, typing.Literal["a", None]),
    ("RED", Color),
    ("r", Color),
    ("bfloat16", typing.Any),
    ("bfloat16", type),
    ("anything", Mine),
    (3, Mine | str),
    (3, typing.TypeVar("T")),
    (3, UserId),
    (3, typing.Annotated[int, "positive"]),
    (3, object),
    ("x", "an annotation that could not be read"),
    (None, typing.Callable[[int], int]),
]

MISFIT = [
    ("3", int),
    (3.5, int),
    (1e6, int),
    (True, int),
    (None, int),
    (None, float),
    (None, bool),
    ("0.1", float),
    (True, float),
    (2, bool),
    ("True", bool),
    (3, str),
    (b"a", str),
    ("3", int | None),
    (3, str | typing.Sequence[str]),
    (3, typing.Sequence[int]),
    ("abc", list[str]),
    ("abc", typing.Sequence[int]),
    (["a"], typing.Sequence[int]),
    ([1, 2, 3], tuple[int, int]),
    ({"a": 1}, typing.Sequence[str]),
    ([("a", 1)], typing.Mapping[str, int]),
    ("a", dict),
    ({"a": "1"}, typing.Mapping[str, int]),
    ({1: 1}, typing.Mapping[str, int]),
    ("c", typing.Literal["a", "b"]),
    (1, typing.Literal[True]),
    ("GREEN", Color),
    ("relu", typing.Callable),
    (3, typing.Callable[[int], int]),
    ("3", UserId),
    ("3", typing.Annotated[int, "positive"]),
]


@pytest.mark.parametrize(("value", "annotation"), FIT)
def test_fits(value, annotation):
    assert annotations.fits(value, annotation)


@pytest.mark.parametrize(("value", "annotation"), MISFIT)
def test_misfits(value, annotation):
    assert not annotations.fits(value, annotation)


def parameter(default=inspect.Parameter.empty, annotation=inspect.Parameter.empty):
    made = inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    return made, annotation


@pytest.mark.parametrize(
    ("default", "annotation", "value"),
    [
        (None, int, None),
        (0.5, int, 0.25),
        (True, int, False),
        (None, str, None),
    ],
)
def test_default_that_the_annotation_forgot(default, annotation, value):
    assert annotations.accepts(*parameter(default, annotation), value)


@pytest.mark.parametrize(
    ("default", "value", "expected"),
    [
        (True, "yes", False),
        (3, "64", False),
        (0.1, "1e-3", False),
        (3, "auto", True),
        (3, 0.5, True),
        (True, 3, True),
        ("x", 3, True),
        (None, "x", True),
    ],
)
def test_without_annotation_only_plain_slips_are_refused(default, value, expected):
    assert annotations.accepts(*parameter(default), value) is expected


def problems(project, *bindings: str) -> str:
    project.parse("run.gin", "model.gin", bindings=[*project.given, *bindings])
    with pytest.raises(configuration.ConfigurationError) as caught:
        configuration.check(project.train)
    return str(caught.value)


def test_wrong_value_of_a_macro_is_found_where_it_was_given(project):
    assert problems(project, "BATCH_SIZE = many") == (
        "`train` cannot run with this configuration (2 problems):\n"
        "  - --gin.BATCH_SIZE=many: `train/utils.DatasetConfig.batch_size` (through %BATCH_SIZE, bound at run.gin:23) "
        "expects int, got 'many'.\n"
        "  - --gin.BATCH_SIZE=many: `infer_eval/utils.DatasetConfig.batch_size` (through %BATCH_SIZE, bound at "
        "run.gin:28) expects int, got 'many'."
    )


def test_macro_of_a_macro(project):
    project.write("more.gin", "SIZE = '12'\nBATCH_SIZE = %SIZE\n")
    message = problems(project, "include 'more.gin'", "infer_eval/utils.DatasetConfig.batch_size = 1")
    assert message == (
        "more.gin:1: `train/utils.DatasetConfig.batch_size` (through %SIZE, bound at run.gin:23) expects int, got '12'."
        " Write it without quotes."
    )


def test_wrong_value_in_a_file(project):
    project.write("more.gin", "train_script.train:\n  random_seed = 1.0\n")
    assert problems(project, "include 'more.gin'") == (
        "more.gin:2: `train_script.train.random_seed` expects Optional[int], got 1.0. Write 1."
    )


def test_macro_inside_a_container(project):
    message = problems(project, "LENGTH = '64'", "TASK_FEATURE_LENGTHS = {'inputs': %LENGTH}")
    assert "expects Optional[Mapping[str, int]], got {'inputs': '64'}." in message


@pytest.mark.parametrize(
    ("binding", "expected"),
    [
        ("utils.schedule.warmup_steps = 1e4", "expects int, got 10000.0. Write 10000."),
        ("utils.schedule.factors = 3", "expects str, got 3. Write it in quotes: '\"3\"' on the command line."),
        ("train/utils.DatasetConfig.shuffle = 'false'", "expects bool, got 'false'. Write False, without quotes."),
        ("train/utils.DatasetConfig.split = @utils.schedule", "@utils.schedule is a function or class"),
        ("trainer.Trainer.learning_rate_fn = 0.001", "expects Callable[[int], float], got 0.001."),
        ("models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = '4'", "expects int, got '4'."),
    ],
)
def test_messages(project, binding, expected):
    message = problems(project, binding)
    assert message.startswith(f"--gin.{binding.replace(' = ', '=')}: `{binding.split(' = ')[0]}` expects")
    assert expected in message


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("mode", "'all'", "expects one of 'specific', 'latest', got 'all'."),
        ("how", "'newest'", "expects Mode: one of SPECIFIC, LATEST, got 'newest'."),
        ("mesh", "(1, 2, 3)", "expects Optional[tuple[int, int]], got (1, 2, 3)."),
        ("steps", "[1, 'two']", "expects Sequence[int], got [1, 'two']."),
        ("rename", "[('a', 'b')]", "expects Optional[Mapping[str, str]], got [('a', 'b')]."),
        ("path", "3", "expects Union[str, Sequence[str]], got 3."),
    ],
)
def test_messages_of_composed_types(project, field, value, expected):
    common = ["utils.RestoreConfig.path = 'x'", "train.model = @utils.RestoreConfig()"]
    assert expected in problems(project, *common, f"utils.RestoreConfig.{field} = {value}")


def test_right_values_pass(project):
    project.parse(
        "run.gin",
        "model.gin",
        bindings=[
            *project.given,
            "utils.RestoreConfig.path = ['a', 'b']",
            "utils.RestoreConfig.mode = 'specific'",
            "utils.RestoreConfig.how = 'LATEST'",
            "utils.RestoreConfig.dtype = 'bfloat16'",
            "utils.RestoreConfig.mesh = [1, 2]",
            "utils.RestoreConfig.rename = {r'a.*': 'b'}",
            "train.model = @utils.RestoreConfig()",
            "utils.schedule.base_learning_rate = 1",
            "utils.schedule.warmup_steps = @utils.untyped()",
            "train.actions = {'TRAIN': [@utils.schedule(), @utils.untyped]}",
        ],
    )
    configuration.check(project.train)


def test_annotations_kept_as_strings_are_understood(project):
    project.write(
        "lab/late.py",
        """
        from __future__ import annotations
        import dataclasses
        from typing import TYPE_CHECKING, Optional
        if TYPE_CHECKING:
            from nowhere import Unknown

        @dataclasses.dataclass
        class Late:
            size: int = 3
            other: Optional[Unknown] = None
            name: Optional[str] = None
        """,
    )
    project.write("late.gin", "from __gin__ import dynamic_registration\nfrom lab import late\nlate.Late.other = 3\n")
    message = problems(
        project, "include 'late.gin'", "train.model = @late.Late()", "late.Late.size = 'x'", "late.Late.name = 3"
    )
    assert "2 problems" in message
    assert "`late.Late.size` expects int, got 'x'." in message
    assert "`late.Late.name` expects Optional[str], got 3." in message
