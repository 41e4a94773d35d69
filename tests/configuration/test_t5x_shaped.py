"""Files shaped like T5X's: a run file, a model file, and the command line."""

import logging
import sys

import pytest

from t5x import configuration


def test_entry_function_runs_with_bound_arguments(project):
    project.parse("run.gin", "model.gin", bindings=project.given)
    configuration.check(project.train)
    got = configuration.configured(project.train)()
    assert got["model_dir"] == "/tmp/run"
    assert got["total_steps"] == 1_020_000
    assert got["eval_steps"] == 20
    assert got["train_dataset_cfg"] == project.module("lab.utils").DatasetConfig(
        "wmt", {"inputs": 64, "targets": 32}, "train", 128
    )
    assert got["infer_eval_dataset_cfg"].shuffle is False
    assert got["model"].module.config.mlp_activations == ("gelu", "linear")
    assert got["model"].input_vocabulary.sentencepiece_model_file == "gs://t5-data/sentencepiece.model"
    assert got["trainer_cls"](model=None).learning_rate_fn(0) == 0.5


def test_arguments_of_the_call_win(project):
    project.parse("run.gin", "model.gin", bindings=project.given)
    assert configuration.configured(project.train)(total_steps=3)["total_steps"] == 3


def test_all_required_macros_are_listed_at_once_with_their_lines(project):
    project.parse("model.gin", "run.gin")
    with pytest.raises(configuration.ConfigurationError) as caught:
        configuration.check(project.train)
    message = str(caught.value)
    for line, name in enumerate(("MODEL_DIR", "MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "TRAIN_STEPS"), start=6):
        assert f"{name} is required (run.gin:{line}) and not given. Give it: --gin.{name}=" in message
    assert "4 problems" in message
    assert "DROPOUT_RATE" not in message


def test_model_file_after_run_file_unsets_the_default(project):
    project.parse("run.gin", "model.gin", bindings=project.given[:-1])
    with pytest.raises(configuration.ConfigurationError) as caught:
        configuration.check(project.train)
    assert str(caught.value) == ("DROPOUT_RATE is required (model.gin:9) and not given. Give it: --gin.DROPOUT_RATE=…")


def test_required_macro_that_nothing_reads_is_no_error(project):
    project.write("more.gin", "UNUSED = %gin.REQUIRED\nALSO = %UNUSED\n")
    project.parse("run.gin", "model.gin", "more.gin", bindings=project.given)
    configuration.check(project.train)


def test_file_without_imports_uses_names_of_earlier_files(project):
    project.write("large.gin", "include 'model.gin'\nnetwork.T5Config.emb_dim = 1024\nZ_LOSS = 0.5\n")
    project.parse("run.gin", "large.gin", bindings=project.given)
    model = configuration.configured(project.train)()["model"]
    assert (model.module.config.emb_dim, model.z_loss) == (1024, 0.5)


def test_scoped_short_and_method_selectors_on_the_command_line(project):
    project.parse(
        "run.gin",
        "model.gin",
        bindings=[
            *project.given,
            "train/utils.DatasetConfig.batch_size = 64",
            "train.stats_period = 100",
            "train_script.train.eval_steps = 5",
            "models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 4",
        ],
    )
    configuration.check(project.train)
    got = configuration.configured(project.train)()
    assert (got["train_dataset_cfg"].batch_size, got["infer_eval_dataset_cfg"].batch_size) == (64, 128)
    assert (got["stats_period"], got["eval_steps"]) == (100, 5)
    assert got["model"].predict_batch_with_aux("b") == ("b", 4)
    assert got["model"].z_loss == 0.0001


def test_method_named_by_its_class_alone(project):
    project.parse(
        "run.gin", "model.gin", bindings=[*project.given, "EncoderDecoderModel.predict_batch_with_aux.num_decodes = 7"]
    )
    assert configuration.configured(project.train)()["model"].predict_batch_with_aux(0) == (0, 7)


def test_method_bound_in_a_file_that_imports_the_class_under_another_name(project):
    project.write(
        "beam.gin",
        """
        from __gin__ import dynamic_registration
        from lab import models as m
        m.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 3
        """,
    )
    project.parse("run.gin", "model.gin", "beam.gin", bindings=project.given)
    model = configuration.configured(project.train)()["model"]
    assert model.predict_batch_with_aux(0) == (0, 3)
    assert model.z_loss == 0.0001


def test_methods_keep_the_scope_of_their_reference(project):
    text = """
        from __gin__ import dynamic_registration
        import __main__ as train_script
        from lab import models
        models.EncoderDecoderModel.module = None
        models.EncoderDecoderModel.input_vocabulary = None
        train_script.train.model = @a/models.EncoderDecoderModel()
        train_script.train.train_dataset_cfg = @models.EncoderDecoderModel()
        models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 2
        a/models.EncoderDecoderModel.predict_batch_with_aux.num_decodes = 9
        """
    project.parse_text(text)
    got = configuration.configured(project.train)(
        infer_eval_dataset_cfg=None, trainer_cls=None, model_dir="", total_steps=1
    )
    assert got["model"].predict_batch_with_aux(0) == (0, 9)
    assert got["train_dataset_cfg"].predict_batch_with_aux(0) == (0, 2)


def test_entry_point_wins_over_what_main_holds_and_main_is_left_alone(project, monkeypatch):
    def other():
        raise AssertionError

    monkeypatch.setattr(sys.modules["__main__"], "train", other, raising=False)
    project.parse("run.gin", "model.gin", bindings=project.given)
    assert configuration.configured(project.train)()["model_dir"] == "/tmp/run"
    assert sys.modules["__main__"].train is other
    assert "import __main__ as train_script" in configuration.config_str()


def test_entry_function_that_no_file_names(project):
    project.parse(bindings=["train.model_dir = /x", "train.total_steps = 1", "train.trainer_cls = None"])
    got = configuration.configured(project.train)(model=0, train_dataset_cfg=0, infer_eval_dataset_cfg=0)
    assert got["model_dir"] == "/x"
    assert "train_script.train.model_dir = '/x'" in configuration.config_str()


def test_later_files_and_then_arguments_win(project):
    project.write("a.gin", "X = 1\nY = 1\nZ = 1\n")
    project.write("b.gin", "include 'a.gin'\nY = 2\nZ = 2\n")
    project.parse("b.gin", bindings=["Z = 3", "Z = 4"])
    assert "X = 1\nY = 2\nZ = 4" in configuration.config_str()


def test_a_mistyped_macro_is_an_error(project):
    project.parse("run.gin", "model.gin", bindings=[*project.given, "BATCH_SZIE = 3"])
    with pytest.raises(configuration.ConfigurationError) as error:
        configuration.check(project.train)
    expected = "--gin.BATCH_SZIE=3 has no effect: nothing in this run reads BATCH_SZIE. Nearest: BATCH_SIZE"
    assert expected in str(error.value)


def test_argument_that_sets_what_nothing_reads_is_warned_of(project, caplog):
    project.parse("run.gin", "model.gin", bindings=[*project.given, "trian/utils.DatasetConfig.batch_size = 3"])
    with caplog.at_level(logging.WARNING, logger="t5x"):
        configuration.check(project.train)
    assert "train/utils.DatasetConfig.batch_size" in caplog.text
    assert "DROPOUT_RATE" not in caplog.text


def test_clear_forgets_everything(project):
    project.parse("run.gin", "model.gin", bindings=project.given)
    configuration.clear()
    assert configuration.config_str() == ""
    assert "`network.T5Config` is not known" in project.error("network.T5Config.emb_dim = 3")
    project.parse("run.gin", "model.gin", bindings=project.given)
    assert configuration.configured(project.train)()["model_dir"] == "/tmp/run"


def test_failed_parse_leaves_what_was_there(project):
    project.parse("run.gin", "model.gin", bindings=project.given)
    before = configuration.config_str()
    project.error("MODEL_DIR = 'other'\nimport lab.absent\n")
    assert configuration.config_str() == before
