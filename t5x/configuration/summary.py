"""The configuration of a run, written beside what it produces."""

from __future__ import annotations

import os
import sys
from typing import Any

import gin

from t5x.configuration.printing import config_str
from t5x.errors import UserError


def write_summary(model_dir: str, summary_writer: Any, step: int) -> None:
    """Writes `config.gin` into `model_dir`, and the same as text for TensorBoard. Only the first process writes.

    Args:
      model_dir: made if it does not exist.
      summary_writer: has `write_text(step, tag, markdown)`; None for no summary.
      step: of the summary.
    """
    from t5x.telemetry import jsonl  # where it is used: it needs NumPy, which `--help` does not wait for

    jax = sys.modules.get("jax")
    if jax is not None and jax.process_index() != 0:
        return
    text = config_str()
    try:
        os.makedirs(model_dir, exist_ok=True)
    except OSError as error:
        raise UserError(f"config.gin cannot be written into {model_dir}: {error.strerror or error}.") from error
    jsonl.replace(os.path.join(model_dir, "config.gin"), [text.encode()])
    if summary_writer is not None:
        summary_writer.write_text(step, "config", gin.markdown(text))
