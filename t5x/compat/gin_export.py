"""Export a model of `t5x.interactive_model` to a gin file for `t5x train`, `eval` or `infer`."""

import enum
import os
from typing import Any

from t5x.errors import UserError


class T5XScriptType(enum.StrEnum):
    """The entry point for which `get_gin_config_from_interactive_model` writes a file."""

    FINETUNING = "finetuning"
    INFERENCE = "inference"
    EVALUATION = "evaluation"
    PRETRAINING = "pretraining"


def get_gin_config_from_interactive_model(
    interactive_model: Any,
    script_type: T5XScriptType,
    task_name: str,
    partitioner_config_str: str,
    model_config_str: str,
    train_steps: int = 1,
    imports_str: str = "",
) -> str:
    """Return a gin file with which `t5x train`, `eval` or `infer` continues from the model's newest checkpoint.

    Call `save_checkpoint` first.

    Args:
      interactive_model: an `InteractiveModel`.
      task_name: name of a task, registered by a module that `imports_str` or --import imports.
      partitioner_config_str: gin text that binds the partitioner's parameters.
      model_config_str: gin text that defines MODEL, such as an `include` of a file in `t5x/examples`.
      train_steps: number of steps to train from the model's current step.
      imports_str: additional `import` lines.
    """
    script, model = T5XScriptType(script_type), interactive_model
    trains = script in (T5XScriptType.FINETUNING, T5XScriptType.PRETRAINING)
    name = {"finetuning": "finetune", "pretraining": "pretrain", "evaluation": "eval", "inference": "infer"}[script]
    start = model.newest_checkpoint
    values: dict[str, Any] = {"MIXTURE_OR_TASK_NAME": task_name, "TASK_FEATURE_LENGTHS": model.task_feature_lengths}
    if trains:
        values |= {"MODEL_DIR": model.output_dir, "TRAIN_STEPS": model.step + train_steps}
        values["BATCH_SIZE"] = model.batch_size
        values |= {"INITIAL_CHECKPOINT_PATH": start} if script is T5XScriptType.FINETUNING else {}
    elif start is None:
        raise UserError("There is no checkpoint of this model yet to evaluate or infer with: call save_checkpoint().")
    else:
        values |= {"CHECKPOINT_PATH": start, f"{name.upper()}_OUTPUT_DIR": os.path.join(model.output_dir, name)}
        values |= {"utils.DatasetConfig.batch_size": model.batch_size, "utils.DatasetConfig.split": "validation"}
    parts = [
        "from __gin__ import dynamic_registration\n",
        f"import __main__ as {'train' if trains else name}_script",
        "from t5x import partitioning\nfrom t5x import utils",
        imports_str,
        model_config_str,
        f"include 't5x/configs/runs/{name}.gin'\n",
        *(f"{macro} = {value!r}" for macro, value in values.items()),
        partitioner_config_str,
    ]
    return "\n".join(part for part in parts if part) + "\n"
