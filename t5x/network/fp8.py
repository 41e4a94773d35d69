"""Training matmuls in 8-bit floating point: e4m3 forward, e5m2 for gradients, with delayed scaling.

Computing a scale from the tensor that it scales needs a second pass over memory, which costs as much as FP8 saves. So
the scales of inputs and gradients come from the largest absolute values (amax) of previous steps. Kernels are small and
use their current values. The amax history is part of the train state: `flax_mutables/fp8` in a checkpoint, with
the layers stacked whether the network scans over them or not.

The largest values leave the backward pass as the "gradient" of the scales: each scale is used by one matmul, and the
derivative rule of `project` returns the amax in its place.

Alternatives that were considered:
  flax.linen.fp8_ops: each matmul has its own scales and histories. Query, key and value would quantize the same input
    three times, base would store 1,296 more arrays, and microbatches need its extended dtype, built on private JAX
    modules. With an empty history the scale is 1, and the first gradients underflow.
  qwix: scales come from the current tensor or are static. There is no delayed scaling.
  Transformer Engine: has it, but needs its own CUDA build and does not run on CPUs.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from t5x.kernels.choice import ops
from t5x.kernels.ops import amax
from t5x.network.config import NetworkConfig, T5Config, TransformerConfig

SCALES = "fp8"  # Linen's collection of scales, and its name in the train state
HISTORY = 1024  # steps
_FORWARD, _BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
_FIRST_GRADIENT_SCALE = 2.0**16  # for an empty history: gradients from 2**-32 to 0.9 are representable
_LARGEST_SCALE = 2.0**60  # the product of two scales and its inverse are float32

Tree = Any


def initial_history(config: T5Config | TransformerConfig) -> Tree:
    """Return zeros, float32 [layers, 1 + outputs, HISTORY], for every matmul input of the network's layers.

    They are named by tower, module and fused projection: `encoder/attention/query_key_value`. Row 0 is the input, the
    others are the gradients of the outputs.
    """
    gates = ["wi"] if len(config.mlp_activations) == 1 else [f"wi_{i}" for i in range(len(config.mlp_activations))]
    mlp = {"_".join(gates): 1, "wo": 1}
    self_attention = {"query_key_value": 3, "out": 1}
    cross_attention = {"query": 1, "key_value": 2, "out": 1}
    decoder = {"self_attention": self_attention, "mlp": mlp}
    if isinstance(config, T5Config):
        encoder = {"attention": self_attention, "mlp": mlp}
        decoder |= {"encoder_decoder_attention": cross_attention}
        towers = {"encoder": (config.num_encoder_layers, encoder), "decoder": (config.num_decoder_layers, decoder)}
    else:
        towers = {"decoder": (config.num_layers, decoder)}
    return {
        tower: jax.tree.map(lambda outputs, layers=layers: jnp.zeros((layers, 1 + outputs, HISTORY)), modules)
        for tower, (layers, modules) in towers.items()
    }


def scales(history: Tree) -> Tree:
    """Return the factors, [layers, 1 + outputs], that bring inputs and gradients into the range of FP8."""

    def of(history: jax.Array) -> jax.Array:
        amax = jnp.max(history, axis=-1)
        gradients = _scale(amax[:, 1:], _BACKWARD, empty=_FIRST_GRADIENT_SCALE)
        return jnp.concatenate([_scale(amax[:, :1], _FORWARD), gradients], axis=1)

    return jax.tree.map(of, history)


def next_history(history: Tree, amax: Tree) -> Tree:
    """Return the history with this step's amax in place of its oldest entry; one that is not finite counts as 0."""
    # Otherwise XLA computes the amax of all layers for each entry of the history.
    finite = jax.lax.optimization_barrier(jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0.0), amax))
    return jax.tree.map(lambda old, new: jnp.concatenate([new[..., None], old[..., :-1]], axis=-1), history, finite)


def collection(config: NetworkConfig, scales: Tree) -> Tree:
    """Return the scales as a Linen collection, named like the network's parameters."""
    if config.scan_layers:
        return {tower: {tower: modules} for tower, modules in scales.items()}

    def by_layer(modules: Tree) -> Tree:
        numbers = range(jax.tree.leaves(modules)[0].shape[0])
        return {f"layers_{i}": jax.tree.map(lambda x, i=i: x[i], modules) for i in numbers}

    return {tower: by_layer(modules) for tower, modules in scales.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def project(x: jax.Array, kernels: Sequence[jax.Array], scales: jax.Array, dtype: Any = None) -> list[jax.Array]:
    """Return x [..., in] times each kernel [in, ...], in FP8.

    Args:
      kernels: of the dtype of x, as are the gradients of both.
      scales: float32 [1 + kernels], factors for x and for the gradients of the results. Their "gradient" is the amax.
      dtype: dtype of the results; None is that of x.
    """
    return _forward(x, kernels, scales, dtype)[0]


def _forward(x, kernels, scales, dtype):
    rows = x.reshape(-1, x.shape[-1])
    whole8, x8_transposed, x_amax = ops().quantize(rows, scales[0], _FORWARD)
    results, kernels8 = [], []
    for x8, kernel in zip(_apart(whole8, len(kernels)), kernels, strict=True):
        scale = _scale(amax(kernel), _FORWARD)
        kernel8, kernel8_transposed, _ = ops().quantize(kernel.reshape(kernel.shape[0], -1), scale, _FORWARD)
        result = _dot(x8, kernel8_transposed, scales[0], scale, x.dtype, dtype or x.dtype)
        results.append(result.reshape(*x.shape[:-1], *kernel.shape[1:]))
        kernels8.append((kernel8, scale))
    # The empty array carries the shape and dtype of x.
    return results, (x8_transposed, kernels8, scales, x_amax, jnp.empty((*x.shape, 0), x.dtype))


def _backward(dtype, residuals, gradients):
    del dtype
    x8_transposed, kernels8, scales, x_amax, like = residuals
    to_x, to_kernels, all_amax = jnp.zeros((), like.dtype), [], [x_amax]
    each = zip(scales[1:], _apart(x8_transposed, len(gradients)), gradients, kernels8, strict=True)
    for scale, x8_transposed, gradient, (kernel8, kernel_scale) in each:
        rows = gradient.reshape(-1, kernel8.shape[1])
        gradient8, gradient8_transposed, gradient_amax = ops().quantize(rows, scale, _BACKWARD)
        all_amax.append(gradient_amax)
        to_x = _dot(gradient8, kernel8, scale, kernel_scale, like.dtype) + to_x  # as in `gpu_ops._separate_matmuls`
        to_kernel = _dot(x8_transposed, gradient8_transposed, scales[0], scale, like.dtype)
        to_kernels.append(to_kernel.reshape(-1, *gradient.shape[like.ndim - 2 :]))
    return to_x.reshape(like.shape[:-1]), to_kernels, jnp.stack(all_amax)


project.defvjp(_forward, _backward)


def _apart(x: jax.Array, times: int) -> Sequence[jax.Array]:
    """Return copies of x, which is not copied: XLA would fuse matmuls that share an operand, but not in FP8."""
    return jax.lax.optimization_barrier((x,) * times)


def _dot(a: jax.Array, b: jax.Array, a_scale: jax.Array, b_scale: jax.Array, dtype: Any, out: Any = None) -> jax.Array:
    """Return a @ b.T without the scales; exact up to the rounding of the result, since scales are powers of two.

    On GPUs, XLA recognizes this as an FP8 matmul, which applies the scales. Both operands must be stored with the
    contracted axis last: others are transposed first.
    """
    a, b = (x.astype(dtype) * (1.0 / scale).astype(dtype) for x, scale in ((a, a_scale), (b, b_scale)))
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=out or dtype)


def _scale(amax: jax.Array, dtype: Any, empty: float = 1.0) -> jax.Array:
    """Return the largest power of two that keeps `amax` in the range of `dtype`; `empty` for 0 and NaN."""
    ratio = jnp.clip(float(jnp.finfo(dtype).max) / amax, 1 / _LARGEST_SCALE, _LARGEST_SCALE)
    exponent = jax.lax.bitcast_convert_type(ratio, jnp.int32) & 0x7F800000  # clears the mantissa; log2 may round up
    return jnp.where(amax > 0, jax.lax.bitcast_convert_type(exponent, jnp.float32), empty)
