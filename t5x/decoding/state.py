"""The state of a decoding step, and the types of the functions that see it."""

from collections.abc import Callable
from typing import Any, Protocol

import flax.struct
import jax

NEG_INF = -1e7  # T5X's score of a missing decode and logit of a forbidden token


class StateView(Protocol):
    """What the network and logit callbacks see of a state; see `DecodingState`."""

    cur_index: jax.Array
    sequences: jax.Array
    cur_token: jax.Array
    cache: Any
    prompt_end: jax.Array | None
    eos_id: jax.Array | tuple[jax.Array, ...] | None


@flax.struct.dataclass
class DecodingState:
    """The state of a decoding step, as the network and logit callbacks see it. Custom decode functions also make it.

    A row is one decode. The `num_decodes` rows of an example are adjacent.

    Attributes:
      cur_index: int32 [rows], position of the token being fed.
      sequences: int32 [rows, length + 1], start token, prompt and output; final up to `cur_index`.
      cur_token: int32 [rows, 1], the token being fed.
      cache: the network's cache.
      prompt_end: int32 [rows], position of the last prompt token; 0 (the start token) without a prompt.
      eos_id: int32, the token that ends a row, or a tuple of several.
    """

    cur_index: jax.Array
    sequences: jax.Array
    cur_token: jax.Array
    cache: Any
    prompt_end: jax.Array | None = None
    eos_id: jax.Array | tuple[jax.Array, ...] | None = None


TokensToLogits = Callable[[StateView], tuple[jax.Array, Any]]
LogitCallback = Callable[[jax.Array, StateView], jax.Array]
