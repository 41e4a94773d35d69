"""T5X's own names."""

import os
import stat
import subprocess
import sys

import pytest

from t5x import configuration
from t5x._runtime.errors import UserError
from t5x.configuration import gin_utils


class Writer:
    def __init__(self):
        self.written = []

    def write_text(self, step, tag, text):
        self.written.append((step, tag, text))


def test_summary_writes_the_file_and_the_text(project):
    project.parse("run.gin", "model.gin", bindings=project.given)
    writer = Writer()
    gin_utils.summarize_gin_config(model_dir="out/run", summary_writer=writer, step=7)
    gin_utils.summarize_gin_config("out/run", None, 8)
    assert (project.path / "out/run/config.gin").read_text(encoding="utf-8") == configuration.config_str()
    assert os.listdir("out/run") == ["config.gin"]
    assert stat.S_IMODE(os.stat("out/run/config.gin").st_mode) & stat.S_IRUSR
    [(step, tag, text)] = writer.written
    assert (step, tag) == (7, "config")
    assert "#### Parameters for train_script.train:" in text
    assert "    train_script.train.model = %MODEL" in text


def test_summary_as_a_gin_reference(project):
    project.parse_text(
        "from __gin__ import dynamic_registration\nimport __main__ as train_script\nfrom t5x import gin_utils\n"
        "train_script.train.model = @gin_utils.summarize_gin_config\n"
    )
    got = configuration.configured(project.train)(
        train_dataset_cfg=0, infer_eval_dataset_cfg=0, trainer_cls=0, model_dir="", total_steps=1
    )
    got["model"](model_dir="here", summary_writer=None, step=0)
    assert (
        "train_script.train.model = @gin_utils.summarize_gin_config" in (project.path / "here/config.gin").read_text()
    )


def test_summary_into_an_unwritable_directory_raises_user_error(project):
    project.write("file", "")
    with pytest.raises(UserError, match=r"file/x/config\.gin"):
        gin_utils.summarize_gin_config("file/x", None, 0)


def test_small_functions_in_gin_files(project):
    project.parse_text(
        """
        from __gin__ import dynamic_registration
        import __main__ as train_script
        from t5x import gin_utils
        gin_utils.sum_fn.var1 = 3
        gin_utils.sum_fn.var2 = %TWO
        TWO = 2
        gin_utils.bool_fn.var1 = 'x'
        gin_utils.string_split_fn.text = 'a/b/c'
        gin_utils.string_split_fn.separator = '/'
        last/gin_utils.string_split_fn.index = -1
        train_script.train.model = [@gin_utils.sum_fn(), @gin_utils.bool_fn(), @gin_utils.string_split_fn(),
                                    @last/gin_utils.string_split_fn()]
        """
    )
    got = configuration.configured(project.train)(
        train_dataset_cfg=0, infer_eval_dataset_cfg=0, trainer_cls=0, model_dir="", total_steps=1
    )
    assert got["model"] == [5, True, ["a", "b", "c"], "c"]
    assert "from t5x import gin_utils\n" in configuration.config_str()


def test_parse_gin_flags(project):
    with pytest.raises(configuration.ConfigurationError, match="MODEL_DIR is required"):
        gin_utils.parse_gin_flags(["."], [project.write("a.gin", "MODEL_DIR = %gin.REQUIRED\n")], [])
    gin_utils.parse_gin_flags([], ["a.gin"], ['MODEL_DIR = "/x"'])
    assert "MODEL_DIR = '/x'\n" in gin_utils.get_gin_config_str()
    assert "# Set in --gin.MODEL_DIR" in gin_utils.get_gin_config_str(show_provenance=True)
    with pytest.raises(UserError, match="skip_unknown is not supported"):
        gin_utils.parse_gin_flags([], ["a.gin"], [], skip_unknown=True)


def test_neither_jax_nor_numpy_is_imported():
    code = "import t5x.gin_utils, sys; assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
