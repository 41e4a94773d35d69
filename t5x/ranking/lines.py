"""Rankings as lines of a file."""

from collections.abc import Mapping, Sequence
from typing import Any

from t5x.metrics.ranking_files import msmarco_lines, trec_lines
from t5x.telemetry import jsonl

FORMATS = ("trec", "msmarco", "jsonl")


def ranking_lines(
    form: str, query: str, scores: Mapping[str, float], logits: Mapping[str, Sequence[float]]
) -> list[bytes]:
    """The lines of a query.

    Args:
      form: one of FORMATS.
      scores: of its documents, in the order of the input.
      logits: of the labels, of those documents that were scored; jsonl has only these.
    """
    if form == "jsonl":
        return [jsonl.encode(_record(query, doc, scores[doc], of_labels)) for doc, of_labels in logits.items()]
    return list((trec_lines if form == "trec" else msmarco_lines)({query: scores}))


def _record(query: str, doc: str, score: float, logits: Sequence[float]) -> dict[str, Any]:
    named = dict(zip(("true_logit", "false_logit"), map(float, logits), strict=False))
    return {"query_id": query, "doc_id": doc, "score": float(score), **named}
