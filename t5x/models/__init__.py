"""Models: a batch in; a loss, predictions or scores out."""

from t5x.models.base import BaseTransformerModel, Batch, Params, get_input_vocabulary, get_output_vocabulary
from t5x.models.decoder_only import DecoderOnlyModel
from t5x.models.encoder_decoder import EncoderDecoderModel

# Checkpoints say by this name of which model they are.
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
