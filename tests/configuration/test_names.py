"""Imports and names: whatever a gin file names is the right function or class."""

import importlib
import sys

import gin
import pytest

from t5x import configuration

DYNAMIC = "from __gin__ import dynamic_registration\n"
NO_ARGUMENTS = dict.fromkeys(["train_dataset_cfg", "infer_eval_dataset_cfg", "trainer_cls", "model_dir", "total_steps"])


def test_the_entry_function_runs_with_bound_arguments(project):
    project.parse_run()
    configuration.check(project.train, strict=True)
    got = project.call()
    utils = importlib.import_module("lab.utils")
    assert got["model_dir"] == "/tmp/run"
    assert (got["total_steps"], got["eval_steps"]) == (1_020_000, 20)
    assert got["train_dataset_cfg"] == utils.DatasetConfig("wmt", {"inputs": 64, "targets": 32}, "train", 128)
    assert got["infer_eval_dataset_cfg"].shuffle is False
    assert got["model"].module.config.mlp_activations == ("gelu", "linear")
    assert got["model"].input_vocabulary.sentencepiece_model_file == "gs://t5-data/sentencepiece.model"
    assert got["trainer_cls"](model=None).learning_rate_fn(0) == 0.5
    assert project.call(total_steps=3)["total_steps"] == 3


def test_later_files_and_then_arguments_win(project):
    project.write("a.gin", "X = 1\nY = 1\nZ = 1\n")
    project.write("b.gin", "include 'a.gin'\nY = 2\nZ = 2\n")
    project.parse("b.gin", bindings=["Z = 3", "Z = 4"])
    assert "X = 1\nY = 2\nZ = 4" in configuration.config_str()


def test_a_file_without_imports_uses_the_names_of_earlier_files(project):
    project.write("large.gin", "include 'model.gin'\nnetwork.T5Config.emb_dim = 1024\nZ_LOSS = 0.5\n")
    project.parse("run.gin", "large.gin", bindings=project.given)
    model = project.call()["model"]
    assert (model.module.config.emb_dim, model.z_loss) == (1024, 0.5)


def test_names_on_the_command_line(project):
    project.parse_run(
        "train/utils.DatasetConfig.batch_size = 64",
        "DatasetConfig.seed = 3",
        "train.stats_period = 100",
        "train_script.train.eval_steps = 5",
        "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4",
    )
    configuration.check(project.train, strict=True)
    got = project.call()
    assert (got["train_dataset_cfg"].batch_size, got["infer_eval_dataset_cfg"].batch_size) == (64, 128)
    assert got["train_dataset_cfg"].seed == 3
    assert (got["stats_period"], got["eval_steps"]) == (100, 5)
    assert got["model"].predict_batch_with_aux("b") == ("b", 4)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("from old.place import utils", "utils.DatasetConfig"),
        ("from old import former", "former.DatasetConfig"),
        ("from old.place import utils as u", "u.DatasetConfig"),
        ("import lab.past.utils", "lab.past.utils.DatasetConfig"),
    ],
)
def test_names_of_modules_of_earlier_versions_keep_resolving(line, name, project, monkeypatch):
    moved = {"old.place": "lab", "old.former": "lab.utils", "lab.past": "lab"}
    monkeypatch.setattr("t5x.configuration.names._MOVED_MODULES", moved)
    for text in (f"{DYNAMIC}{line}\n{name}.seed = 3\n", f"{line}\n{name}.seed = 3\n"):
        configuration.clear()
        project.write("a.gin", text)
        project.parse("a.gin")
        printed = configuration.config_str()
        assert importlib.import_module("lab.utils").DatasetConfig and ".seed = 3" in printed
        assert "old" not in printed.replace("as former", "") and "past" not in printed
        configuration.clear()
        project.write("b.gin", printed)
        project.parse("b.gin")
        assert configuration.config_str() == printed


def test_a_method_of_a_class_that_is_imported_under_another_name(project):
    project.write(
        "beam.gin",
        DYNAMIC + "from lab import models as m\nm.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 3\n",
    )
    project.parse("run.gin", "model.gin", "beam.gin", bindings=project.given)
    model = project.call()["model"]
    assert (model.predict_batch_with_aux(0), model.z_loss) == ((0, 3), 0.0001)


def test_a_method_that_a_second_parse_configures(project):
    """References made by the first parse must use the class with the configured method."""
    project.write("fresh.py", "class Model:\n    def predict(self, n=1):\n        return n\n")
    project.parse_text(
        DYNAMIC + "import __main__ as train_script\nimport fresh\ntrain_script.train.model = @fresh.Model()\n"
    )
    project.parse(bindings=["fresh.Model.predict.n = 5"])
    assert project.call(**NO_ARGUMENTS)["model"].predict() == 5


def test_methods_keep_the_scope_of_their_reference(project):
    project.parse_text(
        """
        from __gin__ import dynamic_registration
        import __main__ as train_script
        from lab import models
        models.EncoderDecoderModel.module = None
        models.EncoderDecoderModel.input_vocabulary = None
        train_script.train.model = [@a/models.EncoderDecoderModel(), @models.EncoderDecoderModel()]
        models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 2
        a/models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 9
        """
    )
    scoped, plain = project.call(**NO_ARGUMENTS)["model"]
    assert (scoped.predict_batch_with_aux(0), plain.predict_batch_with_aux(0)) == ((0, 9), (0, 2))


def test_main_means_the_entry_points(project, monkeypatch):
    def other():
        raise AssertionError

    monkeypatch.setattr(sys.modules["__main__"], "train", other, raising=False)
    project.parse_run()
    assert project.call()["model_dir"] == "/tmp/run"
    assert sys.modules["__main__"].train is other


def test_an_entry_function_that_no_file_names(project):
    project.parse(bindings=["train.model_dir = /x"])
    assert project.call(**NO_ARGUMENTS | {"model": 0, "model_dir": "y"})["model_dir"] == "y"
    assert "import __main__ as train_script\n" in configuration.config_str()
    assert "train_script.train.model_dir = '/x'\n" in configuration.config_str()


def test_functions_with_the_same_name_are_not_mixed_up(project):
    def first(x):
        return ("first", x)

    def second(x):
        return ("second", x)

    for fn in (first, second, first):
        configuration.clear()
        configuration.parse(gin_files=[], bindings=["run.x = 1"], entry_points={"run": fn})
        assert configuration.configured(fn)() == fn(1)


def test_clear_forgets_names(project):
    project.parse_run()
    configuration.clear()
    assert configuration.config_str() == ""
    assert "`network.T5Config`" in project.error("network.T5Config.emb_dim = 3")
    project.parse_run()
    assert project.call()["model_dir"] == "/tmp/run"


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
def test_a_stand_in_is_printed_as_it_was_imported(project, line, name):
    project.parse_text(f"{DYNAMIC}{line}\nX = @{name}\n")
    text = configuration.config_str()
    assert f"{line}\n" in text and f"X = @{name}\n" in text
    configuration.clear()
    project.parse_text(text)
    assert configuration.config_str() == text
    assert not [module for module in sys.modules if module.startswith("absent_seqio")]


def test_a_stand_in_without_the_name_or_the_module(project):
    message = project.error(f"{DYNAMIC}import absent_seqio\nX = @absent_seqio.Evaluator\n")
    assert message.startswith("text.gin:3: `absent_seqio` has no `Evaluator`.")
    message = project.error("import absent_seqio\n", stand_ins={"absent_seqio": "lab.nowhere"})
    assert message.startswith("text.gin:1: ") and "lab.nowhere" in message


def test_one_object_by_two_names_is_one_configurable(project):
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


@pytest.mark.parametrize("line", ["import seqio", "import seqio as s", "from seqio import vocabularies"])
def test_our_classes_are_used_where_seqio_is_installed(project, line):
    from t5x.data import ByteVocabulary

    project.write("seqio/__init__.py", "raise ImportError('seqio is needed only for names that we lack')")
    name = {"import seqio": "seqio", "import seqio as s": "s"}.get(line, "vocabularies")
    text = f"{DYNAMIC}{line}\nX = @{name}.ByteVocabulary()\n"
    project.parse_text(text, stand_ins=configuration.STAND_INS)
    assert gin.query_parameter("%X").configurable.wrapped is ByteVocabulary
    assert f"{line}\n" in configuration.config_str()
    assert f"X = @{name}.ByteVocabulary()\n" in configuration.config_str()


def test_other_names_are_those_of_the_installed_seqio(project):
    project.write("seqio/__init__.py", "from seqio import preprocessors\ndef theirs(x=1):\n    return x\n")
    project.write("seqio/preprocessors.py", "def rekey(x=1):\n    return x\n")
    project.parse_text(
        DYNAMIC + "import seqio\nfrom seqio import preprocessors\n"
        "seqio.theirs.x = 3\nX = @seqio.preprocessors.rekey\npreprocessors.rekey.x = 4\n",
        stand_ins=configuration.STAND_INS,
    )
    assert gin.query_parameter("%X").configurable.wrapped.__module__ == "seqio.preprocessors"
    assert "seqio.theirs.x = 3\n" in configuration.config_str()
    message = project.error(DYNAMIC + "import seqio\nX = @seqio.theres\n", stand_ins=configuration.STAND_INS)
    assert "`seqio` has no `theres`. Did you mean `seqio.theirs`?" in message


def test_a_module_of_the_working_directory_is_imported_behind_installed_ones(project, monkeypatch):
    project.write("sub/only_here_tasks.py", "")
    project.write("sub/msgpack.py", "raise SystemExit('imported')")
    monkeypatch.chdir(project.path / "sub")
    project.parse_text("import only_here_tasks\nimport msgpack\n", search_paths=[str(project.path)])
    assert sys.modules["only_here_tasks"].__file__ == str(project.path / "sub/only_here_tasks.py")
    with pytest.raises(configuration.ConfigurationError, match="`only_here_tasks`"):
        project.parse_text("import only_here_taskz\n", search_paths=[str(project.path)])
