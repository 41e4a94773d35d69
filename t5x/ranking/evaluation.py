"""Tables of runs measured against judgments."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from t5x.metrics.ranking import PerQuery, Qrels, Run, compare, per_query, table
from t5x.ranking.trec_files import read_run
from t5x.telemetry import jsonl

log = logging.getLogger(__name__)

MEASURES = ("mrr@10", "ndcg@10", "recall@100", "map")


def report(
    qrels: Qrels,
    runs: Mapping[str, Run],
    paths: Mapping[str, str],
    measures: Sequence[str] = MEASURES,
    *,
    relevance_level: int = 1,
    missing_as_zero: bool = False,
    per_query_path: str | None = None,
    as_json: bool = False,
) -> str:
    """Return a table of the runs' measures, followed by how each run differs from the first.

    Args:
      runs: {name: run}.
      paths: {name: run file}, added after `runs`.
      measures, relevance_level, missing_as_zero: see `t5x.metrics.ranking.per_query`.
      per_query_path: file for the values of every query, as JSON lines.
      as_json: return a JSON object with `runs` and `differences` instead.
    """
    values: dict[str, PerQuery] = {}
    for name, run in [*runs.items(), *((name, read_run(path)) for name, path in paths.items())]:
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
