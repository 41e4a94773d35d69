"""Random keys by logical name.

Linen derives a module's keys from its path, which differs between scanned and unrolled layers. Here the network passes
its keys down explicitly and folds in logical names (`encoder`, layer 3, `attention`, `query`), so initial values and
dropout do not depend on how the layers are stored. Dropout is also keyed by the row of the global batch, so it does
not depend on how the batch is split into microbatches.

A random generator, and each step of deriving a key, is hundreds of instructions for XLA to compile. A tower therefore
derives the keys of all its layers together, and a layer samples the dropout of all its places together.
"""

import math
import zlib
from collections.abc import Mapping, Sequence

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x.kernels.choice import ops


class Keys(flax.struct.PyTreeNode):
    """The keys of one place in the network.

    Attributes:
      params: key for initial values; None unless the network is being initialized.
      dropout: keys for dropout, one per row, [batch]; None if dropout is off.
      masks: bool [batch, units], the units that dropout keeps at all places in `sampled`, one after the other.
      path: logical name, `encoder/layers/attention/query`.
      sampled: name of a place, shape of its mask for one row, rate.
      needs_gradients: False in evaluation and inference.
    """

    params: jax.Array | None = None
    dropout: jax.Array | None = None
    masks: jax.Array | None = None
    path: str = flax.struct.field(pytree_node=False, default="")
    sampled: tuple[tuple[str, tuple[int, ...], float], ...] = flax.struct.field(pytree_node=False, default=())
    needs_gradients: bool = flax.struct.field(pytree_node=False, default=True)

    @classmethod
    def of(cls, module: nn.Module, tokens: jax.Array, enable_dropout: bool, rows: jax.Array | None) -> "Keys":
        """Return the root keys of `module`, from Linen's streams `params` and `dropout`.

        Args:
          tokens: [batch, length], the batch that is computed.
          rows: int [batch], row numbers in the global batch; None if this is the complete global batch.
        """
        params = module.make_rng("params") if module.is_initializing() else None
        if not enable_dropout or module.config.dropout_rate == 0.0:
            return cls(params, needs_gradients=enable_dropout or params is not None)
        rows = jnp.arange(tokens.shape[0]) if rows is None else rows
        key = module.make_rng("dropout")
        if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
            key = jax.random.wrap_key_data(key)  # a key of `jax.random.PRNGKey`
        return cls(params, jax.vmap(lambda row: jax.random.fold_in(key, row))(rows))

    def child(self, name: str) -> "Keys":
        """Return the keys of a named submodule."""
        return self.replace(path=f"{self.path}/{name}")

    def tower(self, num_layers: int) -> tuple["Keys", "Keys"]:
        """Return the keys of a tower's places outside its layers, and those of its layers, stacked."""
        layers = self.child("layers")
        if (params := self.params) is not None:
            of_each = jax.vmap(lambda number: jax.random.fold_in(params, number))(jnp.arange(num_layers))
            layers = layers.replace(params=of_each)
        if self.dropout is None:
            return self, layers
        # The last number is the tower's own.
        numbers = np.uint32(_code(self.path)) + np.arange(num_layers + 1, dtype=np.uint32)
        keys = jax.vmap(lambda number: jax.vmap(lambda key: jax.random.fold_in(key, number))(self.dropout))(numbers)
        return self.replace(dropout=keys[-1]), layers.replace(dropout=keys[:-1])

    def of_each(self, num_layers: int) -> list["Keys"]:
        """Return the keys of every layer, which are stacked here."""
        of_each = [jax.tree.map(lambda stacked, i=i: stacked[i], self) for i in range(num_layers)]
        if self.masks is None or self.dropout is None:
            return of_each
        # XLA compiles what all layers have in common once, unless each of them reads its own part of the stack.
        masks = ops().materialize([keys.masks for keys in of_each], jax.random.key_data(self.dropout).ravel()[0] == 0)
        return [keys.replace(masks=of_layer) for keys, of_layer in zip(of_each, masks, strict=True)]

    def sample(self, shapes: Mapping[str, Sequence[int]], rate: float) -> "Keys":
        """Sample the dropout of several places below this one, unless that was done before.

        Args:
          shapes: shape of the mask of one row by the place's name. Places that are missing sample their own.
        """
        if self.dropout is None or rate == 0.0 or self.sampled:
            return self
        sampled = tuple((f"{self.path}/{name}", tuple(shape), rate) for name, shape in shapes.items())
        units = sum(math.prod(shape) for _, shape, _ in sampled)
        return self.replace(masks=_sample(self.dropout, (units,), rate), sampled=sampled)

    def param(self, name: str) -> jax.Array | None:
        """Return the key of the parameter `name`; None unless the network is being initialized."""
        return None if self.params is None else jax.random.fold_in(self.params, _code(f"{self.path}/{name}"))

    def keep(self, shape: Sequence[int], rate: float) -> jax.Array:
        """Return bool [batch, *shape]: the units that dropout keeps."""
        requested, start = (self.path, tuple(shape), rate), 0
        for place in self.sampled:
            units = math.prod(place[1])
            if place == requested and self.masks is not None:
                return self.masks[:, start : start + units].reshape(-1, *shape)
            start += units
        keys = jax.vmap(lambda key: jax.random.fold_in(key, _code(self.path)))(self.dropout)
        return _sample(keys, tuple(shape), rate)


def _code(place: str) -> int:
    return zlib.crc32(place.encode())


def _sample(keys: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Return bool [*keys.shape, *shape], each True with probability 1 - rate."""
    limit = np.uint32(min(round((1.0 - rate) * 2**32), 2**32 - 1))

    def bits(key: jax.Array) -> jax.Array:
        return jax.random.bits(key, shape, jnp.uint32)

    for _ in keys.shape:
        bits = jax.vmap(bits)
    return bits(keys) < limit


def dropout(x: jax.Array, rate: float, keys: Keys, shape: Sequence[int] | None = None) -> jax.Array:
    """Drop units of `x` [batch, length, features].

    Args:
      shape: of the mask of an example, which is broadcast. T5's default drops the same features at every position.
    """
    if keys.dropout is None or rate == 0.0:
        return x
    shape = (1, *x.shape[2:]) if shape is None else shape
    return jnp.where(keys.keep(shape, rate), x / (1.0 - rate), 0).astype(x.dtype)
