"""The mapping between tensors of a Hugging Face T5 and parameters of T5X."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

EMBEDDING = "shared.weight"
HEAD = "lm_head.weight"
PER_LAYER_BIAS = "per_layer_relative_position_bias"

# Copies of `shared.weight` that some versions of transformers write.
EMBEDDING_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# A table in the first T5 checkpoints that no version of the network uses.
_UNUSED = re.compile(r"decoder\.block\.\d+\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight")

_ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter under both names.

    Attributes:
      name: T5X's, `target/encoder/layers_0/attention/query/kernel`.
      tensor: Hugging Face's, `encoder.block.0.layer.0.SelfAttention.q.weight`.
      shape: T5X's shape.
      transposed: whether Hugging Face stores it transposed.
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    transposed: bool

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        return self.shape[::-1] if self.transposed else self.shape


def is_unused(tensor: str) -> bool:
    return _UNUSED.fullmatch(tensor) is not None


def t5_parameters(config: Mapping[str, Any]) -> Iterator[Parameter]:
    """Yield all parameters of a T5 of any checkpoint format, layers unrolled; `config` has fields of T5Config."""
    width, vocabulary = config["emb_dim"], config["vocab_size"]
    yield Parameter("target/token_embedder/embedding", EMBEDDING, (vocabulary, width), False)
    for tower in ("encoder", "decoder"):
        per_layer = config.get(PER_LAYER_BIAS, False)
        for layer in range(config[f"num_{tower}_layers"]):
            name, tensor = f"target/{tower}/layers_{layer}", f"{tower}.block.{layer}"
            if per_layer or layer == 0:
                yield Parameter(
                    f"{name if per_layer else f'target/{tower}'}/relpos_bias/rel_embedding",
                    f"{tensor}.layer.0.SelfAttention.relative_attention_bias.weight",
                    (config["num_heads"], config.get("relative_attention_num_buckets", 32)),
                    True,
                )
            yield from _layer(config, tower, name, tensor)
        norm = f"target/{tower}/{tower}_norm/scale"
        yield Parameter(norm, f"{tower}.final_layer_norm.weight", (width,), False)
    if not config["logits_via_embedding"]:
        yield Parameter("target/decoder/logits_dense/kernel", HEAD, (width, vocabulary), True)


def _layer(config: Mapping[str, Any], tower: str, name: str, tensor: str) -> Iterator[Parameter]:
    width, hidden = config["emb_dim"], config["mlp_dim"]
    joined = config["num_heads"] * config["head_dim"]
    if tower == "encoder":
        attentions = [("pre_attention_layer_norm", "attention", "SelfAttention")]
    else:
        attentions = [
            ("pre_self_attention_layer_norm", "self_attention", "SelfAttention"),
            ("pre_cross_attention_layer_norm", "encoder_decoder_attention", "EncDecAttention"),
        ]
    for i, (norm, t5x_name, hf_name) in enumerate(attentions):
        yield Parameter(f"{name}/{norm}/scale", f"{tensor}.layer.{i}.layer_norm.weight", (width,), False)
        for part, letter in _ATTENTION.items():
            shape = (joined, width) if part == "out" else (width, joined)
            kernel = f"{tensor}.layer.{i}.{hf_name}.{letter}.weight"
            yield Parameter(f"{name}/{t5x_name}/{part}/kernel", kernel, shape, True)
    tensor = f"{tensor}.layer.{len(attentions)}"
    yield Parameter(f"{name}/pre_mlp_layer_norm/scale", f"{tensor}.layer_norm.weight", (width,), False)
    count = len(config["mlp_activations"])
    for part in ["wi"] if count == 1 else [f"wi_{i}" for i in range(count)]:
        yield Parameter(f"{name}/mlp/{part}/kernel", f"{tensor}.DenseReluDense.{part}.weight", (width, hidden), True)
    yield Parameter(f"{name}/mlp/wo/kernel", f"{tensor}.DenseReluDense.wo.weight", (hidden, width), True)
