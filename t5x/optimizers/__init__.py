"""Optimizers: what the trainer asks of one, Optax's under T5X's names, and wrappers around any of them.

    OPTIMIZER = @optimizers.adamw()              # driven by trainer.Trainer.learning_rate_fn
    OPTIMIZER = @optimizers.chain()              # as T5X's gin files have it: the rate is Optax's, and is logged
    optimizers.chain.transformations = [@optax.clip_by_global_norm(), @optax.adamw()]
    optax.adamw.learning_rate = @optax.warmup_cosine_decay_schedule()

    OPTIMIZER = @optimizers.freeze()             # around any optimizer, Adafactor too
    optimizers.freeze.optimizer = @adafactor.Adafactor()
    optimizers.freeze.patterns = ['token_embedder/.*']

`t5x.adafactor` is T5's own optimizer.
"""

from t5x.optimizers.catalogue import (
    adabelief,
    adagrad,
    adam,
    adamw,
    dpsgd,
    fromage,
    lamb,
    lars,
    lion,
    muon,
    noisy_sgd,
    radam,
    rmsprop,
    sgd,
    yogi,
)
from t5x.optimizers.groups import MultiOptimizer, clip_by_global_norm, freeze
from t5x.optimizers.patterns import weight_decay_mask
from t5x.optimizers.protocol import Optimizer, trained
from t5x.optimizers.rates import applied_schedule
from t5x.optimizers.wrapping import OptaxWrapper, chain, wrap_optax_optimizer

__all__ = [
    "MultiOptimizer",
    "OptaxWrapper",
    "Optimizer",
    "adabelief",
    "adagrad",
    "adam",
    "adamw",
    "applied_schedule",
    "chain",
    "clip_by_global_norm",
    "dpsgd",
    "freeze",
    "fromage",
    "lamb",
    "lars",
    "lion",
    "muon",
    "noisy_sgd",
    "radam",
    "rmsprop",
    "sgd",
    "trained",
    "weight_decay_mask",
    "wrap_optax_optimizer",
    "yogi",
]
