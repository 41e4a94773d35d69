"""The state of a decoding step, and the types of the functions that see it."""

import functools
import operator
from collections.abc import Callable
from typing import Any, Protocol

import flax.struct
import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from t5x._runtime.errors import UserError

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


_BLOCK = 128  # tokens per block in `top_k`; vocabulary sizes are multiples of it
SHARED_CACHE_ENTRIES = ("cached_bias", "position_embedder_index")  # T5X's cache entries without a row axis


def start_from_prompts(
    inputs: jax.Array, initial_index: jax.Array | None, pad_id: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return sequences [batch, length + 1], start positions [batch] and prompt ends [batch], all int32.

    `inputs` are the prompts, shifted right: position 0 is the start token; later padding is free for output.
    """
    sequences = jnp.pad(inputs, ((0, 0), (0, 1)), constant_values=pad_id).astype(jnp.int32)
    start = 0 if initial_index is None else initial_index
    index = jnp.broadcast_to(jnp.asarray(start, jnp.int32), sequences.shape[:1])
    filled = (sequences[:, 1:] != pad_id) | (jnp.arange(1, sequences.shape[1]) <= index[:, None])
    return sequences, index, jnp.sum(jnp.cumprod(filled, axis=1), axis=1).astype(jnp.int32)


def is_eos(tokens: jax.Array, eos_id: Any) -> jax.Array:
    """Return which tokens end a sequence: those equal to `eos_id`, or to one of a tuple of ids."""
    ids = eos_id if isinstance(eos_id, tuple | list) else (eos_id,)
    return functools.reduce(operator.or_, (tokens == one for one in ids))


def token_at(sequences: jax.Array, index: jax.Array) -> jax.Array:
    """Return the token [...] at `index` [...] of sequences [..., length]; 0 beyond the end."""
    return jnp.take_along_axis(sequences, index[..., None], axis=-1, mode="fill", fill_value=0)[..., 0]


def set_token(sequences: jax.Array, index: jax.Array, token: jax.Array) -> jax.Array:
    """Write `token` [...] at `index` [...] of sequences [..., length]; a no-op beyond the end."""
    return jnp.where(jnp.arange(sequences.shape[-1]) == index[..., None], token[..., None], sequences)


def entry_name(path: tuple) -> str | None:
    """Return the name of a cache entry from its key path."""
    return getattr(path[-1], "key", None) if path else None


def map_cache(function: Callable[[jax.Array], jax.Array], cache: Any, rows: int, axis: int) -> Any:
    """Apply `function` to every cache entry that has a row axis; the others are shared by all rows."""

    def map_entry(path: tuple, leaf: jax.Array) -> jax.Array:
        shared = leaf.ndim <= axis or leaf.shape[axis] != rows
        return leaf if shared or entry_name(path) in SHARED_CACHE_ENTRIES else function(leaf)

    return jax.tree_util.tree_map_with_path(map_entry, cache)


def repeat_rows(cache: Any, rows: int, times: int, axis: int = 0) -> Any:
    """Repeat every row of a cache `times` times, for several decodes per example."""
    return cache if times == 1 else map_cache(lambda x: jnp.repeat(x, times, axis), cache, rows, axis)


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Compute `jax.lax.top_k` over the last axis, with the same ties, without sorting the whole vocabulary.

    The k largest values lie in the k blocks with the largest maxima, so only those blocks are searched.
    """
    *front, size = x.shape
    if size % _BLOCK or size <= k * _BLOCK * 2:
        return _top_k(x, k)
    blocks = x.reshape(-1, size // _BLOCK, _BLOCK)  # XLA has a fast top-k for matrices only; it sorts other ranks
    best = jnp.sort(_top_k(jnp.max(blocks, axis=-1), k)[1], axis=-1)
    values, offsets = _top_k(jnp.take_along_axis(blocks, best[..., None], axis=1).reshape(-1, k * _BLOCK), k)
    indices = jnp.take_along_axis(best, offsets // _BLOCK, axis=-1) * _BLOCK + offsets % _BLOCK
    return values.reshape(*front, k), indices.reshape(*front, k)


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    if not is_symbolic_dim(x.shape[0]):
        return jax.lax.top_k(x, k)
    order = jnp.argsort(x, axis=-1, descending=True)[..., :k]  # TensorFlow cannot run an exported top_k of any size
    return jnp.take_along_axis(x, order, axis=-1), order


def take_beams(x: jax.Array, beams: jax.Array) -> jax.Array:
    """Gather beams: [batch, old, ...] and int [batch, new] -> [batch, new, ...]."""
    return jax.vmap(lambda row, chosen: row.at[chosen].get(mode="promise_in_bounds"))(x, beams)


def remove_prefix(sequence: jax.Array, prefix_length: jax.Array) -> jax.Array:
    """Remove the first `prefix_length[i]` tokens of every decode of example i and pad with zeros.

    Args:
      sequence: int [batch, decodes, length], or [batch, length].
      prefix_length: int [batch].

    Returns:
      int, like `sequence`.

    Example:
      >>> remove_prefix(jnp.array([[[5, 6, 7]], [[5, 6, 7]]]), jnp.array([1, 2]))[:, 0].tolist()
      [[6, 7, 0], [7, 0, 0]]
    """
    length = sequence.shape[-1]
    source = jnp.arange(length) + prefix_length.reshape(-1, *[1] * (sequence.ndim - 1))
    shifted = jnp.take_along_axis(sequence, jnp.broadcast_to(jnp.minimum(source, length - 1), sequence.shape), axis=-1)
    return jnp.where(source < length, shifted, 0)


def example_keys(decode_rng: jax.Array | None, example_index: jax.Array) -> jax.Array:
    """Return one random key per example.

    Args:
      decode_rng: one key per example, returned unchanged; or a single key, into which `example_index` is folded.
        Both `jax.random.key` and `jax.random.PRNGKey` work. None is `jax.random.key(0)`.
      example_index: int [batch].

    Returns:
      Keys [batch].

    Raises:
      UserError: if there are several keys, but not one per example.
    """
    keys = jax.random.key(0) if decode_rng is None else decode_rng
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        keys = jax.random.wrap_key_data(keys)
    if keys.ndim == 0:
        return jax.vmap(jax.random.fold_in, (None, 0))(keys, example_index)
    if keys.shape != example_index.shape:
        raise UserError(f"decode_rng has {keys.size} keys for {example_index.size} examples. Pass one, or one each.")
    return keys
