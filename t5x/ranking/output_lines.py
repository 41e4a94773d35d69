"""Output formats of rankings."""

from collections.abc import Mapping, Sequence
from typing import Any

from t5x.ranking.trec_files import msmarco_lines, trec_lines
from t5x.telemetry import jsonl

FORMATS = ("trec", "msmarco", "jsonl")


def ranking_lines(
    form: str, query: str, scores: Mapping[str, float], logits: Mapping[str, Sequence[float]]
) -> list[bytes]:
    """Return the output lines of a query.

    Args:
      form: one of FORMATS.
      scores: scores of the documents in input order.
      logits: label logits of the scored documents; jsonl writes only these documents.
    """
    if form == "jsonl":
        return [jsonl.encode(_record(query, doc, scores[doc], of_labels)) for doc, of_labels in logits.items()]
    return list((trec_lines if form == "trec" else msmarco_lines)({query: scores}))


def _record(query: str, doc: str, score: float, logits: Sequence[float]) -> dict[str, Any]:
    named = dict(zip(("true_logit", "false_logit"), map(float, logits), strict=False))
    return {"query_id": query, "doc_id": doc, "score": float(score), **named}
