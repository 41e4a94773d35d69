"""Examples in docstrings run and print what they promise."""

import doctest
import importlib
from pathlib import Path

import pytest

import t5x

ROOT = Path(t5x.__file__).parent
SKETCHES = {"network.decoder_only", "network.transformer"}  # they leave out how `tokens` is made


def modules_with_examples() -> list[str]:
    found = [path for path in sorted(ROOT.rglob("*.py")) if ">>> " in path.read_text()]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in found]
    return [name for name in names if name not in SKETCHES]


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"t5x.{name}"))
    assert result.failed == 0
