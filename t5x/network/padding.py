"""Padding between tokens, which cuDNN's attention cannot mask.

The padding token (0 in T5) is padding wherever it occurs. Our own padding follows the tokens, but an input can contain
it as well: a literal `<pad>`, or an unknown character in a vocabulary whose unknown id is 0. cuDNN would turn the whole
batch into NaN.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from t5x._runtime.errors import UserError
from t5x.kernels.attention_inputs import Mask
from t5x.kernels.choice import ops
from t5x.kernels.ops import BACKENDS
from t5x.network.attention import by_reference
from t5x.network.config import NetworkConfig


class MaskingVariants(NamedTuple):
    """A function of batches, compiled in two variants.

    Attributes:
      usual: for most batches.
      by_reference: for batches with padding between tokens.
    """

    usual: Callable[..., Any]
    by_reference: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any], compiled: Callable[[Callable], Callable]) -> "MaskingVariants":
        """Return both variants of `function`; each is compiled when it is first needed."""

        def reference(*args: Any) -> Any:
            with by_reference():
                return function(*args)

        return cls(compiled(function), compiled(reference))

    def chosen(self, model: Any, batch: Mapping[str, np.ndarray]) -> Callable[..., Any]:
        """Return the variant for a batch. It needs all rows, because all processes must choose the same."""
        return self.by_reference if has_inner_padding(model, batch) else self.usual


def masks_any_padding(model: Any) -> bool:
    """Return whether the attention of the model's network masks padding at any position.

    Networks with our configuration are assumed to use our attention; all others are assumed to mask it.
    """
    config = getattr(getattr(model, "module", None), "config", None)
    if not isinstance(config, NetworkConfig) or getattr(model, "inputs_bidirectional_attention", False):
        return True
    name = config.attention_backend
    if name == "auto":
        dtype = jnp.float32 if config.float32_attention_logits else jnp.dtype(config.dtype)
        heads = jax.ShapeDtypeStruct((1, 2, config.num_heads, config.head_dim), dtype)
        name = ops().fastest(heads, heads, Mask())
    return BACKENDS.get(name, False)


def pad_id_of(module: Any) -> int:
    """Return the padding token of a network; 0 if its configuration has none."""
    return getattr(getattr(module, "config", None), "pad_token_id", 0)


def find_inner_padding(batch: Mapping[str, np.ndarray], pad_id: int = 0) -> dict[str, np.ndarray]:
    """Return {feature: bool [rows]}: whether a row has padding before a token that attention would have to mask.

    >>> find_inner_padding({"encoder_input_tokens": np.array([[5, 0, 1], [5, 1, 0]])})
    {'encoder_input_tokens': array([ True, False])}
    """
    if "encoder_segment_ids" in batch or "decoder_segment_ids" in batch:  # packed rows are never computed by cuDNN
        return {}
    names = [name for name in ("encoder_input_tokens", "decoder_target_tokens") if name in batch]
    if names and np.ndim(batch[names[0]]) == 3:  # lists of passages, whose targets are labels
        names = names[:1]
    has_padding = {}
    for name in names:
        real = np.asarray(batch[name]) != pad_id
        if real.ndim > 1:
            real = real.reshape(-1, real.shape[-1])
            has_padding[name] = (real[:, 1:] & ~real[:, :-1]).any(axis=1)
    return has_padding


def has_inner_padding(model: Any, batch: Mapping[str, np.ndarray]) -> bool:
    """Return whether the model can compute this batch only by reference."""
    if masks_any_padding(model):
        return False
    return any(rows.any() for rows in find_inner_padding(batch, pad_id_of(model.module)).values())


def check(model: Any, batch: Mapping[str, np.ndarray]) -> None:
    """Raise a UserError if the network cannot mask the padding of a batch."""
    if masks_any_padding(model):
        return
    pad_id = pad_id_of(model.module)
    for name, rows in find_inner_padding(batch, pad_id).items():
        if rows.any():
            raise UserError(
                f"{name} has padding (token {pad_id}) between other tokens in {rows.sum()} of {rows.size} rows, row "
                f"{rows.argmax()} first, which cuDNN's attention cannot mask. Inputs that contain <pad> cause "
                f"this, and vocabularies whose id of unknown tokens is {pad_id}. Fix them, or set network."
                f"{type(model.module.config).__name__}.attention_backend = 'pallas' or 'xla', which mask it."
            )
