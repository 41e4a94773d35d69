"""The basic layers of T5: dense, embedding, RMS norm, MLP. Parameters are float32, named and shaped as in T5X."""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen import initializers
from flax.linen.partitioning import param_with_axes

from t5x.kernels.choice import ops
from t5x.kernels.ops import fused_matmul, stack_kernels
from t5x.network import fp8
from t5x.network.keys import Keys
from t5x.partitioning.logical import constrain


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

    The pass that creates the caches of a decoding loop also prepares the kernels (`Ops.prepare`). The parameters may
    already be fused (`join_kernels`). In a training step with FP8 scales (`network.fp8`), the matmuls are in FP8.

    Args:
      dtype: dtype of the result; None is that of x.
      in_every_step: whether every step of a decoding loop needs the kernels; otherwise they are not prepared.
      joined: for several kernels, the result may also be one array [..., kernels, features], see `Ops.matmuls`.
    """
    names = [kernel.name for kernel in kernels if kernel.name]
    name = _SEPARATOR.join(names)
    x = x.astype(kernels[0].dtype)
    if len(kernels) > 1 and module.has_variable("params", name):
        return fused_matmul(x, module.get_variable("params", name).astype(x.dtype), dtype, joined=joined)
    if module.has_variable(KERNELS, name):
        return ops().prepared_matmuls(x, module.get_variable(KERNELS, name), dtype, joined=joined)
    arrays = [kernel(x.shape[-1], keys.child(own)) for kernel, own in zip(kernels, names, strict=True)]
    if module.has_variable(fp8.SCALES, name):
        scales: jax.Array = module.get_variable(fp8.SCALES, name)
        if joined and len(arrays) > 1:
            return fp8.project(x, [stack_kernels(arrays)], scales, dtype)[0]
        return fp8.project(x, arrays, scales, dtype)
    creates = in_every_step and module.is_mutable_collection(KERNELS) and not module.is_mutable_collection("params")
    prepared = ops().prepare(arrays) if creates else None
    if prepared is not None:
        module.put_variable(KERNELS, name, prepared)
    return ops().matmuls(x, arrays, dtype, joined=joined, prepared=prepared)


def join_kernels(params: Any) -> Any:
    """Return the parameters of a network with fused gate kernels, for inference; the size is unchanged."""
    if not isinstance(params, Mapping):
        return params
    gates = sorted((name for name in params if re.fullmatch(r"wi_\d+", name)), key=lambda name: int(name[3:]))
    joined = {name: join_kernels(value) for name, value in params.items() if name not in gates}
    if gates:
        joined[_SEPARATOR.join(gates)] = stack_kernels([params[name]["kernel"] for name in gates])
    return joined


class RMSNorm(nn.Module):
    """T5's layer norm: no mean, no bias, computed in float32."""

    dtype: Any
    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x: jax.Array, branch: bool = False) -> Any:
        """Return the norm of x; with `branch`, [x, norm], see `Ops.norm`."""
        scale = parameter(self, "scale", initializers.ones, (x.shape[-1],), ("embed",), Keys())
        return ops().norm(x, scale, self.dtype, self.epsilon, branch=branch)


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
    return ops().lookup(table, tokens)


def gate(
    parts: Sequence[jax.Array] | jax.Array, activations: Sequence[str], dropout_rate: float, keys: Keys
) -> jax.Array:
    """Return act_0(parts[0]) * act_1(parts[1]) … with dropout.

    Args:
      parts: [batch, length, features] each, or an array of them on the second axis from the end.
    """
    is_dropped = keys.dropout is not None and dropout_rate > 0.0
    features = (parts if isinstance(parts, jax.Array) else parts[0]).shape[-1]
    keep = functools.partial(keys.keep, (1, features), dropout_rate) if is_dropped else None
    return ops().gate(parts, activations, keep, dropout_rate)


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
        hidden = gate(parts, self.activations, self.dropout_rate, keys.child("hidden"))
        hidden = constrain(hidden, "batch", "length", "mlp")
        to_model = Kernel(x.shape[-1], ("mlp", "embed"), self.dtype, name="wo")
        return project(self, hidden, [to_model], keys, dtype=self.out_dtype)[0]
