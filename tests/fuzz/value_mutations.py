"""Changes somewhere in nested lists and dictionaries, as JSON and msgpack files hold them."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HUGE = (2**31 - 1, 2**31, 2**40, 2**48, 2**63 - 1, 2**63, 10**7, 10**9, 10**18, 10**30)
NUMBERS = (0, -1, 1, 2, 3, 7, 255, 1024, 65537, 0.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"), *HUGE)
TEXTS = (
    "", "x", "\0", "\ud800", "é" * 300, "a" * 70_000, "../../../../../../../..{outside}", "{outside}", "/etc/passwd",
    ".", "..", "a/b", "file:///etc/passwd", "%s%n{0}", "float32", "int8", "object", "9" * 5000, "</s>", "<pad>",
)  # fmt: skip
EMPTY = (None, True, False, [], {}, [[]], {"": None}, [None] * 20)


def mutate_value(rng: random.Random, value: Any, outside: Path) -> tuple[Any, str]:
    """A copy of nested lists and dictionaries with one change somewhere, and where."""
    root = {"": copy.deepcopy(value)}
    parent, key, where = rng.choice(list(places(root)))
    old = parent[key]
    kinds = ["replace", "replace", "type", "delete", "duplicate", "deep"]
    if type(old) in (int, float):
        kinds += ["number"] * 8
    if isinstance(old, str):
        kinds += ["text"] * 6
    if isinstance(old, list) and old and all(type(n) is int for n in old):
        kinds += ["shape"] * 6
    kind = rng.choice(kinds)
    if kind == "number":
        parent[key] = rng.choice(NUMBERS) if rng.random() < 0.7 else old * rng.choice((-1, 2, 1000, 10**7))
    elif kind == "text":
        parent[key] = random_text(rng, outside) if rng.random() < 0.7 else _spoiled(rng, old)
    elif kind == "shape":
        parent[key] = random_shape(rng, old)
    elif kind == "type":
        parent[key] = rng.choice((str(old)[:100], [old], {"x": old}, None, not old))
    elif kind == "delete" and where:
        del parent[key]
    elif kind == "duplicate" and isinstance(parent, dict) and where:
        parent[random_text(rng, outside)] = old
    elif kind == "deep":
        parent[key] = _deep(rng.choice((70, 150, 300)), rng)
    else:
        parent[key] = copy.deepcopy(rng.choice((*NUMBERS, *EMPTY, random_text(rng, outside))))
    return root[""], f"{where or '/'} {kind}"


def places(value: Any, where: str = "") -> Iterator[tuple[Any, Any, str]]:
    """(container, key, path) of everything inside."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in entries:
        here = f"{where}/{str(key)[:40]}" if key != "" else where
        yield value, key, here
        yield from places(child, here)


def random_text(rng: random.Random, outside: Path) -> str:
    return rng.choice(TEXTS).replace("{outside}", str(outside))


def _spoiled(rng: random.Random, text: str) -> str:
    at = rng.randrange(len(text) + 1)
    return text[:at] + rng.choice(("", "\0", "/", "../", "é", "9" * 30)) + text[at + rng.randrange(3) :]


def random_shape(rng: random.Random, shape: list[int]) -> list[int]:
    shape = list(shape)
    for _ in range(rng.choice((1, 1, 2))):
        shape[rng.randrange(len(shape))] = rng.choice((*HUGE, 0, -1, 1, 1000, 10**6))
    if rng.random() < 0.3:
        shape += [rng.choice((0, 1, 2**20))] * rng.choice((1, 2, 40))
    return shape


def _deep(depth: int, rng: random.Random) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def mutate_json(content: bytes, rng: random.Random, outside: Path) -> tuple[bytes, str]:
    if rng.random() < 0.06:
        bad = (b"", b"[" * 200_000, b'{"a":' * 100_000, b"\xff\xfe", b"[]", b"3", b'"x"', b"{}", content * 2, b"{,}")
        return rng.choice(bad), "not JSON"
    value, where = mutate_value(rng, json.loads(content), outside)
    text = json.dumps(value)
    if rng.random() < 0.03:
        text = text.replace("{", '{"a": 1, "a": 2, ', 1)
    return text.encode(), where
