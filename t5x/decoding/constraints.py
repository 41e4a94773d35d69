"""What may be generated: functions (logits, state) -> logits for the `logit_callback_fn` of every decoding function.

Each function here makes one; `chain` makes one of several. They are pure, hold no state and look only at what stands in
`state.sequences`. Sampling and greedy decoding apply them to logits, beam search to log probabilities: so does Hugging
Face, where `repetition_penalty` gives the same numbers only if it is applied to the same.

Example:
  >>> callback = chain([repetition_penalty(1.2), no_repeat_ngrams(3), min_length(5)])
  >>> decode_fn = functools.partial(beam_search, length_penalty=1.0, logit_callback_fn=callback)
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from t5x.data.vocabularies import Vocabulary
from t5x.decoding.narrowing import is_of_any_rows, of_any_rows
from t5x.decoding.state import NEG_INF, DecodingState, LogitCallback
from t5x.errors import UserError


def chain(processors: Sequence[LogitCallback]) -> LogitCallback:
    """One after the other."""

    def process(logits: jax.Array, state: DecodingState) -> jax.Array:
        for processor in processors:
            logits = processor(logits, state)
        return logits

    return of_any_rows(process) if all(map(is_of_any_rows, processors)) else process


def repetition_penalty(penalty: float) -> LogitCallback:
    """Makes tokens less likely that stand in the sequence already, its start and prompt included.

    Their logits are divided by the penalty where they are above 0, and multiplied with it where they are below.
    """
    if not penalty > 0:
        raise UserError(f"repetition_penalty is {penalty}: it must be above 0 (1 changes nothing).")

    @of_any_rows
    def process(logits: jax.Array, state: DecodingState) -> jax.Array:
        there = jnp.arange(state.sequences.shape[1]) <= state.cur_index[:, None]
        seen = _marked(logits, state.sequences, there)
        return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)

    return process


def no_repeat_ngrams(size: int) -> LogitCallback:
    """No `size` tokens stand twice in a row in the sequence, its start and prompt included."""
    if size < 1:
        raise UserError(f"no_repeat_ngrams.size is {size}: it must be at least 1.")

    @of_any_rows
    def process(logits: jax.Array, state: DecodingState) -> jax.Array:
        sequences, index = state.sequences, state.cur_index[:, None]
        places = jnp.arange(sequences.shape[1])
        again = places <= index  # of the last token of an n-gram
        for back in range(1, size):
            tail = jnp.take_along_axis(sequences, jnp.maximum(index - back + 1, 0), axis=1)
            again &= (places >= back) & (jnp.roll(sequences, back, axis=1) == tail)
        again &= places >= size - 1
        return jnp.where(_marked(logits, sequences, again), NEG_INF, logits)

    return process


def min_length(tokens: int | jax.Array) -> LogitCallback:
    """EOS comes after so many generated tokens at the earliest (Hugging Face's `min_new_tokens`)."""

    def process(logits: jax.Array, state: DecodingState) -> jax.Array:
        early = (state.cur_index - state.prompt_end < tokens)[:, None]
        is_eos = jnp.arange(logits.shape[-1]) == state.eos_id
        return jnp.where(early & is_eos, NEG_INF, logits)

    return of_any_rows(process) if jnp.ndim(tokens) == 0 else process


def forced_tokens(tokens: Sequence[int]) -> LogitCallback:
    """The first generated tokens are these."""
    forced = np.asarray(tokens, np.int32)
    if forced.ndim != 1 or not forced.size:
        raise UserError(f"forced_tokens needs a list of token ids; got {tokens!r}.")

    @of_any_rows
    def process(logits: jax.Array, state: DecodingState) -> jax.Array:
        _check_vocabulary(forced, logits, "forced_tokens")
        nth = state.cur_index - state.prompt_end
        inside = (nth >= 0) & (nth < forced.size)
        only = jnp.arange(logits.shape[-1]) == jnp.asarray(forced)[jnp.clip(nth, 0, forced.size - 1)][:, None]
        return jnp.where(only | ~inside[:, None], logits, NEG_INF)

    return process


def choices(sequences: Sequence[Sequence[int]]) -> LogitCallback:
    """Only these sequences of token ids (without EOS) can come out, each followed by EOS.

    The cost of a step does not grow with their number, only with how many tokens can come next. The longest must fit
    behind every prompt, within the steps that are allowed: where decoding ends before it, a part of it comes out.
    """
    trie = _Trie(sequences)

    @of_any_rows
    def process(logits: jax.Array, state: DecodingState) -> jax.Array:
        _check_vocabulary(trie.tokens, logits, "choices")
        if state.sequences.shape[1] <= trie.depth + 1:
            raise UserError(
                f"The longest choice has {trie.depth} tokens and an EOS; {state.sequences.shape[1] - 1} are decoded at "
                "most. Allow longer targets."
            )
        node = jnp.zeros(logits.shape[0], jnp.int32)
        for depth in range(trie.depth):
            at = state.prompt_end + 1 + depth
            token = jnp.take_along_axis(state.sequences, at[:, None], axis=1, mode="clip")[:, 0]
            node = jnp.where(at <= state.cur_index, trie.child(node, token), node)
        edges = trie.first_edge[node][:, None] + jnp.arange(trie.most_edges)
        tokens = jnp.asarray(trie.tokens)[jnp.minimum(edges, len(trie.tokens) - 1)]
        allowed = _marked(logits, tokens, edges < trie.first_edge[node + 1][:, None])
        is_eos = jnp.arange(logits.shape[-1]) == state.eos_id
        return jnp.where(allowed | (is_eos & trie.ends[node][:, None]), logits, NEG_INF)

    return process


def text_choices(texts: Sequence[str], vocabulary: Vocabulary, max_length: int | None = None) -> LogitCallback:
    """`choices` of texts. Those that could not come out, or not as themselves, are refused.

    Args:
      max_length: tokens generated at most, EOS included; None: it is not known here.
    """
    found: dict[tuple[int, ...], str] = {}
    for text in texts:
        ids = tuple(vocabulary.encode(text))
        problem = None
        if not ids:
            problem = "has no tokens in the model's vocabulary"
        elif vocabulary.unk_id in ids:
            problem = f"has characters that the model's vocabulary does not know ({vocabulary.decode(ids)!r} is left)"
        elif vocabulary.eos_id in ids:
            problem = "contains the end of a text (EOS)"
        if problem is not None:
            raise UserError(f"choices: {text!r} {problem}, so it cannot come out. Change it, or leave it out.")
        if max_length is not None and len(ids) + 1 > max_length:
            raise UserError(
                f"choices: {text!r} has {len(ids)} tokens and an EOS, but max_length is {max_length}. Raise "
                f"max_length to {len(ids) + 1} or more, or leave the choice out."
            )
        if ids in found:
            raise UserError(
                f"choices: {found[ids]!r} and {text!r} have the same tokens, so they cannot be told apart. Leave one "
                "of them out."
            )
        found[ids] = text
    return choices(list(found))


class _Trie:
    """Sequences of tokens by their beginnings; node 0 is the root.

    Attributes:
      first_edge: int32 [nodes + 1]; the edges of node n are first_edge[n] … first_edge[n + 1], by their tokens.
      tokens, children: int32 [edges], what an edge stands for and where it leads.
      ends: bool [nodes], whether a sequence ends here. In the last node, where every other token leads, it does.
    """

    def __init__(self, sequences: Sequence[Sequence[int]]):
        sequences = sorted({tuple(int(token) for token in sequence) for sequence in sequences})
        if not sequences or sequences == [()]:
            raise UserError("choices needs at least one sequence of token ids that is not empty.")
        self.depth = max(map(len, sequences))
        nodes, ends = {(): 0}, set()
        edges: dict[tuple[int, int], int] = {}
        for sequence in sequences:
            for end in range(1, len(sequence) + 1):
                parent, child = nodes[sequence[: end - 1]], nodes.setdefault(sequence[:end], len(nodes))
                edges[parent, sequence[end - 1]] = child
            ends.add(nodes[sequence])
        in_order = sorted(edges)
        self._nowhere = len(nodes)
        counts = np.bincount([node for node, _ in in_order], minlength=len(nodes) + 1)
        self.most_edges = int(counts.max())
        self.tokens = np.array([token for _, token in in_order], np.int32)
        self.children = np.array([edges[edge] for edge in in_order], np.int32)
        # As arrays of JAX, which can be indexed while a step is traced.
        self.first_edge = jnp.asarray(np.cumsum([0, *counts]), jnp.int32)
        self.ends = jnp.asarray([node in ends or node == self._nowhere for node in range(len(nodes) + 1)])

    def child(self, node: jax.Array, token: jax.Array) -> jax.Array:
        """int [rows], int [rows] -> int [rows]: by bisection of a node's edges."""
        tokens, children = jnp.asarray(self.tokens), jnp.asarray(self.children)
        low, high = self.first_edge[node], self.first_edge[node + 1]
        end = high
        for _ in range(self.most_edges.bit_length()):
            middle = (low + high) // 2
            less = (low < high) & (tokens[jnp.minimum(middle, len(self.tokens) - 1)] < token)
            low, high = jnp.where(less, middle + 1, low), jnp.where(less, high, jnp.minimum(middle, high))
        at = jnp.minimum(low, len(self.tokens) - 1)
        return jnp.where((low < end) & (tokens[at] == token), children[at], self._nowhere)


def _marked(logits: jax.Array, tokens: jax.Array, which: jax.Array) -> jax.Array:
    """bool like logits [rows, vocab]: the tokens [rows, n] where `which` [rows, n] holds."""
    row = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[row, jnp.where(which, tokens, logits.shape[-1])].set(True, mode="drop")


def _check_vocabulary(tokens: np.ndarray, logits: jax.Array, name: str) -> None:
    if tokens.min() < 0 or tokens.max() >= logits.shape[-1]:
        wrong = tokens[(tokens < 0) | (tokens >= logits.shape[-1])][0]
        raise UserError(f"{name} holds token {wrong}; the model has {logits.shape[-1]}, from 0 on.")
