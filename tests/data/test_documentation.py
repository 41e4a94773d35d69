import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "name",
    [
        "feature_converters",
        "preprocessors.denoising",
        "preprocessors.languages",
        "preprocessors.text_to_text",
        "preprocessors.tokenization",
        "sources.base",
        "vocabularies",
    ],
)
def test_examples_in_the_documentation(name):
    result = doctest.testmod(importlib.import_module(f"t5x.data.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_importing_the_package_needs_neither_jax_nor_tensorflow():
    import subprocess
    import sys

    heavy = ["jax", "flax", "tensorflow", "grain", "sentencepiece"]
    code = f"import sys, t5x.data; sys.exit(', '.join(m for m in {heavy} if m in sys.modules) or 0)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
