"""duoT5: the top passages of a query are compared pairwise and ordered by their wins."""

from collections.abc import Callable, Sequence

import numpy as np

from t5x.ranking.reranker import Encoded, Reranker, scores


def pairs_of(query: str, documents: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return (query, document i, document j) for all i != j, ordered by i: k (k - 1) triples for k documents."""
    return [(query, a, b) for i, a in enumerate(documents) for j, b in enumerate(documents) if i != j]


def wins(
    reranker: Reranker,
    encoded: Encoded,
    counts: Sequence[int],
    *,
    rows: int | None = None,
    after_batch: Callable[[int], None] = lambda inputs: None,
) -> list[np.ndarray]:
    """Return the scores of each query's documents; NaN if a logit is not finite.

    Args:
      encoded: the encoded `pairs_of` of all queries, concatenated.
      counts: number of documents per query.
      rows, after_batch: see `LoadedModel.predictions`.
    """
    logits = reranker.logits(encoded, rows=rows, after_batch=after_batch)
    # An infinite logit would be a plain 0 or 1 here.
    found = np.where(np.isfinite(logits).all(axis=1), np.exp(scores(logits)), np.nan)
    made, start = [], 0
    for count in counts:
        end = start + count * (count - 1)
        preferences = np.zeros((count, count))
        preferences[~np.eye(count, dtype=bool)] = found[start:end]
        made.append(symmetric_sum(preferences))
        start = end
    return made


def symmetric_sum(preferences: np.ndarray) -> np.ndarray:
    """Return SYM-SUM: for each document i, the sum over the other documents j of p_ij + (1 - p_ji).

    Args:
      preferences: [k, k]; p_ij is the probability that i is more relevant than j. The diagonal is ignored.
    """
    others = ~np.eye(len(preferences), dtype=bool)
    return np.where(others, preferences + 1.0 - preferences.T, 0.0).sum(axis=1)
