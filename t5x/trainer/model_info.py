"""model-info.txt: the parameters of a run and how they are sharded."""

import os

from t5x import checkpoints
from t5x.telemetry import jsonl
from t5x.trainer.state import StateLayout


def write_model_info(directory: str, layout: StateLayout) -> None:
    """Write model-info.txt to a directory. It includes the optimizer state if the model has an optimizer."""
    shardings = layout.shardings
    lines = checkpoints.tree.parameter_table(
        layout.abstract.params, layout.axes, shardings.params, optimizer_state=layout.abstract.param_states or None,
        optimizer_axes=layout.state_axes, optimizer_specs=shardings.param_states,
    )  # fmt: skip
    text = "\n".join([f"Mesh: {layout.partitioner}", "", *lines]) + "\n"
    jsonl.replace(os.path.join(directory, "model-info.txt"), [text.encode()])
