"""Optimizers: the trainer's interface, Optax's optimizers under T5X's names, and wrappers around any of them.

    OPTIMIZER = @optimizers.adamw()              # driven by trainer.Trainer.learning_rate_fn
    OPTIMIZER = @optimizers.chain()              # as in T5X's gin files: Optax has the rate, and it is logged
    optimizers.chain.transformations = [@optax.clip_by_global_norm(), @optax.adamw()]
    optax.adamw.learning_rate = @optax.warmup_cosine_decay_schedule()

    OPTIMIZER = @optimizers.freeze()             # around any optimizer, including Adafactor
    optimizers.freeze.optimizer = @adafactor.Adafactor()
    optimizers.freeze.patterns = ['token_embedder/.*']

Each Optax optimizer takes the parameters of its namesake. Without `learning_rate`, the trainer's schedule drives it.
`t5x.adafactor` is T5's own optimizer.
"""

import optax

from t5x.optimizers.learning_rates import applied_schedule
from t5x.optimizers.multi_optimizer import MultiOptimizer, clip_by_global_norm, freeze
from t5x.optimizers.optax_wrapper import OptaxWrapper, chain, dpsgd, muon, wrap_optax_optimizer
from t5x.optimizers.patterns import weight_decay_mask
from t5x.optimizers.protocol import Optimizer, OptimizerDef, OptimizerState, trained
from t5x.optimizers.state_rules import OptaxStatePartitionRules

# T5X's names in annotations.
OptimizerType, OptimizerDefType = Optimizer, OptimizerDef

adabelief = wrap_optax_optimizer(optax.adabelief)
adagrad = wrap_optax_optimizer(optax.adagrad)
adam = wrap_optax_optimizer(optax.adam)
adamw = wrap_optax_optimizer(optax.adamw)
fromage = wrap_optax_optimizer(optax.fromage)
lamb = wrap_optax_optimizer(optax.lamb)
lars = wrap_optax_optimizer(optax.lars)
lion = wrap_optax_optimizer(optax.lion)
noisy_sgd = wrap_optax_optimizer(optax.noisy_sgd)
radam = wrap_optax_optimizer(optax.radam)
rmsprop = wrap_optax_optimizer(optax.rmsprop)
sgd = wrap_optax_optimizer(optax.sgd)
yogi = wrap_optax_optimizer(optax.yogi)

__all__ = [
    "MultiOptimizer",
    "OptaxStatePartitionRules",
    "OptaxWrapper",
    "Optimizer",
    "OptimizerDef",
    "OptimizerDefType",
    "OptimizerState",
    "OptimizerType",
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
