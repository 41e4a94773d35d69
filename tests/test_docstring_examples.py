"""Examples in docstrings run and print what they promise."""

import doctest
import importlib

import pytest

MODULES = [
    "adafactor",
    "decoding.constraints",
    "decoding.rows",
    "losses",
    "metrics.accumulators",
    "metrics.answers",
    "metrics.labels",
    "metrics.ranking",
    "metrics.summaries",
    "metrics.text",
    "metrics.translation",
    "models",
    "optimizers.optax_wrapper",
    "optimizers.patterns",
    "schedules",
    "telemetry.devices",
    "telemetry.jsonl",
    "telemetry.progress",
    "telemetry.throughput",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    result = doctest.testmod(importlib.import_module(f"t5x.{name}"))
    assert result.attempted > 0 and result.failed == 0
