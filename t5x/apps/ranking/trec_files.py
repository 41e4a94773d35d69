"""Files of judgments (qrels) and runs, in the formats of TREC, MS MARCO and BEIR. Fields are separated by whitespace.

    qrels             query  0|Q0  document  grade             TREC and MS MARCO
    qrels, BEIR       query  document  grade                   after the header: query-id  corpus-id  score
    run, TREC         query  Q0  document  rank  score  tag
    run, MS MARCO     query  document  rank

Files may be remote, and compressed with gzip. The first line decides the format of a run.
"""

import dataclasses
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from t5x._runtime.errors import UserError
from t5x.apps.ranking.passage_files import read_lines
from t5x.metrics.ranking import PerQuery, Qrels, Run, compare, per_query, ranked, table
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)

Path = str | os.PathLike[str]
_TREC_RUN = ("query", "Q0", "document", "rank", "score", "tag")
_MSMARCO_RUN = ("query", "document", "rank")
_QRELS = ("query", "iteration", "document", "grade")
_BEIR_QRELS = ("query", "document", "grade")
_BEIR_HEADER = ["query-id", "corpus-id", "score"]


def read_qrels(path: Path) -> dict[str, dict[str, int]]:
    """Read a file of judgments as {query: {document: grade}}.

    Raises:
      UserError: if the file cannot be read or a line is invalid.
    """
    qrels: dict[str, dict[str, int]] = {}
    for where, fields in _read_fields(path, "judgments", [_QRELS]):
        _add(qrels, where, fields, _number(where, fields, "grade", int))
    return qrels


def read_run(path: Path) -> dict[str, dict[str, float]]:
    """Read a run as {query: {document: score}}; if the file has only ranks, the score is minus the rank.

    Raises:
      UserError: if the file cannot be read or a line is invalid.
    """
    run: dict[str, dict[str, float]] = {}
    for where, fields in _read_fields(path, "a run", [_TREC_RUN, _MSMARCO_RUN]):
        if "score" in fields:
            _add(run, where, fields, _number(where, fields, "score", float))
        else:
            _add(run, where, fields, -float(_number(where, fields, "rank", int)))
    return run


def ranking_lines(
    form: str, query: str, scores: Mapping[str, float], logits: Mapping[str, Sequence[float]]
) -> list[bytes]:
    """Return the output lines of a query.

    Args:
      form: `trec`, `msmarco` or `jsonl`.
      scores: scores of the documents in input order.
      logits: label logits of the scored documents; jsonl writes only these documents.
    """
    if form != "jsonl":
        return list((trec_lines if form == "trec" else msmarco_lines)({query: scores}))
    lines = []
    for document, of_labels in logits.items():
        named = dict(zip(("true_logit", "false_logit"), map(float, of_labels), strict=False))
        lines.append(jsonl.encode({"query_id": query, "doc_id": document, "score": float(scores[document]), **named}))
    return lines


def trec_lines(run: Run, tag: str = "t5x") -> Iterator[bytes]:
    """Yield the lines of a run in TREC's format, ranked; scores are written without loss.

    Raises:
      UserError: if an id cannot be written.
    """
    for query, scores in run.items():
        for rank, document in enumerate(ranked(scores, query), start=1):
            score = float(scores[document])
            yield f"{check_id(query)} Q0 {check_id(document)} {rank} {score!r} {check_id(tag)}\n".encode()


def msmarco_lines(run: Run) -> Iterator[bytes]:
    """Yield the lines of a run in MS MARCO's format: ranks from 1, without scores.

    Raises:
      UserError: if an id cannot be written.
    """
    for query, scores in run.items():
        for rank, document in enumerate(ranked(scores, query), start=1):
            yield f"{check_id(query)}\t{check_id(document)}\t{rank}\n".encode()


def check_id(text: str, hint: str = "") -> str:
    """Return `text` if it can be an id in a run, or raise a UserError, whose message ends with `hint`."""
    if not isinstance(text, str) or not re.fullmatch(r"\S+", text, re.ASCII):
        raise UserError(f"{text!r} cannot be written as an id: ids must be non-empty strings without whitespace.{hint}")
    return text


def _read_fields(path: Path, what: str, kinds: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the position (file:line) and the named fields of every line that is not blank.

    Args:
      what: content of the file, for messages.
      kinds: names of the fields of a line. The first line decides between them; BEIR's is a header.
    """
    count = 0
    for count, line in enumerate(read_lines(os.fspath(path)), start=1):
        line.text()  # checks that it is UTF-8
        values = [value.decode() for value in line.content.split()]  # ids may contain non-ASCII whitespace
        if count == 1 and kinds == [_QRELS] and values == _BEIR_HEADER:
            kinds = [_BEIR_QRELS]
            continue
        matching = [kind for kind in kinds if len(kind) == len(values)]
        if not matching:
            needed = " or ".join(f"{len(kind)} ({' '.join(kind)})" for kind in kinds)
            content = f"{len(values)} fields, but a line of {what} has {needed}: {' '.join(values)[:80]!r}"
            raise UserError(f"{line.where}: {content}")
        kinds = matching
        yield line.where, dict(zip(kinds[0], values, strict=True))
    if not count:
        raise UserError(f"{os.fspath(path)} is empty.")


def _add(values: dict[str, dict], where: str, fields: Mapping[str, str], value: float) -> None:
    query, document = fields["query"], fields["document"]
    if document in values.setdefault(query, {}):
        raise UserError(f"{where}: document {document!r} occurs a second time for query {query!r}. Remove one.")
    values[query][document] = value


def _number(where: str, fields: Mapping[str, str], name: str, kind: Callable[[str], float]) -> float:
    try:
        value = kind(fields[name])
    except ValueError:
        value = math.nan
    if math.isnan(value):
        needed = "an integer" if kind is int else "a number"
        raise UserError(f"{where}: the {name} must be {needed}, not {fields[name]!r}.")
    return value


def evaluation_report(
    qrels: Qrels,
    runs: Mapping[str, Run],
    measures: Sequence[str],
    *,
    relevance_level: int = 1,
    missing_as_zero: bool = False,
    per_query_path: str | None = None,
    as_json: bool = False,
) -> str:
    """Return a table of the runs' measures, followed by how each run differs from the first.

    Args:
      runs: {name: run}; the first is the baseline.
      measures, relevance_level, missing_as_zero: see `t5x.metrics.ranking.per_query`.
      per_query_path: file for the values of every query, as JSON lines.
      as_json: return a JSON object with `runs` and `differences` instead.
    """
    values: dict[str, PerQuery] = {}
    for name, run in runs.items():
        if unjudged := sum(query not in qrels for query in run):
            log.warning("%s: %d of %d queries have no judgments and are ignored", name, unjudged, len(run))
        values[name] = per_query(qrels, run, measures, relevance_level=relevance_level, missing_as_zero=missing_as_zero)
    if per_query_path is not None:
        jsonl.replace(per_query_path, map(jsonl.encode, _by_query(values)))
    as_table = table(values)  # which checks that the runs can be compared
    (_, base), *others = values.items()
    differences = [
        {"run": name, "measure": measure, **dataclasses.asdict(compare(base[measure], of_queries))}
        for name, of_run in others
        for measure, of_queries in of_run.items()
        if len(of_queries) > 1
    ]
    if as_json:
        means = {name: {m: sum(v.values()) / len(v) for m, v in of_run.items()} for name, of_run in values.items()}
        return jsonl.encode({"runs": means, "differences": differences}).decode().rstrip()
    lines = [
        f"{row['run']}, {row['measure']}: {row['difference']:+.4f}, p = {row['t_test']:.2g} (t-test), "
        f"{row['randomization']:.2g} (randomization)"
        for row in differences
    ]
    return "\n".join([as_table, *lines])


def _by_query(values: Mapping[str, PerQuery]) -> list[dict]:
    return [
        {"run": name, "query_id": query, **{measure: of_queries[query] for measure, of_queries in of_run.items()}}
        for name, of_run in values.items()
        for query in next(iter(of_run.values()))
    ]
