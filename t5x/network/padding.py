"""Padding between tokens, which only the reference of attention masks.

Token 0 is padding wherever it stands. Ours stands behind the tokens, but a text may bring it along: one with `<pad>` in
it, or with what a vocabulary of id 0 for the unknown does not know. Fused attention would make its whole batch NaN.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x.errors import UserError
from t5x.network.attention import Mask, cudnn_refuses
from t5x.network.config import NetworkConfig

_TOKENS = ("encoder_input_tokens", "decoder_target_tokens")
_BY_REFERENCE = ("encoder_segment_ids", "decoder_segment_ids", "decoder_causal_attention")  # see `cudnn_refuses`


def may_be_anywhere(module: Any) -> bool:
    """Whether the network's attention masks padding wherever it stands; of networks that are not ours, nothing is known
    against it."""
    config = getattr(module, "config", None)
    if not isinstance(config, NetworkConfig):
        return True
    if config.attention_backend != "auto":
        return config.attention_backend == "xla"
    dtype = jnp.float32 if config.float32_attention_logits else jnp.dtype(config.dtype)
    heads = jax.ShapeDtypeStruct((1, 2, config.num_heads, config.head_dim), dtype)
    return cudnn_refuses(heads, heads, Mask(), None) is not None


def is_between(ids: Sequence[int]) -> bool:
    """Whether padding stands before a token of this row.

    >>> is_between([5, 0, 1]), is_between([5, 1, 0, 0]), is_between([])
    (True, False, False)
    """
    return 0 in ids and bool(_rows(np.asarray(ids)[None])[0])


def check(module: Any, batch: Mapping[str, np.ndarray]) -> None:
    """Raises where the network cannot mask the padding of a batch."""
    if may_be_anywhere(module) or any(name in batch for name in _BY_REFERENCE):
        return
    for name in _TOKENS:
        if name in batch and (bad := np.flatnonzero(_rows(np.asarray(batch[name])))).size:
            raise UserError(
                f"{name} has padding (token 0) between other tokens in {bad.size} of {len(batch[name])} rows, row "
                f"{bad[0]} first, which fused attention cannot mask. Texts with <pad> in them do that, and a "
                "vocabulary that has id 0 for what it does not know. Mend them, or set network.T5Config."
                "attention_backend = 'xla', which is slower."
            )


def _rows(tokens: np.ndarray) -> np.ndarray:
    """bool [rows], of int [rows, length]."""
    real = tokens != 0
    return (real[:, 1:] & ~real[:, :-1]).any(axis=1)
