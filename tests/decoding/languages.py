"""Random languages that are small enough for exhaustive search."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from t5x.decoding.loop import PerExampleLogits

EOS = 1


@dataclasses.dataclass(frozen=True)
class Languages:
    """One language per example; the next token depends on the whole prefix.

    Attributes:
      table: float32 [batch, nodes, vocab], logits after each prefix; the child of node n by token t is
        n * vocab + t + 1.
      length: maximum length of a sequence.
    """

    table: np.ndarray
    length: int

    @classmethod
    def random(cls, seed: int, batch: int, vocab: int, length: int, scale: float = 1.5) -> "Languages":
        nodes = (vocab**length - 1) // (vocab - 1)
        return cls((np.random.default_rng(seed).normal(size=(batch, nodes, vocab)) * scale).astype(np.float32), length)

    @classmethod
    def with_ties(cls, seed: int, batch: int, vocab: int, length: int) -> "Languages":
        """Log probabilities that are multiples of 1/4, so that sums are exact; `raw` passes them to beam search."""
        sampled = cls.random(seed, batch, vocab, length)
        return cls((np.round(-np.abs(sampled.table)) / 4).astype(np.float32), length)

    @property
    def vocab(self) -> int:
        return self.table.shape[-1]

    def log_probs(self) -> np.ndarray:
        table = self.table.astype(np.float64)
        return table - np.log(np.exp(table).sum(-1, keepdims=True))

    def greedy(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (tokens [batch, length], log probability of each) of greedy decoding by its definition."""
        log_probs, rows = self.log_probs(), np.arange(len(self.table))
        node, ended, total, tokens = np.zeros_like(rows), np.zeros(len(rows), bool), np.zeros(len(rows)), []
        for _ in range(self.length):
            now = log_probs[rows, node]
            token = np.argmax(now, axis=1)
            total += np.where(ended, 0.0, now[rows, token])
            tokens.append(np.where(ended, 0, token))
            ended |= token == EOS
            node = np.where(ended, 0, node * self.vocab + token + 1)
        return np.stack(tokens, axis=1), total

    def problem(self) -> dict:
        """Return the arguments of a decoding function without prompts."""
        batch = self.table.shape[0]
        cache = {"node": jnp.zeros(batch, jnp.int32), "cache_index": jnp.int32(0)}
        return {"inputs": jnp.zeros((batch, self.length), jnp.int32), "cache": cache, "eos_id": EOS}

    def tokens_to_logits(self, table, state):
        """Look up the logits. Only the cache holds the prefix, so that mixed-up rows give wrong results."""
        token = state.cur_token[:, 0]
        node = jnp.where(state.cur_index == 0, 0, state.cache["node"] * self.vocab + token + 1)
        return rows_of(table, node), {"node": node, "cache_index": state.cache["cache_index"] + 1}

    def decode(self, decode_fn, **options):
        """Return (tokens, scores) as NumPy arrays; compiled, with the table and all numeric options traced."""
        static = {
            k: options.pop(k)
            for k in list(options)
            if not isinstance(options[k], float | jax.Array | np.ndarray | np.generic)
        }
        problem = self.problem()
        given = {name: options.pop(name) for name in ("inputs",) if name in options}
        decode = _compiled(decode_fn, self.vocab, self.length, tuple(static.items()))
        return jax.device_get(decode(jnp.asarray(self.table), {**problem, **given}, options))


@functools.cache
def _compiled(decode_fn, vocab, length, static):
    def run(table, problem, options):
        logits = lambda inputs, state: Languages(table, length).tokens_to_logits(inputs["table"], state)
        network = PerExampleLogits(logits, {"table": table}, axes={"table": 0})
        return decode_fn(tokens_to_logits=network, **problem, **options, **dict(static))

    return jax.jit(run)


def rows_of(table, node):
    """[batch, nodes, vocab] and [rows] -> [rows, vocab]; the rows of an example are adjacent."""
    example = jnp.arange(node.shape[0]) // (node.shape[0] // table.shape[0])
    return jnp.asarray(table)[example, jnp.minimum(node, table.shape[1] - 1)]


def raw(log_probs, state, *, table):
    """A logit callback that returns the table itself, not normalized."""
    del log_probs
    token = state.cur_token[:, 0]
    vocab = table.shape[-1]
    node = jnp.where(state.cur_index == 0, 0, state.cache["node"] * vocab + token + 1)
    return rows_of(table, node)


def search(
    log_probs: np.ndarray, beams: int, length: int, alpha: float, prompt=(), stop_early: bool = False
) -> list[tuple[float, list[int]]]:
    """Beam search by definition for one language: (score, tokens), worst first, with ties in T5X's order.

    T5X keeps its lists worst first, takes the first of equal values, and reverses what it has taken.

    Args:
      stop_early: stop where T5X does, so that the last reversal of ties is T5X's.
    """
    vocab, log_probs = log_probs.shape[-1], log_probs.tolist()
    live, finished = [(0.0, (), 0)], []
    for position in range(1, length + 1):
        if position <= len(prompt):
            token = prompt[position - 1]
            live = [(total, (*tokens, token), node * vocab + token + 1) for total, tokens, node in live]
            continue
        grown = [
            (total + log_prob, (*tokens, token), node * vocab + token + 1)
            for total, tokens, node in live
            for token, log_prob in enumerate(log_probs[node])
        ]
        grown = _best(grown, 2 * beams)
        penalty = ((5 + position) / 6) ** alpha
        ended = [(total / penalty, list(tokens)) for total, tokens, _ in grown if tokens[-1] == EOS]
        finished = _best([*finished, *ended], beams)[::-1]
        live = [candidate for candidate in grown if candidate[1][-1] != EOS][:beams][::-1]
        bound = live[-1][0] / ((5 + length) / 6) ** alpha if live else -np.inf
        if stop_early and len(finished) == beams and finished[0][0] > bound:
            break
    return finished or [(total, list(tokens)) for total, tokens, _ in live]


def _best(candidates: list, number: int) -> list:
    return sorted(candidates, key=lambda candidate: -candidate[0])[:number]  # stable: the first of equal ones


def all_sequences(log_probs: np.ndarray, length: int) -> list[tuple[list[int], list[float]]]:
    """Every sequence that ends within the length: its tokens, and the log probability after each token."""
    vocab, ended, open_ = log_probs.shape[-1], [], [((), (), 0)]
    log_probs = log_probs.tolist()
    for _ in range(length):
        grown = [
            (
                (*tokens, token),
                (*totals, (totals[-1] if totals else 0.0) + log_prob),
                node * vocab + token + 1,
            )
            for tokens, totals, node in open_
            for token, log_prob in enumerate(log_probs[node])
        ]
        ended += [(list(tokens), list(totals)) for tokens, totals, _ in grown if tokens[-1] == EOS]
        open_ = [sequence for sequence in grown if sequence[0][-1] != EOS]
    return ended
