"""Models: turn a batch into a loss, predictions or scores."""

from t5x.models.base import (
    BaseModel,
    BaseTransformerModel,
    Batch,
    DecoderParams,
    Params,
    get_input_vocabulary,
    get_output_vocabulary,
)
from t5x.models.base_metrics import (
    compute_base_metrics,
    compute_metrics,
    compute_weighted_accuracy,
    count_packed_examples,
)
from t5x.models.decoder_only import DecoderOnlyModel
from t5x.models.encoder_decoder import EncoderDecoderModel

# Checkpoints record the model class by this public name.
for _model in (BaseModel, BaseTransformerModel, DecoderOnlyModel, EncoderDecoderModel):
    _model.__module__ = __name__

__all__ = [
    "BaseModel",
    "BaseTransformerModel",
    "Batch",
    "DecoderOnlyModel",
    "DecoderParams",
    "EncoderDecoderModel",
    "Params",
    "compute_base_metrics",
    "compute_metrics",
    "compute_weighted_accuracy",
    "count_packed_examples",
    "get_input_vocabulary",
    "get_output_vocabulary",
]
