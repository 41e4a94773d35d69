"""model-info.txt: what a run's parameters are, and how they are divided."""

import os

from t5x import checkpoints
from t5x.telemetry import jsonl
from t5x.trainer.state import StateLayout


def write_model_info(directory: str, layout: StateLayout) -> None:
    """Writes it into a directory; with the optimizer's state where the model has an optimizer."""
    shardings = layout.shardings
    lines = checkpoints.tree.parameter_table(
        layout.abstract.params, layout.axes, shardings.params, optimizer_state=layout.abstract.param_states or None,
        optimizer_axes=layout.state_axes, optimizer_specs=shardings.param_states,
    )  # fmt: skip
    text = "\n".join([f"Mesh: {layout.partitioner}", "", *lines]) + "\n"
    jsonl.replace(os.path.join(directory, "model-info.txt"), [text.encode()])
