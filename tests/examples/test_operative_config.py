"""A configuration as T5X's runs write it to `config.gin`: gin's operative configuration of T5X's modules.

`t5x_operative.gin` is that of fine-tuning T5 1.1 small: every macro, every parameter with its value or T5X's default,
those without parameters as a comment, long values on a line of their own, and T5X's `seqio` and `t5` imports.
"""

import dataclasses

from t5x.network import Transformer
from t5x.optimizers import adafactor
from tests.examples.test_t5x_readme import arguments_of_train
from tests.support import commands

FILE = "tests/examples/t5x_operative.gin"


def test_it_is_accepted(capsys):
    result = commands.run(capsys, "check", FILE)
    assert result.code == 0, result.err
    assert "`train`" in result.out


def test_it_rebuilds_the_run():
    vocabulary = "models.EncoderDecoderModel"
    given = [f"{vocabulary}.{side}_vocabulary = @seqio.ByteVocabulary()" for side in ("input", "output")]
    found = arguments_of_train([FILE], given)  # the vocabulary is not here
    shipped = arguments_of_train(
        ["t5x/examples/t5/t5_1_1/small.gin", "t5x/configs/runs/finetune.gin"],
        [
            *given, "MODEL_DIR = '/tmp/model_dir'", "MIXTURE_OR_TASK_NAME = 'wmt_t2t_ende_v003'",
            "TASK_FEATURE_LENGTHS = {'inputs': 256, 'targets': 256}", "TRAIN_STEPS = 1020000", "DROPOUT_RATE = 0.1",
            "INITIAL_CHECKPOINT_PATH = 'gs://t5-data/pretrained_models/t5x/t5_1_1_small/checkpoint_1000000'",
        ],
    )  # fmt: skip
    assert found["model"].module == shipped["model"].module and type(found["model"].module) is Transformer
    optimizer = found["model"].optimizer_def
    assert type(optimizer) is adafactor.Adafactor and optimizer.step_offset == 1000000
    mine, ours = (vars(arguments["model"].optimizer_def) for arguments in (found, shipped))
    assert mine | {"step_offset": 0} == ours | {"step_offset": 0}
    assert found["model"]._z_loss == 1e-4 and found["model"]._label_smoothing == 0.0
    train = dataclasses.replace(shipped["train_dataset_cfg"], pack=True, num_workers=0)
    assert found["train_dataset_cfg"] == train
    assert (found["total_steps"], found["eval_period"], found["eval_steps"]) == (1020000, 1000, 20)
    assert found["checkpoint_cfg"].save.period == 5000
    assert found["checkpoint_cfg"].restore.path == shipped["checkpoint_cfg"].restore.path
