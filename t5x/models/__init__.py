"""Models: turn a batch into a loss, predictions or scores."""

from t5x.models.base import BaseTransformerModel, Batch, Params, get_input_vocabulary, get_output_vocabulary
from t5x.models.decoder_only import DecoderOnlyModel
from t5x.models.encoder_decoder import EncoderDecoderModel

# Checkpoints record the model class by this public name.
for _model in (BaseTransformerModel, DecoderOnlyModel, EncoderDecoderModel):
    _model.__module__ = __name__

__all__ = [
    "BaseTransformerModel",
    "Batch",
    "DecoderOnlyModel",
    "EncoderDecoderModel",
    "Params",
    "get_input_vocabulary",
    "get_output_vocabulary",
]
