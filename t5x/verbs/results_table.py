"""The output of `t5x eval`: the metrics of every checkpoint as a table or as JSON lines."""

import math
import os
import re
import shutil
import sys
from collections.abc import Mapping

from t5x.telemetry import jsonl

Results = Mapping[int, Mapping[str, Mapping[str, float]]]

# Metrics under teacher forcing that are printed; all of them are in the files.
_OF_TRAINING = ("loss_per_nonpadding_target_token", "accuracy")
_LOWER_IS_BETTER = {"loss", "edit", "distance", "perplexity", "error", "wer", "cer", "ter"}
_BEST = "*"
_GAP = "  "


def print_results(results: Results, *, as_json: bool = False) -> None:
    """Print to standard output. On a terminal, the table is wrapped to its width."""
    if as_json:
        text = json_lines(results)
    elif sys.stdout.isatty():
        text = table(results, width=shutil.get_terminal_size().columns, bold="NO_COLOR" not in os.environ)
    else:
        text = table(results)
    print(text, end="", flush=True)


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
    names = dict.fromkeys(
        (task, metric)
        for of_step in results.values()
        for task, metrics in of_step.items()
        for metric in metrics
        if not task.startswith("training_eval/") or metric in _OF_TRAINING
    )
    first = _align(["step", *map(str, results)])
    blocks: list[list[list[str]]] = [[first]]
    for task, metric in names:
        column = _column(f"{task}/{metric}", [of_step.get(task, {}).get(metric) for of_step in results.values()])
        used = sum(len(cells[0]) + len(_GAP) for cells in blocks[-1])
        if width is not None and len(blocks[-1]) > 1 and used + len(column[0]) > width:
            blocks.append([first])
        blocks[-1].append(column)
    text = "\n".join("".join(f"{_GAP.join(row).rstrip()}\n" for row in zip(*block, strict=True)) for block in blocks)
    return re.sub(r"[^\s]+\*(?=\s)", lambda cell: f"\033[1m{cell[0]}\033[0m", text) if bold else text


def _column(name: str, values: list[float | None]) -> list[str]:
    numbers = {value for value in values if value is not None and not math.isnan(value)}
    best = (min if _lower_is_better(name) else max)(numbers) if len(numbers) > 1 else None
    marks = ["" if best is None else _BEST if value == best else " " for value in values]
    cells = ("" if value is None else f"{value:.5g}{mark}" for value, mark in zip(values, marks, strict=True))
    return _align([name, *cells])


def _lower_is_better(name: str) -> bool:
    metric = name.rsplit("/", 1)[-1].lower()
    return not _LOWER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", metric))


def _align(cells: list[str]) -> list[str]:
    width = max(map(len, cells))
    return [cell.rjust(width) for cell in cells]
