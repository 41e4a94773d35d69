"""Random keys by logical name.

Linen derives a module's keys from its path, and scanned layers have other paths than unrolled ones. Here the network
hands its keys down itself and folds in logical names (`encoder`, layer 3, `attention`, `query`), so that initial
values and dropout are the same whichever way the layers are held. Dropout is keyed by the row of the global batch
besides, so that it is the same however the batch is cut into microbatches.
"""

import zlib
from collections.abc import Sequence

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from flax.core.tracers import current_trace


@flax.struct.dataclass
class Keys:
    """The keys of one place in the network.

    A key is folded with the layer's number and then, once, where it is used, with the whole name of the place: folding
    at every step down would be a hash each, in every compiled program.

    Attributes:
      params: key of initial values; None unless the network is being initialised.
      dropout: key of dropout; None where dropout is off.
      rows: int32 [batch], each example's row in the global batch; None where dropout is off.
      place: logical name, `encoder/layers/attention/query`.
      stack: draws the dropout of all layers together; None where each draws its own.
      number: of this layer in the stack, with which `dropout` is not folded yet.
    """

    params: jax.Array | None = None
    dropout: jax.Array | None = None
    rows: jax.Array | None = None
    place: str = flax.struct.field(pytree_node=False, default="")
    stack: "Stack | None" = flax.struct.field(pytree_node=False, default=None)
    number: int | None = flax.struct.field(pytree_node=False, default=None)

    @classmethod
    def of(cls, module: nn.Module, tokens: jax.Array, enable_dropout: bool, rows: jax.Array | None) -> "Keys":
        """The root keys of `module`, from the streams `params` and `dropout` that Linen was given.

        Args:
          tokens: [batch, length], of the batch that is computed.
          rows: int [batch], their rows in the global batch; None: they are the whole of it.
        """
        params = module.make_rng("params") if module.is_initializing() else None
        if not enable_dropout or module.config.dropout_rate == 0.0:
            return cls(params)
        return cls(params, module.make_rng("dropout"), jnp.arange(tokens.shape[0]) if rows is None else rows)

    def at(self, name: str) -> "Keys":
        """The keys of a named part."""
        return self.replace(place=f"{self.place}/{name}")

    def layer(self, number: jax.Array | int) -> "Keys":
        """The keys of a layer, of which the number may be traced unless there is a stack."""
        fold = lambda key: None if key is None else jax.random.fold_in(key, number)
        if self.stack is not None and self.number is None and self.stack.is_here():
            return self.replace(params=fold(self.params), number=number)
        alone = self.alone()
        return alone.replace(params=fold(alone.params), dropout=fold(alone.dropout))

    def alone(self) -> "Keys":
        """The same keys outside of their stack."""
        alone = self.replace(stack=None, number=None)
        return alone if self.number is None else alone.replace(dropout=jax.random.fold_in(self.dropout, self.number))

    def param(self, name: str) -> jax.Array:
        """The key of the parameter `name` here."""
        return jax.random.fold_in(self.params, zlib.crc32(f"{self.place}/{name}".encode()))

    def keep(self, shape: Sequence[int], rate: float) -> jax.Array:
        """bool [batch, *shape]: which units dropout keeps here."""
        if self.stack is not None:
            return self.stack.keep(self, tuple(shape), rate)
        key = jax.random.fold_in(self.dropout, zlib.crc32(self.place.encode()))
        row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(self.rows)
        return jax.vmap(lambda key: jax.random.bernoulli(key, 1.0 - rate, tuple(shape)))(row_keys)


class Stack:
    """Unrolled layers, of which a place's dropout is drawn for all when the first of them asks for it.

    The values are those that each layer would draw by itself (unless by `use_hardware_rng`, whose values depend on how
    many are drawn together); but a generator is hundreds of instructions, and one in every place of every layer was
    half of what XLA had to compile.
    """

    def __init__(self, layers: int):
        self._layers = layers
        self._trace = current_trace()
        self._drawn: dict[tuple[str, tuple[int, ...], float], jax.Array] = {}

    def is_here(self) -> bool:
        """Whether what is drawn now can come to all layers: not in a part of one with a transform of its own."""
        return current_trace() == self._trace

    def keep(self, keys: Keys, shape: tuple[int, ...], rate: float) -> jax.Array:
        """`Keys.keep` of the layer `keys.number`."""
        if not self.is_here():
            return keys.alone().keep(shape, rate)
        name = (keys.place, shape, rate)
        if name not in self._drawn:
            own = lambda number: keys.replace(stack=None, number=None).layer(number).keep(shape, rate)
            # Fused with what uses it, it would be computed again for every layer.
            self._drawn[name] = jax.lax.optimization_barrier(jax.vmap(own)(jnp.arange(self._layers)))
        return self._drawn[name][keys.number]


def dropout(x: jax.Array, rate: float, keys: Keys, *, broadcast_length: bool = True) -> jax.Array:
    """Drops units of `x` [batch, length, features]; T5 drops the same features at every position of an example."""
    if keys.dropout is None or rate == 0.0:
        return x
    shape = (1, *x.shape[2:]) if broadcast_length else x.shape[1:]
    return jnp.where(keys.keep(shape, rate), x / (1.0 - rate), 0).astype(x.dtype)
