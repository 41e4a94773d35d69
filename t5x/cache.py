"""Write the caches of tasks: `t5x cache`."""

import logging
from collections.abc import Sequence

from t5x.data import cache_writer, cached
from t5x.data.config import import_task_module
from t5x.data.tasks import get_mixture_or_task, get_subtasks
from t5x.errors import UserError

logger = logging.getLogger(__name__)


def cache(
    mixture_or_task_name: str,
    *,
    modules: Sequence[str] = (),
    splits: Sequence[str] | None = None,
    output_dir: str | None = None,
    num_workers: int | None = None,
    overwrite: bool = False,
    drop_text: bool = False,
    skip_bad_examples: bool = False,
    runner: str | None = None,
) -> list[cache_writer.Written]:
    """Cache a task, or all tasks of a mixture, and print a table of the splits.

    Args:
      modules: dotted names or .py files that register the tasks.
      splits: None caches all splits of each task.
      output_dir: directory of the caches; None is where they are looked up. For the other arguments see
        `cache_writer.write`.
    """
    for module in modules:
        import_task_module(module)
    found = get_mixture_or_task(mixture_or_task_name)
    if unknown := [split for split in splits or () if split not in found.splits]:
        raise UserError(f"{found.name!r} has no split {unknown[0]!r}; it has {', '.join(map(repr, found.splits))}.")
    tasks = get_subtasks(found)
    reasons = {task.name: task.why_not_cached() for task in tasks}
    if all(reasons.values()):
        raise UserError("\n".join(reasons.values()))
    if output_dir is not None:
        output_dir = cached.local_directory(output_dir, "--output_dir")
    written = []
    for task in tasks:
        if reasons[task.name]:
            logger.info("%s", reasons[task.name])
            continue
        for split in splits or task.splits:
            if split not in task.splits:
                continue
            one = cache_writer.write(
                task,
                split,
                directory=output_dir,
                num_workers=num_workers,
                overwrite=overwrite,
                drop_text=drop_text,
                skip_bad_examples=skip_bad_examples,
                runner=runner,
            )
            state = "is whole" if not one.made else f"is written: {one.made} of {one.shards} shard(s) made now"
            logger.info("%s %s", one.path, state)
            if one.bad:
                logger.warning("%d bad example(s) of %s %s are left out", one.bad, one.task, one.split)
            written.append(one)
    _print_table(written)
    if output_dir is not None:
        logger.info("It is found with T5X_TASK_CACHES=%s", output_dir)
    return written


def _print_table(written: Sequence[cache_writer.Written]) -> None:
    rows = [("task", "split", "examples", "tokens", "bytes", "seconds")]
    for one in written:
        rows.append(
            (one.task, one.split, f"{one.examples:,}", f"{one.tokens:,}", f"{one.bytes:,}", f"{one.seconds:.1f}")
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        names = (cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True))
        numbers = (cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
        print("  ".join([*names, *numbers]))
