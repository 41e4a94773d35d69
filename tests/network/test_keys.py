"""Random keys by logical name."""

import jax
import jax.numpy as jnp
import numpy as np

from t5x.network.keys import Keys, Stack


def test_a_stack_draws_what_each_layer_would():
    alone = Keys(dropout=jax.random.key(3), rows=jnp.array([5, 0, 9])).at("layers")
    stacked = alone.replace(stack=Stack(4))
    for number in (2, 0, 3, 1):
        for place, shape, rate in (
            ("mlp", (1, 40), 0.5),
            ("mlp", (7, 40), 0.5),
            ("mlp", (1, 40), 0.1),
            ("out", (1, 40), 0.1),
        ):
            drawn = stacked.layer(number).at(place).keep(shape, rate)
            np.testing.assert_array_equal(drawn, alone.layer(number).at(place).keep(shape, rate))
