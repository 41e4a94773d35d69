"""The table of ignored parameters is true, and the documentation has it."""

import inspect
import pkgutil

import pytest

from t5x.configuration import ignored_parameters
from t5x.configuration.ignored_parameters import IGNORED
from tests.support.paths import REPO

DOCS = REPO / "docs/configuration.md"


@pytest.mark.parametrize("entry", IGNORED, ids=lambda entry: entry.names[0])
def test_the_parameters_exist(entry):
    for owner in entry.owners:
        found = pkgutil.resolve_name(f"t5x.{owner}")
        assert set(entry.names) <= set(inspect.signature(found).parameters), owner


def test_the_documentation_has_the_table():
    assert ignored_parameters.markdown_table() in DOCS.read_text(), "copy the output of markdown_table()"


def test_it_is_logged_once(caplog):
    caplog.set_level("INFO", logger="t5x")
    ignored_parameters._log_once.cache_clear()
    for _ in range(2):
        ignored_parameters.log_ignored("utils.RestoreCheckpointConfig", {"use_gda": True, "checkpointer_cls": None})
    assert caplog.text.count("use_gda") == 1 and "checkpointer_cls" not in caplog.text
