"""Output constraints: functions (logits, state) -> logits for the `logit_callback_fn` of every decoding function.

Each function here returns a constraint; `chain` combines several. Constraints are pure and read `state` only. Sampling
and greedy decoding apply them to logits, beam search to log probabilities. Hugging Face does the same, which matters
for `repetition_penalty`.

Example:
  >>> import functools
  >>> from t5x.decoding import beam_search
  >>> callback = chain([repetition_penalty(1.2), no_repeat_ngrams(3), min_length(5)])
  >>> decode_fn = functools.partial(beam_search, length_penalty=1.0, logit_callback_fn=callback)
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.vocabularies import Vocabulary
from t5x.decoding import limits
from t5x.decoding.loop import is_row_independent, row_independent
from t5x.decoding.state import NEG_INF, LogitCallback, StateView, is_eos

PENALTIES = (1e-3, 1e3)  # the smallest and the largest repetition penalty


def chain(processors: Sequence[LogitCallback]) -> LogitCallback:
    """Return a constraint that applies `processors` in order."""

    def process(logits: jax.Array, state: StateView) -> jax.Array:
        for processor in processors:
            logits = processor(logits, state)
        return logits

    return row_independent(process) if all(map(is_row_independent, processors)) else process


def repetition_penalty(penalty: float | jax.Array) -> LogitCallback:
    """Penalize tokens that already occur in the sequence, including its start token and prompt.

    Args:
      penalty: positive logits are divided by it, negative ones multiplied; 1 changes nothing. One value, or one per
        row.

    Raises:
      UserError: if `penalty` is not in the range PENALTIES.
    """
    is_same_for_all = jnp.ndim(penalty) == 0
    if is_same_for_all:
        limits.check_number("repetition_penalty", penalty, *PENALTIES)

    def process(logits: jax.Array, state: StateView) -> jax.Array:
        written = jnp.arange(state.sequences.shape[1]) <= state.cur_index[:, None]
        seen = _mark(logits, state.sequences, written)
        factor = penalty if is_same_for_all else jnp.asarray(penalty)[:, None]
        return jnp.where(seen, jnp.where(logits < 0, logits * factor, logits / factor), logits)

    return row_independent(process) if is_same_for_all else process


def no_repeat_ngrams(size: int) -> LogitCallback:
    """Forbid repeated n-grams of `size` tokens, including those of the start token and prompt.

    Raises:
      UserError: if `size` is less than 1.
    """
    if size < 1:
        raise UserError(f"no_repeat_ngrams.size is {size}; it must be at least 1.")

    @row_independent
    def process(logits: jax.Array, state: StateView) -> jax.Array:
        sequences, index = state.sequences, state.cur_index[:, None]
        if size > sequences.shape[1]:  # no n-gram of this size fits
            return logits
        positions = jnp.arange(sequences.shape[1])
        repeats = positions <= index  # whether a token here would complete an n-gram again
        for back in range(1, size):
            tail = jnp.take_along_axis(sequences, jnp.maximum(index - back + 1, 0), axis=1)
            repeats &= (positions >= back) & (jnp.roll(sequences, back, axis=1) == tail)
        return jnp.where(_mark(logits, sequences, repeats), NEG_INF, logits)

    return process


def min_length(tokens: int | jax.Array) -> LogitCallback:
    """Forbid EOS before `tokens` tokens are generated (Hugging Face's `min_new_tokens`)."""

    def process(logits: jax.Array, state: StateView) -> jax.Array:
        early = (state.cur_index - _prompt_end(state) < tokens)[:, None]
        ends = is_eos(jnp.arange(logits.shape[-1]), state.eos_id)
        return jnp.where(early & ends, NEG_INF, logits)

    return row_independent(process) if jnp.ndim(tokens) == 0 else process


def forced_tokens(tokens: Sequence[int]) -> LogitCallback:
    """Force the first generated tokens.

    Raises:
      UserError: if `tokens` is not a list of token ids of the model.
    """
    forced = np.asarray(tokens, np.int32)
    if forced.ndim != 1 or not forced.size:
        raise UserError(f"forced_tokens must be a list of at least one token id, not {tokens!r}.")

    @row_independent
    def process(logits: jax.Array, state: StateView) -> jax.Array:
        _check_vocabulary(forced, logits, "forced_tokens")
        nth = state.cur_index - _prompt_end(state)
        inside = (nth >= 0) & (nth < forced.size)
        only = jnp.arange(logits.shape[-1]) == jnp.asarray(forced)[jnp.clip(nth, 0, forced.size - 1)][:, None]
        return jnp.where(only | ~inside[:, None], logits, NEG_INF)

    return process


def choices(sequences: Sequence[Sequence[int]]) -> LogitCallback:
    """Allow only the given sequences of token ids (without EOS), each followed by EOS.

    The cost of a step depends on the number of possible next tokens, not on the number of sequences. The longest
    sequence must fit after every prompt; otherwise its output is truncated.

    Raises:
      UserError: if there is no sequence, a token is not in the model's vocabulary, or the longest does not fit.
    """
    trie = _Trie(sequences)

    @row_independent
    def process(logits: jax.Array, state: StateView) -> jax.Array:
        _check_vocabulary(trie.tokens, logits, "choices")
        if (length := state.sequences.shape[1]) <= trie.depth + 1:
            raise UserError(
                f"The longest choice has {trie.depth} tokens and EOS, but at most {length - 1} tokens are generated. "
                f"Increase the length of the outputs to at least {trie.depth + 1}."
            )
        node = jnp.zeros(logits.shape[0], jnp.int32)
        for depth in range(trie.depth):
            position = _prompt_end(state) + 1 + depth
            token = jnp.take_along_axis(state.sequences, position[:, None], axis=1, mode="clip")[:, 0]
            node = jnp.where(position <= state.cur_index, trie.child(node, token), node)
        edges = trie.first_edge[node][:, None] + jnp.arange(trie.most_edges)
        tokens = jnp.asarray(trie.tokens)[jnp.minimum(edges, len(trie.tokens) - 1)]
        allowed = _mark(logits, tokens, edges < trie.first_edge[node + 1][:, None])
        ends = is_eos(jnp.arange(logits.shape[-1]), state.eos_id)
        return jnp.where(allowed | (ends & trie.ends[node][:, None]), logits, NEG_INF)

    return process


def text_choices(texts: Sequence[str], vocabulary: Vocabulary, max_length: int | None = None) -> LogitCallback:
    """Allow only the given strings.

    Args:
      texts: the strings.
      vocabulary: the model's output vocabulary.
      max_length: maximum number of generated tokens, including EOS; None if unknown.

    Raises:
      UserError: if a string cannot be generated, or has the same tokens as another.
    """
    texts_by_ids: dict[tuple[int, ...], str] = {}
    for text in texts:
        ids = tuple(vocabulary.encode(text))
        problem = None
        if not ids:
            problem = "has no tokens in the model's vocabulary"
        elif vocabulary.unk_id in ids:
            problem = f"has characters outside the model's vocabulary (it decodes to {vocabulary.decode(ids)!r})"
        elif vocabulary.eos_id in ids:
            problem = "contains the end-of-sequence token"
        elif max_length is not None and len(ids) >= max_length:
            problem = f"has {len(ids)} tokens and EOS: max_length must be at least {len(ids) + 1}, not {max_length}"
        elif ids in texts_by_ids:
            problem = f"has the same tokens as {texts_by_ids[ids]!r}"
        if problem is not None:
            raise UserError(f"choices: {text!r} {problem}. Change or remove it.")
        texts_by_ids[ids] = text
    return choices(list(texts_by_ids))


class _Trie:
    """A prefix tree of token sequences in flat arrays; node 0 is the root, the last node is a sink.

    Attributes:
      first_edge: int32 [nodes + 1]; the edges of node n are first_edge[n] … first_edge[n + 1], sorted by token.
      tokens, children: int32 [edges], token of an edge and the node it leads to.
      ends: bool [nodes], whether a sequence ends here. True for the sink, which every other token leads to.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]):
        sequences = sorted({tuple(int(token) for token in sequence) for sequence in sequences})
        if not sequences or sequences == [()]:
            raise UserError("choices needs at least one sequence of token ids that is not empty.")
        self.depth = max(map(len, sequences))
        nodes: dict[tuple[int, ...], int] = {(): 0}
        ends: set[int] = set()
        edges: dict[tuple[int, int], int] = {}
        for sequence in sequences:
            for end in range(1, len(sequence) + 1):
                parent, child = nodes[sequence[: end - 1]], nodes.setdefault(sequence[:end], len(nodes))
                edges[parent, sequence[end - 1]] = child
            ends.add(nodes[sequence])
        in_order = sorted(edges)
        self._sink = len(nodes)
        counts = np.bincount([node for node, _ in in_order], minlength=len(nodes) + 1)
        self.most_edges = int(counts.max())
        self.tokens = np.array([token for _, token in in_order], np.int32)
        self.children = np.array([edges[edge] for edge in in_order], np.int32)
        # JAX arrays, because traced values index them.
        self.first_edge = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
        self.ends = jnp.asarray([node in ends or node == self._sink for node in range(len(nodes) + 1)])

    def child(self, node: jax.Array, token: jax.Array) -> jax.Array:
        """Return the child [rows] of `node` [rows] by `token` [rows], by bisection over the node's edges."""
        tokens, children = jnp.asarray(self.tokens), jnp.asarray(self.children)
        low, high = self.first_edge[node], self.first_edge[node + 1]
        end = high
        for _ in range(self.most_edges.bit_length()):
            middle = (low + high) // 2
            less = (low < high) & (tokens[jnp.minimum(middle, len(self.tokens) - 1)] < token)
            low, high = jnp.where(less, middle + 1, low), jnp.where(less, high, jnp.minimum(middle, high))
        edge = jnp.minimum(low, len(self.tokens) - 1)
        return jnp.where((low < end) & (tokens[edge] == token), children[edge], self._sink)


def _prompt_end(state: StateView) -> jax.Array:
    """Return the position of each row's last prompt token; 0 in the state of a decode function that does not set it."""
    return jnp.zeros_like(state.cur_index) if state.prompt_end is None else state.prompt_end


def _mark(logits: jax.Array, tokens: jax.Array, which: jax.Array) -> jax.Array:
    """Return a bool mask like logits [rows, vocab] of the tokens [rows, n] where `which` [rows, n] is true."""
    row = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[row, jnp.where(which, tokens, logits.shape[-1])].set(True, mode="drop")


def _check_vocabulary(tokens: np.ndarray, logits: jax.Array, name: str) -> None:
    size = logits.shape[-1]
    if len(wrong := tokens[(tokens < 0) | (tokens >= size)]):
        raise UserError(f"{name} contains token {wrong[0]}, but the model's tokens are 0 … {size - 1}.")
