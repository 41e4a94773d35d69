"""The small layers of a T5: dense, embedding, RMS norm, MLP. Parameters are float32, named and shaped as in T5X."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import initializers
from flax.linen.partitioning import param_with_axes

from t5x.network.keys import Keys, dropout
from t5x.partitioning.logical import constrain

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": nn.gelu,  # the tanh approximation, which is T5 1.1's
    "linear": lambda x: x,
    "relu": nn.relu,
    "sigmoid": nn.sigmoid,
    "silu": nn.silu,
    "tanh": nn.tanh,
}


def parameter(module: nn.Module, name: str, init: Callable, shape: Sequence[int], axes: Sequence[str], keys: Keys):
    """A float32 parameter with logical axes whose initial value is keyed by logical name, not by module path."""

    def initial(path_key):
        return init(path_key if keys.params is None else keys.param(name), tuple(shape), jnp.float32)

    return param_with_axes(name, initial, axes=tuple(axes), module=module)


KERNELS = "kernels"  # the collection of a decoding loop's transposed kernels


class Dense(nn.Module):
    """x [..., in] @ kernel [in, features], without a bias.

    On a CPU the pass that creates the caches of a decoding loop also transposes the kernels, once, for `few_rows`.
    """

    features: int
    axes: tuple[str, str]
    dtype: Any
    kernel_init: Callable = initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

    @nn.compact
    def __call__(self, x: jax.Array, keys: Keys, columns: jax.Array | None = None) -> jax.Array:
        """`columns`, int [batch, n]: only these features of x [batch, length, in], each row its own."""
        kernel = parameter(self, "kernel", self.kernel_init, (x.shape[-1], self.features), self.axes, keys)
        x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
        if columns is not None:
            return jnp.einsum("bqd,dbn->bqn", x, kernel[:, columns])
        if self.has_variable(KERNELS, "transposed"):
            return few_rows(x, self.get_variable(KERNELS, "transposed"))
        creates = self.is_mutable_collection(KERNELS) and not self.is_mutable_collection("params")
        if creates and jax.default_backend() == "cpu":
            self.put_variable(KERNELS, "transposed", kernel.T)
        return jnp.dot(x, kernel)


def few_rows(x: jax.Array, transposed: jax.Array) -> jax.Array:
    """x [..., in] @ transposed [features, in].T, in the way a CPU is quick with where x has few rows.

    Multiplied from the left, the kernel is read as it lies; XLA would otherwise pack it anew at every step (twice the
    time for 16 rows). A single row is a matrix-vector product, which is quick either way.
    """
    rows = x.reshape(-1, x.shape[-1])
    made = jax.lax.dot_general(transposed, rows, (((1,), (1,)), ((), ())))
    # The barrier keeps XLA from turning the product round again.
    return jax.lax.optimization_barrier(made).T.reshape(*x.shape[:-1], transposed.shape[0])


class RMSNorm(nn.Module):
    """T5's layer norm: no mean, no bias, computed in float32."""

    dtype: Any
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = parameter(self, "scale", initializers.ones, (x.shape[-1],), ("embed",), Keys())
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.epsilon)
        return normed.astype(self.dtype) * scale.astype(self.dtype)


class Embed(nn.Module):
    """The token table that encoder, decoder and (tied) logits share."""

    vocab_size: int
    features: int
    dtype: Any

    @nn.compact
    def __call__(self, keys: Keys) -> jax.Array:
        """The table itself, float32 [vocab, features]."""
        shape = (self.vocab_size, self.features)
        return parameter(self, "embedding", initializers.normal(1.0), shape, ("vocab", "embed"), keys)


def embed(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Rows of the table, [..., length] -> [..., length, features]. A token outside the table gives NaN, not a guess.

    They are cast after the lookup, so that the gradient of a frequent token is summed in float32.
    """
    return constrain(jnp.take(table, tokens, axis=0).astype(dtype), "batch", "length", "embed")


class MLP(nn.Module):
    """wo(drop(act_0(wi_0 x) * act_1(wi_1 x) …)); with a single activation the input kernel is named `wi`."""

    mlp_dim: int
    activations: tuple[str, ...]
    dropout_rate: float
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array, keys: Keys) -> jax.Array:
        hidden = None
        for i, activation in enumerate(self.activations):
            name = "wi" if len(self.activations) == 1 else f"wi_{i}"
            part = Dense(self.mlp_dim, ("embed", "mlp"), self.dtype, name=name)(x, keys.at(name))
            part = ACTIVATIONS[activation](part)
            hidden = part if hidden is None else hidden * part
        hidden = dropout(constrain(hidden, "batch", "length", "mlp"), self.dropout_rate, keys.at("hidden"))
        return Dense(x.shape[-1], ("mlp", "embed"), self.dtype, name="wo")(hidden, keys.at("wo"))
