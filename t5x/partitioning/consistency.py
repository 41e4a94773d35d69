"""Check that the processes of a run agree; a difference ends all of them before anything is computed."""

import hashlib
import json
from collections.abc import Callable, Mapping

from t5x.errors import UserError
from t5x.partitioning import distributed

_MAX_LINES, _MAX_DISTINCT, _MAX_CHARACTERS = 20, 4, 300


def require_same(what: str, describe: Callable[[], Mapping[str, str]]) -> None:
    """Compare descriptions across all processes, which must all call this. Does nothing for a single process.

    Args:
      what: what is compared, for the message, such as "configuration".
      describe: returns what must be the same, {name: value}.

    Raises:
      UserError: in every process, with the names whose values differ and the value in each process.
    """
    if distributed.process_count() == 1:
        return
    mine = dict(describe())
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
    digests = distributed.exchange(f"{what} digest", digest)
    if len(set(digests)) == 1:
        return
    # One process for each digest sends its values.
    distinct = sorted({digests.index(digest) for digest in digests})[:_MAX_DISTINCT]
    described = distributed.exchange(what, mine if distributed.process_index() in distinct else None)
    descriptions = {index: described[index] for index in distinct}
    names = {name: None for values in descriptions.values() for name in values}
    differing = [name for name in names if len({values.get(name) for values in descriptions.values()}) > 1]
    lines = [_line(name, {index: values.get(name) for index, values in descriptions.items()}) for name in differing]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"  and {len(lines) - _MAX_LINES} more"]
    raise UserError(
        f"The processes of this run differ in their {what}:\n" + "\n".join(lines) + "\nStart all processes with the "
        "same command, configuration, data, code and packages."
    )


def _line(name: str, values: Mapping[int, str | None]) -> str:
    """Return a line with the values of a name, starting shortly before they differ."""
    texts = [value or "" for value in values.values()]
    difference = next((n for n, characters in enumerate(zip(*texts, strict=False)) if len(set(characters)) > 1), 0)
    start = max(difference - _MAX_CHARACTERS // 4, 0)

    def excerpt(value: str | None) -> str:
        if value is None:
            return "nothing"
        part = value[start : start + _MAX_CHARACTERS]
        return f"{'…' * (start > 0)}{part}{'…' * (start + len(part) < len(value))}"

    return f"  {name}: " + " / ".join(f"process {index} has {excerpt(value)}" for index, value in values.items())
