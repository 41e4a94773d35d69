"""Marks of some variants of a parametrised test."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def mark_slow(cases: Mapping[str, Any] | Collection[Any], slow: Collection[Any]) -> list:
    """Return `cases` for `parametrize`, with `pytest.mark.slow` at some.

    Args:
      cases: values by their ids, or values alone. A tuple has a value for each name.
      slow: the ids of those that only `make test-all` runs; without ids, their values.
    """
    ids = list(cases)
    values = list(cases.values()) if isinstance(cases, Mapping) else ids
    if unknown := [case for case in slow if case not in ids]:
        raise ValueError(f"there are no cases {unknown} in {ids}")
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            id=case if isinstance(cases, Mapping) else None,
            marks=[pytest.mark.slow] if case in slow else [],
        )
        for case, value in zip(ids, values, strict=True)
    ]
