"""The small layers of a T5: dense, embedding, RMS norm, MLP. Parameters are float32, named and shaped as in T5X."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
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


_SEPARATOR = "_"  # between the names of kernels that are joined
KERNELS = "kernels"  # the collection of what a decoding loop needs of the kernels, prepared once


class Kernel(nn.Module):
    """The kernel [in, features] of a dense layer without a bias, in `dtype`; None: as the parameter is."""

    features: int
    axes: tuple[str, str]
    dtype: Any
    kernel_init: Callable = initializers.variance_scaling(1.0, "fan_in", "truncated_normal")

    @nn.compact
    def __call__(self, size: int, keys: Keys) -> jax.Array:
        kernel = parameter(self, "kernel", self.kernel_init, (size, self.features), self.axes, keys)
        return kernel if self.dtype is None else kernel.astype(self.dtype)


def project(
    module: nn.Module,
    x: jax.Array,
    kernels: Sequence[Kernel],
    keys: Keys,
    *,
    dtype: Any = None,
    in_every_step: bool = True,
    joined: bool = False,
) -> list[jax.Array]:
    """x [..., in] times each kernel, inside the calling compact module, which owns the kernels.

    A decoding loop has the kernels prepared by the pass that creates its caches: several as one on a GPU, where every
    product is a kernel to start; transposed on a CPU, for `few_rows`. Parameters may come with them joined already, see
    `join_kernels`.

    Args:
      dtype: of the result; None is that of x.
      in_every_step: of a decoding loop; otherwise nothing is prepared for it.
      joined: multiply with all kernels at once on a GPU, in whatever pass: x is read once, but the results of each lie
        apart.
    """
    name = _SEPARATOR.join(kernel.name for kernel in kernels)
    x = x.astype(kernels[0].dtype)
    if len(kernels) > 1 and module.has_variable("params", name):
        return _joined(x, module.get_variable("params", name).astype(x.dtype), dtype)
    on_cpu = jax.default_backend() == "cpu"
    if module.has_variable(KERNELS, name):
        ready = module.get_variable(KERNELS, name)
        return [few_rows(x, kernel, dtype) for kernel in ready] if on_cpu else _joined(x, ready, dtype)
    made = [kernel(x.shape[-1], keys.at(kernel.name)) for kernel in kernels]
    creates = (
        in_every_step and module.is_mutable_collection(KERNELS) and not module.is_mutable_collection("params")
    )  # fmt: skip
    if on_cpu:
        if creates:
            module.put_variable(KERNELS, name, tuple(kernel.T for kernel in made))
        return [jnp.dot(x, kernel, preferred_element_type=dtype) for kernel in made]
    if jax.default_backend() == "gpu" and len(kernels) > 1 and (creates or joined):
        together = _join(made)
        if creates:
            module.put_variable(KERNELS, name, together)
        if joined:
            return _joined(x, together, dtype)
    each = _apart(x, len(made)) if len(made) > 1 else (x,)
    return [jnp.dot(y, kernel, preferred_element_type=dtype) for y, kernel in zip(each, made, strict=True)]


_MANY_ROWS = 1024


def _apart(x: jax.Array, times: int) -> Sequence[jax.Array]:
    """x so many times. A GPU computes it once, before the products that take it, and each of these by itself.

    Left alone, XLA computes a norm again inside every product with its result, which halves their speed where rows are
    many, or joins some of them and then copies the parts. With few rows it is right: what counts is the number of
    kernels to start.
    """
    if jax.default_backend() != "gpu" or x.size < _MANY_ROWS * x.shape[-1]:
        return (x,) * times
    return _barrier((x,) * times)


@jax.custom_jvp
def _barrier(x: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Gradients go through as if it were not there."""
    return jax.lax.optimization_barrier(x)


@_barrier.defjvp
def _barrier_jvp(primals, tangents):
    return _barrier(*primals), tangents[0]


def _join(kernels: Sequence[jax.Array]) -> jax.Array:
    """[in, (layers,) features] each -> [in, (layers,) n, features]."""
    return jnp.stack(kernels, axis=-2)


def join_kernels(params: Any) -> Any:
    """Parameters of a network with the kernels of gates joined, for what only reads them: as large as before."""
    if not isinstance(params, Mapping):
        return params
    gates = sorted((name for name in params if re.fullmatch(r"wi_\d+", name)), key=lambda name: int(name[3:]))
    made = {name: join_kernels(value) for name, value in params.items() if name not in gates}
    if gates:
        made[_SEPARATOR.join(gates)] = _join([params[name]["kernel"] for name in gates])
    return made


def _joined(x: jax.Array, kernels: jax.Array, dtype: Any) -> list[jax.Array]:
    """Kernels [in, n, features]: side by side, and not one behind another, as features may be divided over devices."""
    made = jnp.einsum("...d,dnf->...nf", x, kernels, preferred_element_type=dtype)
    return [made[..., i, :] for i in range(kernels.shape[1])]


def few_rows(x: jax.Array, transposed: jax.Array, dtype: Any = None) -> jax.Array:
    """x [..., in] @ transposed [features, in].T, in the way a CPU is quick with where x has few rows.

    Multiplied from the left, the kernel is read as it lies; XLA would otherwise pack it anew at every step (twice the
    time for 16 rows). A single row is a matrix-vector product, which is quick either way.
    """
    rows = x.reshape(-1, x.shape[-1])
    made = jax.lax.dot_general(transposed, rows, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    # The barrier keeps XLA from turning the product round again.
    return jax.lax.optimization_barrier(made).T.reshape(*x.shape[:-1], transposed.shape[0])


class RMSNorm(nn.Module):
    """T5's layer norm: no mean, no bias, computed in float32."""

    dtype: Any
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = parameter(self, "scale", initializers.ones, (x.shape[-1],), ("embed",), Keys())
        return _apart(rms_norm(x, scale, self.dtype, self.epsilon), 1)[0]


def rms_norm(x: jax.Array, scale: jax.Array, dtype: Any, epsilon: float) -> jax.Array:
    """x [..., features] divided by its root mean square and multiplied with `scale`, float32 [features]."""
    x = x.astype(jnp.float32)
    normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    # Two narrow numbers have the same product in float32, but the gradient of the scale, a sum over all positions of a
    # batch, is then summed up in float32 too.
    rounded = lambda array: array.astype(dtype).astype(jnp.float32)
    return (rounded(normed) * rounded(scale)).astype(dtype)


class Embed(nn.Module):
    """The token table that encoder, decoder and (tied) logits share."""

    vocab_size: int
    features: int

    @nn.compact
    def __call__(self, keys: Keys) -> jax.Array:
        """The table itself, float32 [vocab, features]."""
        shape = (self.vocab_size, self.features)
        return parameter(self, "embedding", initializers.normal(1.0), shape, ("vocab", "embed"), keys)


def embed(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Rows of the table, [..., length] -> [..., length, features]. A token outside the table gives NaN, not a guess.

    They are cast after the lookup, so that the gradient of a frequent token is summed in float32.
    """
    return constrain(lookup(table, tokens).astype(dtype), "batch", "length", "embed")


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of the table, [...] -> [..., features]; its gradient is the same every time, also on a GPU."""
    return (_rows if jax.default_backend() == "gpu" else _take)(table, tokens)


def _take(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take(table, tokens, axis=0)


@jax.custom_vjp
def _rows(table: jax.Array, tokens: jax.Array) -> jax.Array:
    return _take(table, tokens)


def _rows_forward(table, tokens):
    return _take(table, tokens), (tokens, table)


def _rows_backward(residuals, gradient):
    tokens, table = residuals
    return sum_by_token(gradient, tokens, table.shape[0]).astype(table.dtype), None


_rows.defvjp(_rows_forward, _rows_backward)


def sum_by_token(x: jax.Array, tokens: jax.Array, vocab_size: int) -> jax.Array:
    """Sums x [..., features] over the places of each token, [...] -> float32 [vocab, features], the same every time.

    A GPU adds to one row of a table from many places in whatever order they come, and floats then come to another sum.
    Integers do not: x is cut into integers, relative to its greatest value, of so many bits that no sum overflows.
    """
    bits = 30 - max(tokens.size - 1, 0).bit_length()
    parts = -(-26 // bits)
    x = x.astype(jnp.float32)
    greatest = jnp.max(jnp.abs(x))
    unit = jnp.where(greatest > 0, greatest, 1.0)
    rest, sums = x / unit, []
    for _ in range(parts):
        rest = rest * 2.0**bits
        whole = jnp.round(rest)
        rest -= whole
        empty = jnp.zeros((vocab_size, x.shape[-1]), jnp.int32)
        sums.append(empty.at[tokens].add(whole.astype(jnp.int32), mode="drop"))
    total = sum(part.astype(jnp.float32) * 2.0 ** (-bits * (n + 1)) for n, part in reversed(list(enumerate(sums))))
    return jnp.where(greatest < 2.0**120, unit * total, jnp.nan)  # beyond, 1 / unit is 0 on some devices


class MLP(nn.Module):
    """wo(drop(act_0(wi_0 x) * act_1(wi_1 x) …)); with a single activation the input kernel is named `wi`.

    Attributes:
      out_dtype: of the result; None is `dtype`.
    """

    mlp_dim: int
    activations: tuple[str, ...]
    dropout_rate: float
    dtype: Any
    out_dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, keys: Keys) -> jax.Array:
        names = ["wi"] if len(self.activations) == 1 else [f"wi_{i}" for i in range(len(self.activations))]
        kernels = [Kernel(self.mlp_dim, ("embed", "mlp"), self.dtype, name=name) for name in names]
        parts = project(self, x, kernels, keys, joined=True)
        hidden = functools.reduce(
            jnp.multiply, (ACTIVATIONS[name](part) for name, part in zip(self.activations, parts, strict=True))
        )
        hidden = dropout(constrain(hidden, "batch", "length", "mlp"), self.dropout_rate, keys.at("hidden"))
        to_model = Kernel(x.shape[-1], ("mlp", "embed"), self.dtype, name="wo")
        return project(self, hidden, [to_model], keys, dtype=self.out_dtype)[0]
