"""Where gin files are looked for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from t5x.configuration.errors import Problem, nearest

PACKAGE_PARENT = str(Path(__file__).resolve().parents[2])


def find(name: str, search_paths: Sequence[str], included_from: str | None = None) -> str:
    """The path of gin file `name`.

    Looked for in the working directory (as gin always does), the search paths, beside the including file, and beside
    the `t5x` package, in this order; an absolute path is taken as it is.

    Args:
      name: as written on the command line or in an `include`.
      search_paths: directories, relative to the working directory.
      included_from: path of the including file.
    """
    expanded = os.path.expanduser(name)
    places = _places(search_paths, included_from)
    tried = [expanded] if os.path.isabs(expanded) else [os.path.normpath(os.path.join(p, expanded)) for p in places]
    for path in tried:
        if os.path.isfile(path):
            return path
    looked = "\n".join(f"    {path}" for path in dict.fromkeys(map(os.path.abspath, tried)))
    near = _near_names(expanded, places)
    hint = f"\n  Near names: {', '.join(near)}" if near else ""
    raise Problem(f"gin file {name!r} was not found. Looked at:\n{looked}{hint}")


def _places(search_paths: Sequence[str], included_from: str | None) -> list[str]:
    beside = [os.path.dirname(os.path.abspath(included_from))] if included_from else []
    return [os.curdir, *map(os.path.expanduser, search_paths), *beside, PACKAGE_PARENT]


def _near_names(name: str, places: Iterable[str]) -> list[str]:
    folder = os.path.dirname(name)
    candidates: dict[str, str] = {}
    for place in places:
        try:
            entries = os.listdir(os.path.join(place, folder))
        except OSError:
            continue
        candidates.update({os.path.join(folder, e): e for e in entries if e.endswith(".gin")})
    for path in Path(PACKAGE_PARENT, "t5x").rglob("*.gin"):
        candidates[str(path.relative_to(PACKAGE_PARENT))] = path.name
    by_path = nearest(name, candidates)
    by_file_name = [path for path, base in candidates.items() if base == os.path.basename(name)]
    return list(dict.fromkeys([*sorted(by_file_name)[:3], *by_path]))[:5]
