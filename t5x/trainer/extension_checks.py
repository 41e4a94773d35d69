"""Checks of users' models, decode functions and trainers before anything is computed."""

import inspect
from collections.abc import Callable
from typing import Any

from t5x.data.seqio_converters import make_converter
from t5x.errors import UserError

_DECODE_FN = ("inputs", "cache", "tokens_to_logits", "eos_id", "num_decodes", "decode_rng", "cache_offset")
_TRAINER = ("model", "train_state", "partitioner", "eval_names", "summary_dir", "train_state_axes", "rng")


def check_extensions(model: Any, trainer_cls: Callable[..., Any]) -> None:
    """Raise a UserError if a user's class or function does not take the arguments that it will get.

    Args:
      model: the model; its feature converter is created.
      trainer_cls: the trainer, or a function that makes it.
    """
    make_converter(model.FEATURE_CONVERTER_CLS, pack=False)
    _check_call(model.loss_fn, f"{type(model).__name__}.loss_fn", ("params", "batch", "dropout_rng"), by_position=True)
    if callable(decode_fn := getattr(model, "decode_fn", None)):
        _check_call(decode_fn, f"decode_fn of {type(model).__name__}", _DECODE_FN)
    _check_call(trainer_cls, "train.trainer_cls", _TRAINER)


def _check_call(function: Callable[..., Any], what: str, arguments: tuple[str, ...], by_position: bool = False) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a built-in function
        return
    placeholders = dict.fromkeys(arguments)
    try:
        if by_position:
            signature.bind_partial(*placeholders)
        else:
            signature.bind_partial(**placeholders)
    except TypeError as error:
        raise UserError(
            f"{what} is called with {', '.join(arguments)}, but {getattr(function, '__qualname__', function)}"
            f"{signature} does not take them: {error}."
        ) from error
