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

from t5x._runtime.imports import lazy_attributes

# Inference needs only the protocol, without Optax.
_MODULES = {
    "multi_optimizer": ("MultiOptimizer", "clip_by_global_norm", "freeze", "weight_decay_mask"),
    "optax_wrapper": (
        "OptaxWrapper", "adabelief", "adagrad", "adam", "adamw", "chain", "dpsgd", "fromage", "lamb", "lars", "lion",
        "muon", "noisy_sgd", "radam", "rmsprop", "sgd", "wrap_optax_optimizer", "yogi",
    ),
    "protocol": (
        "OptaxStatePartitionRules", "Optimizer", "OptimizerDef", "OptimizerDefType", "OptimizerState", "OptimizerType",
        "trained",
    ),
    "schedules": ("applied_schedule",),
}  # fmt: skip
__all__ = sorted(name for names in _MODULES.values() for name in names)
__getattr__, __dir__ = lazy_attributes(__name__, _MODULES)
