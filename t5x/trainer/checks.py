"""Checks before anything is computed."""

import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from t5x._runtime.errors import UserError
from t5x.data.content_hashes import fingerprint
from t5x.data.dataset_config import DatasetConfig
from t5x.data.pipeline import Pipeline
from t5x.data.seqio_converters import make_converter
from t5x.data.sources import BadExample
from t5x.data.tasks import task_rates
from t5x.models import BaseTransformerModel
from t5x.partitioning import consistency, distributed

_SAMPLED = 256
_QUICK_BYTES = 2**30  # hashed in about two seconds


def verify_matching_vocabs(cfg: DatasetConfig, model: BaseTransformerModel) -> None:
    """Raise a UserError if the task's vocabularies differ from the model's or exceed its embedding table."""
    task = cfg.mixture_or_task()
    for feature, vocabulary in model.vocabularies.items():
        if feature not in task.output_features:
            raise UserError(
                f"Task {task.name!r} has no feature {feature!r}, which the model reads; "
                f"it has {', '.join(task.output_features)}."
            )
        task_vocabulary = task.output_features[feature].vocabulary
        if task_vocabulary != vocabulary:
            raise UserError(
                f"The vocabulary of {feature!r} differs: task {task.name!r} has {task_vocabulary}, the model "
                f"{vocabulary}. Give both the same (VOCABULARY in the model's gin file, output_features of the task)."
            )
        rows = getattr(getattr(model.module, "config", None), "vocab_size", None)
        if rows is not None and vocabulary.vocab_size > rows:
            raise UserError(
                f"The vocabulary of {feature!r} has {vocabulary.vocab_size} tokens, but vocab_size of the network is "
                f"{rows}. Raise it to at least {vocabulary.vocab_size} (a multiple of 128 is usual)."
            )


def require_same_data(*configs: DatasetConfig | None) -> None:
    """Raise a UserError in every process if they do not all read the same data.

    Compares the tasks and their rates, the vocabularies, the number of source examples, and the preprocessed features
    of evenly spaced examples. Paths and times of files may differ: machines may have their own copies.
    """
    consistency.require_same(
        "data", lambda: {name: value for cfg in configs if cfg is not None for name, value in _describe(cfg).items()}
    )


class ContentCheck:
    """A comparison of the training data's whole content across processes, which `require_same_data` samples.

    Args:
      loader: loader of the data.
      fingerprint: fingerprint of its data; None checks nothing.

    Attributes:
      is_quick: whether there is so little data that training can wait for its hashes.
    """

    def __init__(self, loader: Any, fingerprint: "Future[dict[str, Any]] | None"):
        self._pending = fingerprint if distributed.process_count() > 1 else None
        self.is_quick = self._pending is None or distributed.decide(
            "size of the data", lambda: loader.content_bytes() < _QUICK_BYTES
        )

    def require_same(self, patience: float | None = None) -> None:
        """Raise a UserError in every process if the content differs. All processes must call it at the same step.

        Tasks whose content some process cannot hash are skipped.

        Args:
          patience: seconds to wait for the hashes; None waits until they are ready. If some process does not have them
            in time, the next call compares.
        """
        if self._pending is None:
            return
        try:
            tasks = self._pending.result(patience)["tasks"]
        except TimeoutError:
            tasks = None
        sources = {name: task["source"] for name, task in (tasks or {}).items() if task["source"] is not None}
        hashed = distributed.exchange("hashed tasks", None if tasks is None else sorted(sources))
        if None in hashed:
            return
        self._pending = None
        shared = sorted(set(sources).intersection(*hashed))
        file_names = distributed.decide(
            "names of data files", lambda: [[name for name, *_ in sources[task].get("files", [])] for task in shared]
        )
        consistency.require_same("data", lambda: {
            name: value for task, names in zip(shared, file_names, strict=True)
            for name, value in _describe_content(task, sources[task], names)
        })  # fmt: skip


def _describe_content(task: str, source: dict[str, Any], file_names: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) of what identifies a source's content.

    Args:
      file_names: names of the files on process 0; those of other machines may differ.
    """
    files = source.get("files", [])
    yield f"source of {task}", f"{source | {'files': len(files)}}"
    for number, (name, (_, size, digest)) in enumerate(zip(file_names, files, strict=False), 1):
        yield f"content of {name}, file {number} of {task}", f"{size:,} bytes with the hash {digest}"


def _describe(cfg: DatasetConfig) -> dict[str, str]:
    described = {}
    for task, rate in task_rates(cfg.mixture_or_task()).items():
        for feature, settings in task.output_features.items():
            described[f"vocabulary of {feature} of {task.name}"] = fingerprint(settings.vocabulary)
        if cfg.split in task.splits:
            pipeline = task.pipeline(
                cfg.split, cfg.task_feature_lengths, int(cfg.seed or 0), cfg.runtime_preprocessors, need_text=False,
                use_cached=cfg.use_cached,
            )  # fmt: skip
            name = f"split {cfg.split} of {task.name}"
            described[name] = f"rate {rate:g}, {len(pipeline)} examples, {fingerprint(_sample(pipeline))} some of them"
    return described


def _sample(pipeline: Pipeline) -> list[dict[str, bytes]]:
    size, sampled = len(pipeline), []
    for index in sorted({number * size // _SAMPLED for number in range(_SAMPLED)}):
        try:
            examples = pipeline.outputs(0, index)
        except BadExample:
            continue
        features = pipeline.output_features
        sampled += [{name: example[name] for name in features if name in example} for example in examples]
    return sampled


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
