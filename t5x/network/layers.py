"""The basic layers of T5: dense, embedding, RMS norm, MLP. Parameters are float32, named and shaped as in T5X."""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import initializers
from flax.linen.partitioning import param_with_axes

from t5x.network import fp8
from t5x.network.keys import Keys, dropout, dropout_factors
from t5x.partitioning.devices import platform, runs_triton
from t5x.partitioning.logical import constrain, on_each_device, shards_of

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": nn.gelu,  # the tanh approximation, as in T5 1.1
    "linear": lambda x: x,
    "relu": nn.relu,
    "sigmoid": nn.sigmoid,
    "silu": nn.silu,
    "tanh": nn.tanh,
}


def parameter(module: nn.Module, name: str, init: Callable, shape: Sequence[int], axes: Sequence[str], keys: Keys):
    """Return a float32 parameter with logical axes; its initial value is keyed by logical name, not by module path."""

    def initial(path_key):
        key = keys.param(name)
        return init(path_key if key is None else key, tuple(shape), jnp.float32)

    return param_with_axes(name, initial, axes=tuple(axes), module=module)


_SEPARATOR = "_"  # between the names of fused kernels
KERNELS = "kernels"  # the collection of kernels prepared for a decoding loop


class Kernel(nn.Module):
    """The kernel [in, features] of a dense layer without bias, in `dtype`; None keeps the dtype of the parameter."""

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
) -> Sequence[jax.Array] | jax.Array:
    """Return x [..., in] times each kernel. Call it in the compact module that owns the kernels.

    The pass that creates the caches of a decoding loop also prepares the kernels: fused into one on a GPU, where every
    matmul is a kernel launch; transposed on a CPU, for `few_rows`. The parameters may already be fused, see
    `join_kernels`. In a training step with FP8 scales (see `network.fp8`), the matmuls are in FP8.

    Args:
      dtype: dtype of the result; None is that of x.
      in_every_step: whether every step of a decoding loop needs the kernels; otherwise they are not prepared.
      joined: for several kernels on a GPU, use one fused matmul in any pass and return [..., kernels, features].
    """
    names = [kernel.name for kernel in kernels if kernel.name]
    name = _SEPARATOR.join(names)
    x = x.astype(kernels[0].dtype)
    if len(kernels) > 1 and module.has_variable("params", name):
        product = _joined(x, module.get_variable("params", name).astype(x.dtype), dtype)
        return product if joined else _unstack(product)
    on_cpu = platform() == "cpu"
    if module.has_variable(KERNELS, name):
        if on_cpu:
            transposed: Sequence[jax.Array] = module.get_variable(KERNELS, name)
            return [few_rows(x, kernel, dtype) for kernel in transposed]
        product = _joined(x, module.get_variable(KERNELS, name), dtype)
        return product if joined else _unstack(product)
    made = [kernel(x.shape[-1], keys.at(own)) for kernel, own in zip(kernels, names, strict=True)]
    if module.has_variable(fp8.SCALES, name):
        scales: jax.Array = module.get_variable(fp8.SCALES, name)
        if joined and len(made) > 1:
            return fp8.project(x, [_join(made)], scales, dtype)[0]
        return fp8.project(x, made, scales, dtype)
    creates = (
        in_every_step and module.is_mutable_collection(KERNELS) and not module.is_mutable_collection("params")
    )  # fmt: skip
    if on_cpu:
        if creates:
            module.put_variable(KERNELS, name, tuple(kernel.T for kernel in made))
        return [jnp.dot(x, kernel, preferred_element_type=dtype) for kernel in made]
    if platform() == "gpu" and len(kernels) > 1 and (creates or joined):
        together = _join(made)
        if creates:
            module.put_variable(KERNELS, name, together)
        if joined:
            return _joined(x, together, dtype)
    if platform() == "gpu" and len(kernels) > 1 and x.size >= _MANY_ROWS * x.shape[-1]:
        return _separate_matmuls(x, made, dtype)
    return [jnp.dot(x, kernel, preferred_element_type=dtype) for kernel in made]


_MANY_ROWS = 512


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _separate_matmuls(x: jax.Array, kernels: Sequence[jax.Array], dtype: Any) -> list[jax.Array]:
    """Return x times each kernel, in matmuls that XLA does not fuse.

    With many rows, fused matmuls are slower: XLA copies their results apart. With few rows, the number of kernel
    launches dominates. The backward pass keeps one copy of x.
    """
    return _separate_matmuls_forward(x, kernels, dtype)[0]


def _separate_matmuls_forward(x, kernels, dtype):
    matmul = functools.partial(jnp.dot, preferred_element_type=dtype)
    copies = jax.lax.optimization_barrier((x,) * len(kernels))
    return [matmul(y, kernel) for y, kernel in zip(copies, kernels, strict=True)], (x, kernels)


def _separate_matmuls_backward(dtype, residuals, gradients):
    x, kernels = residuals
    matmul = functools.partial(jnp.dot, preferred_element_type=dtype)
    copies = jax.lax.optimization_barrier((x,) * len(kernels))
    to_x, to_kernels = zip(
        *(jax.vjp(matmul, *args)[1](gradient) for *args, gradient in zip(copies, kernels, gradients, strict=True)),
        strict=True,
    )
    # XLA adds the right operand within the matmul that computes the left one, unless that already adds something.
    return functools.reduce(lambda total, gradient: gradient + total, to_x), list(to_kernels)


_separate_matmuls.defvjp(_separate_matmuls_forward, _separate_matmuls_backward)


def _join(kernels: Sequence[jax.Array]) -> jax.Array:
    """Stack kernels, [in, (layers,) features] each -> [in, (layers,) n, features]."""
    return jnp.stack(kernels, axis=-2)


def join_kernels(params: Any) -> Any:
    """Return the parameters of a network with fused gate kernels, for inference; the size is unchanged."""
    if not isinstance(params, Mapping):
        return params
    gates = sorted((name for name in params if re.fullmatch(r"wi_\d+", name)), key=lambda name: int(name[3:]))
    made = {name: join_kernels(value) for name, value in params.items() if name not in gates}
    if gates:
        made[_SEPARATOR.join(gates)] = _join([params[name]["kernel"] for name in gates])
    return made


def _joined(x: jax.Array, kernels: jax.Array, dtype: Any) -> jax.Array:
    """Multiply x [..., in] with fused kernels [in, n, features] -> [..., n, features].

    The kernels are on an axis of their own, not concatenated, because the feature axis may be sharded.
    """
    return jnp.einsum("...d,dnf->...nf", x, kernels, preferred_element_type=dtype)


def _unstack(joined: jax.Array) -> list[jax.Array]:
    return [joined[..., i, :] for i in range(joined.shape[-2])]


def few_rows(x: jax.Array, transposed: jax.Array, dtype: Any = None) -> jax.Array:
    """Return x [..., in] @ transposed [features, in].T, computed in the way that is fast on a CPU for few rows.

    With the kernel as the left operand, it is read in place. XLA would otherwise repack it at every step, which takes
    twice as long for 16 rows. A single row is a matrix-vector product, which is fast either way.
    """
    rows = x.reshape(-1, x.shape[-1])
    made = jax.lax.dot_general(transposed, rows, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    # The barrier keeps XLA from swapping the operands back.
    return jax.lax.optimization_barrier(made).T.reshape(*x.shape[:-1], transposed.shape[0])


class RMSNorm(nn.Module):
    """T5's layer norm: no mean, no bias, computed in float32."""

    dtype: Any
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array, branch: bool = False) -> Any:
        """Return the norm of x; with `branch`, [x, norm], whose gradients one kernel adds on a GPU."""
        scale = parameter(self, "scale", initializers.ones, (x.shape[-1],), ("embed",), Keys())
        # The platform first: exports are traced on a CPU, and symbolic dimensions cannot be compared with a number.
        is_large = platform() == "gpu" and math.prod(x.shape[:-1]) >= _MANY_ROWS
        if is_large and runs_triton() and x.ndim == 3 and shards_of("embed", ("batch", "length", "embed")) == 1:
            from t5x.network import norm_kernels  # Pallas is slow to import

            if norm_kernels.fits(x.shape[-1]):
                made = norm_kernels.branch(x, scale, self.dtype, self.epsilon)
                return made if branch else made[1]
        normed = rms_norm(x, scale, self.dtype, self.epsilon)
        if is_large:
            normed = _barrier(normed)
        return [x, normed] if branch else normed


@jax.custom_vjp
def _barrier(x: jax.Array) -> jax.Array:
    """Keep XLA from computing x again inside every matmul that uses it, which halves their speed with many rows."""
    return jax.lax.optimization_barrier(x)


_barrier.defvjp(lambda x: (_barrier(x), None), lambda _, gradient: (gradient,))


def rms_norm(x: jax.Array, scale: jax.Array, dtype: Any, epsilon: float) -> jax.Array:
    """Return x [..., features] divided by its root mean square and multiplied by `scale`, float32 [features]."""
    x = x.astype(jnp.float32)
    normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    # Multiplied in float32, the rounded values give the same product, but the gradient of the scale, a sum over all
    # positions of a batch, is then accumulated in float32.
    rounded = lambda array: array.astype(dtype).astype(jnp.float32)
    return (rounded(normed) * rounded(scale)).astype(dtype)


class Embed(nn.Module):
    """The token table that encoder, decoder and (tied) logits share."""

    vocab_size: int
    features: int

    @nn.compact
    def __call__(self, keys: Keys) -> jax.Array:
        """Return the table, float32 [vocab, features]."""
        shape = (self.vocab_size, self.features)
        return parameter(self, "embedding", initializers.normal(1.0), shape, ("vocab", "embed"), keys)


def embed(table: jax.Array, tokens: jax.Array, dtype: Any) -> jax.Array:
    """Look up embeddings, [..., length] -> [..., length, features]. Tokens outside the table give NaN.

    Rows are cast after the lookup, so that the gradient of a frequent token is accumulated in float32.
    """
    return constrain(lookup(table, tokens).astype(dtype), "batch", "length", "embed")


def lookup(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Return rows of the table, [...] -> [..., features]; the gradient is deterministic, on GPUs as well."""
    if jnp.issubdtype(tokens.dtype, jnp.floating):  # T5X's networks take tokens of any dtype
        tokens = tokens.astype(jnp.int32)
    return (_rows if platform() == "gpu" else _take)(table, tokens)


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
    """Return the sum of x [..., features] for each token id, float32 [vocab_size, features], deterministically.

    A GPU scatter-add runs in arbitrary order, which changes float sums but not integer sums. So x is scaled by its
    largest absolute value and split into integers, with few enough bits that no sum overflows.

    Args:
      tokens: token ids [...].

    Returns:
      the sums; all NaN if a value of x is not finite, or 2**120 or more.
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
    return jnp.where(greatest < 2.0**120, unit * total, jnp.nan)  # above this, 1 / unit is 0 on some devices


def gate(
    parts: Sequence[jax.Array] | jax.Array, activations: Sequence[str], dropout_rate: float, keys: Keys
) -> jax.Array:
    """Return act_0(parts[0]) * act_1(parts[1]) … with dropout.

    Args:
      parts: [batch, length, features] each, or an array of them on the second axis from the end.
    """
    if isinstance(parts, jax.Array):
        if runs_triton() and parts.ndim == 4 and math.prod(parts.shape[:2]) >= _MANY_ROWS:
            from t5x.network import elementwise_kernels  # Pallas is slow to import

            if elementwise_kernels.fits(math.prod(parts.shape[:2]), parts.shape[-1]):
                compute = functools.partial(elementwise_kernels.gate, activations=activations)
                axes = [("batch", "length", None, "mlp"), ("batch", "length", "mlp")]
                factors = dropout_factors(parts.shape[-1], dropout_rate, keys)
                return on_each_device(compute, axes, ("batch", "length", "mlp"), parts, factors)
        parts = _unstack(parts)
    product = functools.reduce(jnp.multiply, (ACTIVATIONS[name](x) for name, x in zip(activations, parts, strict=True)))
    return dropout(product, dropout_rate, keys)


class MLP(nn.Module):
    """An MLP: wo(drop(act_0(wi_0 x) * act_1(wi_1 x) …)). With one activation, the input kernel is named `wi`.

    Attributes:
      out_dtype: dtype of the result; None is `dtype`.
    """

    mlp_dim: int
    activations: Sequence[str]
    dropout_rate: float
    dtype: Any
    out_dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, keys: Keys) -> jax.Array:
        names = ["wi"] if len(self.activations) == 1 else [f"wi_{i}" for i in range(len(self.activations))]
        kernels = [Kernel(self.mlp_dim, ("embed", "mlp"), self.dtype, name=name) for name in names]
        parts = project(self, x, kernels, keys, joined=True)
        hidden = gate(parts, self.activations, self.dropout_rate, keys.at("hidden"))
        hidden = constrain(hidden, "batch", "length", "mlp")
        to_model = Kernel(x.shape[-1], ("mlp", "embed"), self.dtype, name="wo")
        return project(self, hidden, [to_model], keys, dtype=self.out_dtype)[0]
