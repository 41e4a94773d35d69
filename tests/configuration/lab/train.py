from collections.abc import Callable, Mapping, Sequence
from typing import Any


def train(
    *,
    model,
    train_dataset_cfg,
    infer_eval_dataset_cfg,
    trainer_cls: Callable,
    model_dir: str,
    total_steps: int,
    eval_steps: int = 20,
    stats_period: int | None = None,
    random_seed: int | None = None,
    actions: Mapping[str, Sequence[Any]] | None = None,
):
    return dict(locals())
