"""Optax's optimizers under the names that T5X gives them.

Each takes the parameters of its namesake in Optax. Without `learning_rate` it is driven by the trainer's schedule.
"""

from typing import Any

import jax
import optax
from optax import contrib

from t5x.errors import UserError
from t5x.optimizers.wrapping import wrap_optax_optimizer

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


def _muon_matrices(axes: Any) -> dict[str, Any]:
    """Which dimensions of each parameter are the rows and columns of a matrix; None leaves it to Adam."""

    def matrix(names: tuple[str | None, ...] | None) -> contrib.MuonDimensionNumbers | None:
        own = [d for d, name in enumerate(names or ()) if name not in ("layers", "stack")]
        if len(own) < 2 or {"vocab", "relpos_buckets"}.intersection(names):
            return None
        inputs = 1 if names[own[0]] == "embed" else len(own) - 1
        return contrib.MuonDimensionNumbers(tuple(own[:inputs]), tuple(own[inputs:]))

    is_leaf = lambda node: node is None or isinstance(node, tuple)
    return {"muon_weight_dimension_numbers": jax.tree.map(matrix, axes, is_leaf=is_leaf)}


muon = wrap_optax_optimizer(contrib.muon, _muon_matrices)
muon.__doc__ += """

Muon's are the matrices between hidden layers, each layer of a stack one; embeddings, logits, position biases, norms and
parameters without logical axes are Adam's. `muon_weight_dimension_numbers` says it otherwise; see Optax.
"""


def dpsgd(*args: Any, **kwargs: Any) -> Any:
    """Not available: it needs the gradient of every example, and the trainer has that of the batch."""
    raise UserError(
        "optimizers.dpsgd needs the gradients of single examples, but the trainer computes that of the whole batch: "
        "its noise and clipping would protect nobody. Choose another optimizer."
    )
