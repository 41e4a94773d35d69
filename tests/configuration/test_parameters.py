"""Values that contradict an annotation are found; values that may be right are not reported.

The package `lab` stands for users' code, whose contradictions are warnings; `test_gin_types.py` is about t5x's own.
"""

import collections.abc
import dataclasses
import enum
import inspect
import numbers
import typing

import numpy as np
import pytest

from t5x import configuration
from t5x.configuration.values import accepts, fits


class Axis(enum.Enum):
    ROW = "row"


class Options(typing.TypedDict):
    size: int


FIT = [
    (3, int),
    (3, float),
    (1e-3, float),
    (True, bool),
    (1, bool),
    ("a", str),
    (None, typing.Optional[int]),  # noqa: UP045
    (None, int | None),
    (None, None),
    (3, int | str),
    ("NUM_REAL_TARGET_TOKENS", float | int | str | None),
    ([1, 2], typing.Sequence[int]),
    ((1, 2), list[int]),
    ([1, "a"], tuple[int, str]),
    ((), tuple[int, ...]),
    (["a"], collections.abc.Iterable[str]),
    ([1.0, 2], typing.Sequence[float]),
    ({"a": 1}, typing.Mapping[str, int]),
    ({"a": [1]}, dict[str, list[int]]),
    ({}, dict),
    ("a", typing.Literal["a", "b"]),
    (None, typing.Literal["a", None]),
    ("bfloat16", typing.Any),
    ("bfloat16", type),
    ("bfloat16", np.dtype),
    ("row", Axis),
    ("ROW", Axis),
    (3, inspect.Parameter | str | int),
    ({"size": 3}, Options),
    (np.float32(3), int),
    (range(3), typing.Sequence[str]),
    (3, numbers.Number),
    (3, object),
    (3, typing.TypeVar("T")),
    (3, typing.Annotated[int, "positive"]),
    ("x", "an annotation that cannot be evaluated"),
    (None, typing.Callable[[int], int] | None),
]

MISFIT = [
    ("3", int),
    (3.5, int),
    (1e6, int),
    (True, int),
    (2, bool),
    (None, int),
    (None, float),
    (None, str),
    (None, typing.Mapping[str, int]),
    (None, typing.Callable[[int], int]),
    ("0.1", float),
    (True, float),
    ("True", bool),
    (3, str),
    (b"a", str),
    ("3", int | None),
    (3, str | typing.Sequence[str]),
    (3, typing.Sequence[int]),
    ("abc", list[str]),
    ("abc", typing.Sequence[str]),
    ([1], tuple[int, str]),
    (["a", 1], tuple[int, str]),
    (3, tuple[int, str]),
    ("abc", typing.Sequence[int]),
    (["a"], typing.Sequence[int]),
    ({"a": 1}, typing.Sequence[str]),
    ([("a", 1)], typing.Mapping[str, int]),
    ({"a": "1"}, typing.Mapping[str, int]),
    ({1: 1}, typing.Mapping[str, int]),
    ("c", typing.Literal["a", "b"]),
    ("relu", typing.Callable),
    (3, typing.Callable[[int], int]),
    ("anything", inspect.Parameter),
    (3, inspect.Parameter | str),
    (3, np.dtype),
    (3, type),
    ("column", Axis),
    (3, Axis),
    (3, Options),
]


def test_fits():
    assert [case for case in FIT if not fits(*case)] == []
    assert [case for case in MISFIT if fits(*case)] == []


@pytest.mark.parametrize(("default", "annotation", "value"), [(None, int, None), (0.5, int, 0.25), (None, str, None)])
def test_a_value_like_a_default_that_contradicts_the_annotation(default, annotation, value):
    parameter = inspect.Parameter("x", inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    assert accepts(parameter, value)


@dataclasses.dataclass
class Warned:
    binding: str
    place: str
    parameter: str
    expected: str
    got: str


WARNED = [
    Warned("utils.schedule.warmup_steps = 1e4", "--gin.utils.schedule.warmup_steps=1e4", "", "int", "10000.0"),
    Warned("utils.schedule.factors = 3", "--gin.utils.schedule.factors=3", "", "str", "3"),
    Warned("BATCH_SIZE = 'x'", "--gin.BATCH_SIZE='x'", "train/utils.DatasetConfig.batch_size", "int", "'x'"),
    Warned("train/utils.DatasetConfig.split = @utils.schedule", "--gin.train/utils", "", "str", "@utils.schedule"),
    Warned("trainer.Trainer.learning_rate_fn = 0.001", "--gin.trainer", "", "a function or class (@NAME)", "0.001"),
    Warned("models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = '4'", "--gin.models", "", "int", "'4'"),
]


@pytest.mark.parametrize("case", WARNED, ids=lambda case: case.binding)
def test_the_warning_names_place_parameter_and_type(project, caplog, case):
    project.parse_run(case.binding)
    configuration.check(project.train)
    message = caplog.records[0].getMessage()
    assert message.startswith(case.place)
    assert f"`{case.parameter or case.binding.split(' = ')[0]}` expects " in message
    assert case.expected in message and f"got {case.got}." in message


def test_right_values_give_no_warning(project, caplog):
    project.parse_run(
        "utils.RestoreConfig.path = ['a', 'b']",
        "utils.RestoreConfig.mode = 'specific'",
        "utils.RestoreConfig.how = 'LATEST'",
        "utils.RestoreConfig.dtype = 'bfloat16'",
        "utils.RestoreConfig.mesh = [1, 2]",
        "utils.RestoreConfig.rename = {r'a.*': 'b'}",
        "train.train_dataset_cfg = @utils.RestoreConfig()",
        "utils.schedule.base_learning_rate = 1",
        "utils.schedule.warmup_steps = @utils.untyped()",
        "train.actions = {'TRAIN': [@utils.schedule(), @utils.untyped]}",
    )
    configuration.check(project.train, strict=True)
    assert not caplog.records


def test_annotations_that_are_strings(project, caplog):
    project.write(
        "late.py",
        """
        from __future__ import annotations
        import dataclasses

        @dataclasses.dataclass
        class Late:
            size: int | None = 3

        def unknown(size: Nowhere = 3):
            pass
        """,
    )
    project.write(
        "late.gin", "from __gin__ import dynamic_registration\nimport late\nX = [@late.Late(), @late.unknown()]\n"
    )
    project.parse_run(
        "include 'late.gin'", "train.train_dataset_cfg = %X", "late.Late.size = 'x'", "late.unknown.size = 'x'"
    )
    configuration.check(project.train)
    [record] = caplog.records
    assert "`late.Late.size` expects int or None, got 'x'." in record.getMessage()


def test_arguments_that_a_decorator_or_a_metaclass_passes_are_not_required(project):
    project.write(
        "wrapped.py",
        """
        import functools

        def passes_rng(f):
            @functools.wraps(f)
            def wrapper(**kwargs):
                return f(rng=0, **kwargs)
            return wrapper

        @passes_rng
        def sample(rng, temperature: float = 1.0):
            return rng, temperature

        class Meta(type):
            def __call__(cls, **kwargs):
                return super().__call__(key=1, **kwargs)

        class Made(metaclass=Meta):
            def __init__(self, key):
                self.key = key
        """,
    )
    project.write(
        "w.gin", "from __gin__ import dynamic_registration\nimport wrapped\nX = [@wrapped.sample(), @wrapped.Made()]\n"
    )
    project.parse_run("include 'w.gin'", "train.model = %X", "wrapped.sample.temperature = 2")
    configuration.check(project.train)
    sampled, made = project.call()["model"]
    assert (sampled, made.key) == ((0, 2), 1)
