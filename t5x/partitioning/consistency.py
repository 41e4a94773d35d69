"""Check that the processes of a run agree; a difference ends all of them before anything is computed."""

import hashlib
import json
from collections.abc import Callable, Mapping

from t5x.errors import UserError
from t5x.partitioning import distributed

_MAX_LINES, _MAX_KINDS, _MAX_CHARACTERS = 20, 4, 300


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
    # One process of each kind sends its values.
    kinds = sorted({digests.index(digest) for digest in digests})[:_MAX_KINDS]
    described = distributed.exchange(what, mine if distributed.process_index() in kinds else None)
    found = {index: described[index] for index in kinds}
    names = {name: None for values in found.values() for name in values}
    differing = [name for name in names if len({values.get(name) for values in found.values()}) > 1]
    lines = [_line(name, {index: values.get(name) for index, values in found.items()}) for name in differing]
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"  and {len(lines) - _MAX_LINES} more"]
    raise UserError(
        f"The processes of this run differ in their {what}:\n" + "\n".join(lines) + "\nStart all processes with the "
        "same command, configuration, data, code and packages."
    )


def _line(name: str, values: Mapping[int, str | None]) -> str:
    """Return a line with the values of a name, starting shortly before they differ."""
    texts = [value or "" for value in values.values()]
    same = next((n for n, of_all in enumerate(zip(*texts, strict=False)) if len(set(of_all)) > 1), 0)
    start = max(same - _MAX_CHARACTERS // 4, 0)

    def excerpt(value: str | None) -> str:
        if value is None:
            return "nothing"
        part = value[start : start + _MAX_CHARACTERS]
        return f"{'…' * (start > 0)}{part}{'…' * (start + len(part) < len(value))}"

    return f"  {name}: " + " / ".join(f"process {index} has {excerpt(value)}" for index, value in values.items())
