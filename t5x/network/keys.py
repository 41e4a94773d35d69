"""Random keys by logical name.

Linen derives a module's keys from its path, which differs between scanned and unrolled layers. Here the network passes
its keys down explicitly and folds in logical names (`encoder`, layer 3, `attention`, `query`), so initial values and
dropout do not depend on how the layers are stored. Dropout is also keyed by the row of the global batch, so it does
not depend on how the batch is split into microbatches.
"""

import zlib
from collections.abc import Sequence

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from flax.core.tracers import current_trace


@flax.struct.dataclass
class Keys:
    """The keys of one place in the network.

    A key is folded with the layer number and then, where it is used, once with the full name of the place. Folding at
    every level would add a hash per level to every compiled program.

    Attributes:
      params: key for initial values; None unless the network is being initialized.
      dropout: key for dropout; None if dropout is off.
      rows: int32 [batch], each example's row in the global batch; None if dropout is off.
      place: logical name, `encoder/layers/attention/query`.
      stack: samples the dropout of all layers together; None if each layer samples its own.
      number: of this layer in the stack; not yet folded into `dropout`.
      needs_gradients: False in evaluation and inference.
    """

    params: jax.Array | None = None
    dropout: jax.Array | None = None
    rows: jax.Array | None = None
    place: str = flax.struct.field(pytree_node=False, default="")
    stack: "Stack | None" = flax.struct.field(pytree_node=False, default=None)
    number: int | None = flax.struct.field(pytree_node=False, default=None)
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
        return cls(params, module.make_rng("dropout"), jnp.arange(tokens.shape[0]) if rows is None else rows)

    def at(self, name: str) -> "Keys":
        """Return the keys of a named submodule."""
        return self.replace(place=f"{self.place}/{name}")

    def layer(self, number: jax.Array | int) -> "Keys":
        """Return the keys of a layer. The number may be traced unless there is a stack."""
        fold = lambda key: None if key is None else jax.random.fold_in(key, number)
        if self.stack is not None and self.number is None and self.stack.is_here():
            return self.replace(params=fold(self.params), number=number)
        alone = self.alone()
        return alone.replace(params=fold(alone.params), dropout=fold(alone.dropout))

    def alone(self) -> "Keys":
        """Return the same keys, detached from their stack."""
        alone = self.replace(stack=None, number=None)
        return alone if self.number is None else alone.replace(dropout=jax.random.fold_in(self.dropout, self.number))

    def param(self, name: str) -> jax.Array:
        """Return the key of the parameter `name`."""
        return jax.random.fold_in(self.params, zlib.crc32(f"{self.place}/{name}".encode()))

    def keep(self, shape: Sequence[int], rate: float) -> jax.Array:
        """Return bool [batch, *shape]: the units that dropout keeps."""
        if self.stack is not None:
            return self.stack.keep(self, tuple(shape), rate)
        key = jax.random.fold_in(self.dropout, _code(self.place))
        row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(self.rows)
        return _sample(row_keys, tuple(shape), rate)


def _code(place: str) -> int:
    return zlib.crc32(place.encode())


def _sample(row_keys: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    return jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, shape))(row_keys)


class Stack:
    """Unrolled layers whose dropout at a given place is sampled for all of them at the first request.

    The values are those that each layer would sample by itself (except with `use_hardware_rng`, whose values depend on
    how many are sampled together). A random generator, and each step of deriving a key, is hundreds of instructions:
    one per place and layer made up half of XLA's compilation work.

    Args:
      keys: keys of the tower's layers.
      layers: number of layers.
      places: names, below that of `keys`, for which keys are derived together; others derive their own.
    """

    def __init__(self, keys: Keys, layers: int, places: Sequence[str] = ()):
        self._keys = keys.alone()
        self._layers = layers
        self._places = [f"{keys.place}/{place}" for place in places]
        self._trace = current_trace()
        self._derived: jax.Array | None = None
        self._drawn: dict[tuple[str, tuple[int, ...], float], jax.Array] = {}

    def is_here(self) -> bool:
        """Return whether values sampled now are valid in all layers: not inside a layer's own JAX transform."""
        return current_trace() == self._trace

    def keep(self, keys: Keys, shape: tuple[int, ...], rate: float) -> jax.Array:
        """Return `Keys.keep` of the layer `keys.number`."""
        if not self.is_here():
            return keys.alone().keep(shape, rate)
        name = (keys.place, shape, rate)
        if name not in self._drawn:
            row_keys = self._row_keys(keys.place)
            # Otherwise XLA fuses it into its users and recomputes it for every layer.
            self._drawn[name] = jax.lax.optimization_barrier(jax.vmap(lambda k: _sample(k, shape, rate))(row_keys))
        return self._drawn[name][keys.number]

    def _row_keys(self, place: str) -> jax.Array:
        """Return the key of every layer and row at a place, [layers, batch]."""
        if place not in self._places:
            return self._derive([place])[0]
        if self._derived is None:
            self._derived = jax.lax.optimization_barrier(self._derive(self._places))
        return self._derived[self._places.index(place)]

    def _derive(self, places: Sequence[str]) -> jax.Array:
        """Return keys, [places, layers, batch]."""
        codes = np.array([_code(place) for place in places], np.uint32)
        numbers, rows = jnp.arange(self._layers), self._keys.rows
        fold = jax.random.fold_in
        keys = jax.vmap(lambda number: fold(self._keys.dropout, number))(numbers)
        keys = jax.vmap(lambda code: jax.vmap(lambda key: fold(key, code))(keys))(codes)
        return jax.vmap(jax.vmap(lambda key: jax.vmap(lambda row: fold(key, row))(rows)))(keys)


def dropout(x: jax.Array, rate: float, keys: Keys, *, broadcast_length: bool = True) -> jax.Array:
    """Drop units of `x` [batch, length, features]; T5 drops the same features at every position of an example."""
    if keys.dropout is None or rate == 0.0:
        return x
    shape = (1, *x.shape[2:]) if broadcast_length else x.shape[1:]
    return jnp.where(keys.keep(shape, rate), x / (1.0 - rate), 0).astype(x.dtype)
