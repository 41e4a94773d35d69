"""The layers of `t5x.examples.t5`, whose kernels have two axes in scanned networks too."""

from t5x.examples.t5.layers import (
    DenseGeneral,
    Embed,
    LayerNorm,
    MlpBlock,
    MultiHeadDotProductAttention,
    RelativePositionBiases,
    combine_biases,
    combine_masks,
    dot_product_attention,
    make_attention_mask,
    make_causal_mask,
    make_decoder_mask,
    nd_dense_init,
)

__all__ = [
    "DenseGeneral",
    "Embed",
    "LayerNorm",
    "MlpBlock",
    "MultiHeadDotProductAttention",
    "RelativePositionBiases",
    "combine_biases",
    "combine_masks",
    "dot_product_attention",
    "make_attention_mask",
    "make_causal_mask",
    "make_decoder_mask",
    "nd_dense_init",
]
