"""Packages that are not installed, and the modules that stand in for them."""

import logging
import sys

import gin
import pytest

from t5x import configuration


def test_alias_is_said_once_and_leaves_no_trace(project, caplog):
    project.write("again.gin", "from __gin__ import dynamic_registration\nimport absent_seqio\nX = 1\n")
    with caplog.at_level(logging.INFO, logger="t5x"):
        project.parse("run.gin", "model.gin", "again.gin")
    said = [r.getMessage() for r in caplog.records if "absent_seqio" in r.getMessage()]
    assert said == ["absent_seqio is not installed: gin files that import absent_seqio use lab.stand_in"]
    assert not [name for name in sys.modules if name.startswith("absent_seqio")]
    with pytest.raises(ModuleNotFoundError):
        project.module("absent_seqio")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import absent_seqio", "absent_seqio.SentencePieceVocabulary"),
        ("import absent_seqio as s", "s.SentencePieceVocabulary"),
        ("import absent_seqio.loggers", "absent_seqio.loggers.JSONLogger"),
        ("import absent_seqio.loggers as l", "l.JSONLogger"),
        ("from absent_seqio import loggers", "loggers.JSONLogger"),
    ],
)
def test_forms_of_import(project, line, name):
    project.parse_text(f"from __gin__ import dynamic_registration\n{line}\nX = @{name}\n")
    text = configuration.config_str()
    assert f"{line}\n" in text
    assert f"X = @{name}\n" in text
    configuration.clear()
    project.parse_text(text)
    assert configuration.config_str() == text


def test_alias_of_a_dotted_name(project):
    aliases = {"absent_t5.data.mixtures": "lab.stand_in", "absent_t5.data.tasks": "lab.utils"}
    text = """
        from __gin__ import dynamic_registration
        import absent_t5.data.mixtures
        import absent_t5.data.tasks
        from absent_t5.data import mixtures
        X = [@absent_t5.data.mixtures.SentencePieceVocabulary, @absent_t5.data.tasks.schedule]
        Y = @mixtures.loggers.JSONLogger
        """
    project.write(
        "lab/stand_in/__init__.py", "from lab.vocabularies import SentencePieceVocabulary\nfrom . import loggers\n"
    )
    project.parse_text(text, aliases=aliases)
    printed = configuration.config_str()
    configuration.clear()
    project.parse_text(printed, aliases=aliases)
    assert configuration.config_str() == printed


def test_package_that_is_installed_is_used(project, caplog):
    project.write("really_there.py", "def f(x=1):\n  return x\n")
    with caplog.at_level(logging.INFO, logger="t5x"):
        project.parse_text(
            "from __gin__ import dynamic_registration\nimport really_there\nreally_there.f.x = 3\n",
            aliases={"really_there": "lab.stand_in"},
        )
    assert "not installed" not in caplog.text


def test_stand_in_that_lacks_a_name(project):
    message = project.error(
        "from __gin__ import dynamic_registration\nimport absent_seqio\nX = @absent_seqio.Evaluator\n"
    )
    assert "text.gin:3: `absent_seqio.Evaluator` is not known: module lab.stand_in has no `Evaluator`" in message


def test_stand_in_that_cannot_be_imported(project):
    message = project.error("import absent_seqio\n", aliases={"absent_seqio": "lab.nowhere"})
    assert message == (
        "text.gin:1: `import absent_seqio` (which stands for lab.nowhere here): lab has no module `nowhere`."
    )


def test_the_same_object_by_two_ways_is_one_configurable(project):
    project.parse_text(
        """
        from __gin__ import dynamic_registration
        import absent_seqio
        from lab import vocabularies
        absent_seqio.SentencePieceVocabulary.extra_ids = 100
        vocabularies.SentencePieceVocabulary.sentencepiece_model_file = 'x'
        X = @vocabularies.SentencePieceVocabulary()
        """
    )
    text = configuration.config_str()
    assert "X = @absent_seqio.SentencePieceVocabulary()\n" in text
    assert "absent_seqio.SentencePieceVocabulary.sentencepiece_model_file = 'x'\n" in text


def test_seqio_is_the_default_alias():
    assert configuration.DEFAULT_ALIASES == {"seqio": "t5x.data"}


@pytest.mark.parametrize("line", ["import seqio", "import seqio as s", "from seqio import vocabularies"])
def test_where_seqio_is_installed_what_a_run_consists_of_is_still_ours(project, caplog, line):
    project.write("seqio/__init__.py", "raise ImportError('nobody has asked for what only seqio has')")
    name = {"import seqio": "seqio", "import seqio as s": "s"}.get(line, "vocabularies")
    with caplog.at_level(logging.INFO, logger="t5x"):
        project.parse_text(
            f"from __gin__ import dynamic_registration\n{line}\nX = @{name}.ByteVocabulary()\n",
            aliases=configuration.DEFAULT_ALIASES,
        )
    assert caplog.text.count("seqio in gin files: vocabularies, feature converters, Evaluator and loggers are") == 1
    from t5x.data import ByteVocabulary

    assert gin.query_parameter("%X").configurable.wrapped is ByteVocabulary
    printed = configuration.config_str()
    configuration.clear()
    project.parse_text(printed, aliases=configuration.DEFAULT_ALIASES)
    assert configuration.config_str() == printed


def test_where_seqio_is_installed_the_rest_is_seqios(project):
    project.write("seqio/__init__.py", "from seqio import preprocessors\ndef theirs(x=1):\n    return x\n")
    project.write("seqio/preprocessors.py", "def rekey(x=1):\n    return x\n")
    project.parse_text(
        """
        from __gin__ import dynamic_registration
        import seqio
        from seqio import preprocessors
        seqio.theirs.x = 3
        X = @seqio.preprocessors.rekey
        preprocessors.rekey.x = 4
        """,
        aliases=configuration.DEFAULT_ALIASES,
    )
    assert "seqio.theirs.x = 3\n" in configuration.config_str()
    message = project.error(
        "from __gin__ import dynamic_registration\nimport seqio\nX = @seqio.theres\n",
        aliases=configuration.DEFAULT_ALIASES,
    )
    assert "module seqio has no `theres`. Nearest: seqio.theirs" in message
