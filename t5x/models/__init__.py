"""Models: turn a batch into a loss, predictions or scores."""

# ruff: noqa: F401

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from t5x.decoding import remove_prefix
from t5x.metrics.accumulators import MetricsMap
from t5x.models.base import (
    BaseModel,
    BaseTransformerModel,
    Batch,
    DecoderParams,
    Params,
    compute_base_metrics,
    compute_metrics,
    compute_weighted_accuracy,
    count_packed_examples,
    get_input_vocabulary,
    get_output_vocabulary,
)
from t5x.models.decoder_only import DecoderOnlyModel
from t5x.models.encoder_decoder import EncoderDecoderModel

# T5X's names in annotations.
Array = np.ndarray | jax.Array
PyTree = Any
PyTreeDef = jax.tree_util.PyTreeDef
TokensIdsToLogitsCallable = DecodeFnCallable = Callable[..., tuple[Any, Any]]

# Checkpoints record the model class by this public name.
for _model in (BaseModel, BaseTransformerModel, DecoderOnlyModel, EncoderDecoderModel):
    _model.__module__ = __name__
