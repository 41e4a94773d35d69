"""Checks before anything is computed."""

from t5x.data.code_hashes import fingerprint
from t5x.data.dataset_config import DatasetConfig
from t5x.data.pipeline import Pipeline
from t5x.data.sources import BadExample
from t5x.data.tasks import task_rates
from t5x.errors import UserError
from t5x.models import BaseTransformerModel
from t5x.partitioning import consistency

_SAMPLED = 256


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


def _describe(cfg: DatasetConfig) -> dict[str, str]:
    found = {}
    for task, rate in task_rates(cfg.mixture_or_task()).items():
        for feature, settings in task.output_features.items():
            found[f"vocabulary of {feature} of {task.name}"] = fingerprint(settings.vocabulary)
        if cfg.split in task.splits:
            pipeline = task.pipeline(
                cfg.split, cfg.task_feature_lengths, int(cfg.seed or 0), cfg.runtime_preprocessors, need_text=False,
                use_cached=cfg.use_cached,
            )  # fmt: skip
            name = f"split {cfg.split} of {task.name}"
            found[name] = f"rate {rate:g}, {len(pipeline)} examples, {fingerprint(_sample(pipeline))} some of them"
    return found


def _sample(pipeline: Pipeline) -> list[dict[str, bytes]]:
    size, sampled = len(pipeline), []
    for index in sorted({number * size // _SAMPLED for number in range(_SAMPLED)}):
        try:
            made = pipeline.outputs(0, index)
        except BadExample:
            continue
        sampled += [{name: example[name] for name in pipeline.output_features if name in example} for example in made]
    return sampled
