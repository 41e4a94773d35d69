"""What is checked before anything is computed."""

from t5x.data.config import DatasetConfig
from t5x.errors import UserError
from t5x.models import BaseTransformerModel


def verify_matching_vocabs(cfg: DatasetConfig, model: BaseTransformerModel) -> None:
    """Raises where the task's vocabularies are not the model's, or do not fit in its embedding table."""
    task = cfg.mixture_or_task()
    for feature, vocabulary in model.vocabularies.items():
        if feature not in task.output_features:
            raise UserError(
                f"Task {task.name!r} has no feature {feature!r}, which the model reads; "
                f"it has {', '.join(task.output_features)}."
            )
        theirs = task.output_features[feature].vocabulary
        if theirs != vocabulary:
            raise UserError(
                f"The vocabulary of {feature!r} differs: task {task.name!r} has {theirs}, the model {vocabulary}. "
                "Give both the same (VOCABULARY in the model's gin file, output_features of the task)."
            )
        rows = getattr(getattr(model.module, "config", None), "vocab_size", None)
        if rows is not None and vocabulary.vocab_size > rows:
            raise UserError(
                f"The vocabulary of {feature!r} has {vocabulary.vocab_size} tokens, but vocab_size of the network is "
                f"{rows}. Raise it to at least {vocabulary.vocab_size} (a multiple of 128 is usual)."
            )
