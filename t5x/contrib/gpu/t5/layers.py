"""The layers of `t5x.examples.t5`."""

from t5x.examples.t5.layers import (
    DenseGeneral,
    Embed,
    LayerNorm,
    MlpBlock,
    MultiHeadDotProductAttention,
    RelativePositionBiases,
    _convert_to_activation_function,
    combine_biases,
    combine_masks,
    dot_product_attention,
    make_attention_mask,
    make_causal_mask,
    make_decoder_mask,
)

__all__ = [
    "DenseGeneral",
    "Embed",
    "LayerNorm",
    "MlpBlock",
    "MultiHeadDotProductAttention",
    "RelativePositionBiases",
    "_convert_to_activation_function",
    "combine_biases",
    "combine_masks",
    "dot_product_attention",
    "make_attention_mask",
    "make_causal_mask",
    "make_decoder_mask",
]
