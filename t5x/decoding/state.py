"""What the decoding functions share: the state of a step, where prompts end, and several decodes of one example."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from t5x.errors import UserError

NEG_INF = -1e7  # the score of a decode that is not there, and the logit of a forbidden token; T5X's value

_BLOCK = 128  # tokens that `top_k` looks at together; vocabularies are multiples of it

_WITHOUT_ROWS = ("cached_bias", "position_embedder_index")  # T5X's names of cache entries that all rows share


@flax.struct.dataclass
class DecodingState:
    """What a decoding function shows the network, and the functions that change its logits, at a step.

    A row is one decode; the `num_decodes` rows of an example stand together.

    Attributes:
      cur_index: int32 [rows], position of the token being fed.
      cur_token: int32 [rows, 1], that token.
      cache: the network's cache, advanced at every step.
      sequences: int32 [rows, length + 1], the start token, then prompt and output: decided up to `cur_index`.
      prompt_end: int32 [rows], position of the prompt's last token; 0, the start token, without a prompt.
      eos_id: int32, the token that ends a row.
    """

    cur_index: jax.Array
    cur_token: jax.Array
    cache: Any
    sequences: jax.Array
    prompt_end: jax.Array
    eos_id: jax.Array


TokensToLogits = Callable[[DecodingState], tuple[jax.Array, Any]]
LogitCallback = Callable[[jax.Array, DecodingState], jax.Array]


def begin(inputs: jax.Array, initial_index: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(sequences int32 [batch, length + 1], the position to start from [batch], the prompts' ends [batch]).

    `inputs` are the prompts, shifted right: position 0 is the start token, a later 0 is free for the output.
    """
    sequences = jnp.pad(inputs, ((0, 0), (0, 1))).astype(jnp.int32)
    if initial_index is not None:
        index = initial_index.astype(jnp.int32)
        return sequences, index, index
    sequences = sequences.at[:, 0].set(0)
    prompt_end = jnp.sum(jnp.cumprod(sequences[:, 1:] != 0, axis=1), axis=1).astype(jnp.int32)
    return sequences, jnp.zeros_like(prompt_end), prompt_end


def token_at(sequences: jax.Array, index: jax.Array) -> jax.Array:
    """int [..., length], int [...] -> int [...]; 0 beyond the end."""
    return jnp.take_along_axis(sequences, index[..., None], axis=-1, mode="fill", fill_value=0)[..., 0]


def with_token(sequences: jax.Array, index: jax.Array, token: jax.Array) -> jax.Array:
    """The sequences with `token` [...] written at `index` [...]; nothing is written beyond the end."""
    return jnp.where(jnp.arange(sequences.shape[-1]) == index[..., None], token[..., None], sequences)


def map_rows(function: Callable[[jax.Array], jax.Array], cache: Any, rows: int, axis: int) -> Any:
    """Applies `function` to the entries of a cache that have an axis of rows; others are shared by all rows."""

    def entry(path: tuple, leaf: jax.Array) -> jax.Array:
        shared = leaf.ndim <= axis or leaf.shape[axis] != rows
        if shared or (path and getattr(path[-1], "key", None) in _WITHOUT_ROWS):
            return leaf
        return function(leaf)

    return jax.tree_util.tree_map_with_path(entry, cache)


def repeat_rows(cache: Any, rows: int, times: int, axis: int = 0) -> Any:
    """A cache for `times` decodes of every row."""
    return cache if times == 1 else map_rows(lambda x: jnp.repeat(x, times, axis), cache, rows, axis)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """`jax.lax.top_k` over the last axis, ties included, without sorting all of a vocabulary.

    The k greatest values lie in the k blocks with the greatest maxima: only those are searched.
    """
    *front, size = x.shape
    if size % _BLOCK or size <= k * _BLOCK * 2:
        return jax.lax.top_k(x, k)
    blocks = x.reshape(-1, size // _BLOCK, _BLOCK)  # XLA has a program for matrices alone, and sorts anything else
    best = jnp.sort(jax.lax.top_k(jnp.max(blocks, axis=-1), k)[1], axis=-1)
    values, at = jax.lax.top_k(jnp.take_along_axis(blocks, best[..., None], axis=1).reshape(-1, k * _BLOCK), k)
    indices = jnp.take_along_axis(best, at // _BLOCK, axis=-1) * _BLOCK + at % _BLOCK
    return values.reshape(*front, k), indices.reshape(*front, k)


def take_beams(x: jax.Array, beams: jax.Array) -> jax.Array:
    """[batch, old, ...], int [batch, new] -> [batch, new, ...]."""
    return jax.vmap(lambda of_example, chosen: of_example.at[chosen].get(mode="promise_in_bounds"))(x, beams)


def remove_prefix(sequences: jax.Array, lengths: jax.Array) -> jax.Array:
    """Without each row's first tokens, filled up with zeros: [batch, decodes, length], int [batch] -> the same shape.

    >>> remove_prefix(jnp.array([[[5, 6, 7]], [[5, 6, 7]]]), jnp.array([1, 2]))[:, 0].tolist()
    [[6, 7, 0], [7, 0, 0]]
    """
    length = sequences.shape[-1]
    at = jnp.arange(length) + lengths[:, None, None]
    shifted = jnp.take_along_axis(sequences, jnp.minimum(at, length - 1) + jnp.zeros_like(sequences), axis=-1)
    return jnp.where(at < length, shifted, 0)


def example_keys(decode_rng: jax.Array | None, example_index: jax.Array) -> jax.Array:
    """A key for each example, [batch].

    Args:
      decode_rng: a key for each example, which stays as it is, or one, into which `example_index` is folded; None is
        `jax.random.key(0)`. Keys of either kind, `jax.random.key` or `jax.random.PRNGKey`.
      example_index: int [batch].
    """
    keys = jax.random.key(0) if decode_rng is None else decode_rng
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        keys = jax.random.wrap_key_data(keys)
    if keys.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(keys, example_index)
    if keys.shape != example_index.shape:
        raise UserError(f"decode_rng holds {keys.size} keys for {example_index.size} examples: give one, or one each.")
    return keys
