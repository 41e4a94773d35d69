"""The output of `t5x eval`: the metrics of every checkpoint as a table or as JSON lines."""

import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from typing import TextIO

from t5x.telemetry import jsonl

Results = Mapping[int, Mapping[str, Mapping[str, float]]]

# Metrics under teacher forcing that are printed; all of them are in the files.
_OF_TRAINING = ("loss_per_nonpadding_target_token", "accuracy")
_LOWER_IS_BETTER = {"loss", "edit", "distance", "perplexity", "error", "wer", "cer", "ter"}
_BEST = "*"
_GAP = "  "


def print_results(results: Results, *, as_json: bool = False, stream: TextIO | None = None) -> None:
    """Print to standard output or `stream`. On a terminal, the table is wrapped to its width."""
    stream = sys.stdout if stream is None else stream
    if as_json:
        text = json_lines(results)
    elif stream.isatty():
        text = table(results, width=shutil.get_terminal_size().columns, bold="NO_COLOR" not in os.environ)
    else:
        text = table(results)
    print(text, end="", file=stream, flush=True)


def json_lines(results: Results) -> str:
    """Return one line per step and task.

    >>> print(json_lines({4: {"dates": {"accuracy": 50.0}}}), end="")
    {"step": 4, "task": "dates", "metrics": {"accuracy": 50.0}}
    """
    records = [
        {"step": step, "task": task, "metrics": metrics}
        for step, of_step in results.items()
        for task, metrics in of_step.items()
    ]
    return b"".join(map(jsonl.encode, records)).decode()


def table(results: Results, *, width: int | None = None, bold: bool = False) -> str:
    """Return a table with a row per step and a column per metric. The best value of several steps has a star.

    >>> print(table({2: {"sums": {"accuracy": 25.0, "loss": 2.5}}, 4: {"sums": {"accuracy": 75.0}}}), end="")
    step  sums/accuracy  sums/loss
       2            25         2.5
       4            75*

    Args:
      width: maximum width of a line; further columns are put below. None is unlimited.
      bold: also print the best values in bold, for terminals.
    """
    columns = {
        f"{task}/{metric}": (task, metric)
        for of_step in results.values()
        for task, metrics in of_step.items()
        for metric in metrics
        if not task.startswith("training_eval/") or metric in _OF_TRAINING
    }
    steps = ["step", *map(str, results)]
    drawn = [_column(name, [results[step].get(task, {}).get(metric) for step in results])
             for name, (task, metric) in columns.items()]  # fmt: skip
    first = _aligned(steps)
    blocks: list[list[list[str]]] = [[first]]
    for column in drawn:
        used = sum(len(other[0]) + len(_GAP) for other in blocks[-1])
        if width is not None and len(blocks[-1]) > 1 and used + len(column[0]) > width:
            blocks.append([first])
        blocks[-1].append(column)
    drawn_blocks = ["".join(f"{_GAP.join(row).rstrip()}\n" for row in zip(*block, strict=True)) for block in blocks]
    text = "\n".join(drawn_blocks)
    return re.sub(r"[^\s]+\*(?=\s)", lambda found: f"\033[1m{found[0]}\033[0m", text) if bold else text


def _column(name: str, values: list[float | None]) -> list[str]:
    there = [value for value in values if value is not None and not math.isnan(value)]
    best = None
    if len(values) > 1 and len(set(there)) > 1:
        best = (min if _lower_is_better(name) else max)(there)
    cells = ["" if value is None else f"{value:.5g}{_BEST if value == best else ' ' * (best is not None)}"
             for value in values]  # fmt: skip
    return _aligned([name, *cells])


def _lower_is_better(name: str) -> bool:
    metric = name.rsplit("/", 1)[-1].lower()
    return not _LOWER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", metric))


def _aligned(cells: list[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.rjust(width) for cell in cells]
