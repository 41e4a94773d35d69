"""The parameters of a T5 under T5X's and Hugging Face's names; the configuration and size that their shapes show."""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from t5x._runtime.errors import UserError

EMBEDDING = "shared.weight"
HEAD = "lm_head.weight"
PER_LAYER_BIAS = "per_layer_relative_position_bias"

# Copies of `shared.weight` that some versions of transformers write.
EMBEDDING_COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
# A table in the first T5 checkpoints that no version of the network uses.
UNUSED = re.compile(r"decoder\.block\.\d+\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight")

_ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o"}

_WIDTHS = ("emb_dim", "num_heads", "head_dim", "mlp_dim")
_DEPTHS = ("num_encoder_layers", "num_decoder_layers")
_SIZES = {"vocab_size", *_WIDTHS, *_DEPTHS, "num_layers"}

# size: its widths and depths. The LM-adapted and Flan models have T5 1.1's sizes; so do mT5 and umT5, with other
# vocabularies, and decoder-only models, without an encoder.
_T5_1_0 = {
    "small": (512, 8, 64, 2048, 6, 6),
    "base": (768, 12, 64, 3072, 12, 12),
    "large": (1024, 16, 64, 4096, 24, 24),
    "3B": (1024, 32, 128, 16384, 24, 24),
    "11B": (1024, 128, 128, 65536, 24, 24),
}
_T5_1_1 = {
    "tiny": (8, 4, 3, 16, 2, 2),
    "small": (512, 6, 64, 1024, 8, 8),
    "base": (768, 12, 64, 2048, 12, 12),
    "large": (1024, 16, 64, 2816, 24, 24),
    "xl": (2048, 32, 64, 5120, 24, 24),
    "xxl": (4096, 64, 64, 10240, 24, 24),
}
_BYT5 = {
    "small": (1472, 6, 64, 3584, 12, 4),
    "base": (1536, 12, 64, 3968, 18, 6),
    "large": (1536, 16, 64, 3840, 36, 12),
    "xl": (2560, 32, 64, 6720, 36, 12),
    "xxl": (4672, 64, 64, 12352, 36, 12),
}


def config_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of T5Config (TransformerConfig if decoder-only) that the shapes of canonical parameters show.

    They do not show the activation: a gated MLP is assumed to be T5 1.1's, a plain one T5 1.0's.

    Args:
      params: {canonical name (`target/…`): anything with a `.shape`}.
    """
    shape = {name.removeprefix("target/"): tuple(array.shape) for name, array in params.items()}
    layers = {tower: _count_layers(shape, tower) for tower in ("encoder", "decoder")}
    tower, attention, embedder = "encoder", "attention", "token_embedder"
    if decoder_alone := not layers["encoder"]:
        tower, attention, embedder = "decoder", "self_attention", "decoder/token_embedder"
    try:
        vocab_size, emb_dim = shape[f"{embedder}/embedding"]
        per_layer = f"{tower}/layers_0/relpos_bias/rel_embedding" in shape
        num_heads, _ = shape[f"{tower}/{'layers_0/' if per_layer else ''}relpos_bias/rel_embedding"]
        width = shape[f"{tower}/layers_0/{attention}/query/kernel"][1]
        gated = f"{tower}/layers_0/mlp/wi_0/kernel" in shape
        activations = sum(name.startswith(f"{tower}/layers_0/mlp/wi_") for name in shape)
        mlp_dim = shape[f"{tower}/layers_0/mlp/{'wi_0' if gated else 'wi'}/kernel"][1]
        head_dim = width // num_heads
    except (KeyError, ValueError, IndexError, ZeroDivisionError) as error:
        raise UserError(f"its arrays are not those of a T5: {error} is missing or has a wrong shape.") from None
    depths = {"num_encoder_layers": layers["encoder"], "num_decoder_layers": layers["decoder"]}
    return {
        "vocab_size": vocab_size,
        "emb_dim": emb_dim,
        "num_heads": num_heads,
        "head_dim": head_dim,
        "mlp_dim": mlp_dim,
        **({"num_layers": layers["decoder"]} if decoder_alone else depths),
        "mlp_activations": ("gelu", *["linear"] * (activations - 1)) if gated else ("relu",),
        "logits_via_embedding": "decoder/logits_dense/kernel" not in shape,
        "per_layer_relative_position_bias": per_layer,
    }


def differences(stated: Mapping[str, Any], shown: Mapping[str, Any]) -> list[str]:
    """Return one line for each field that a checkpoint states differently from its arrays.

    Args:
      stated: fields of a network's configuration.
      shown: the result of `config_of` for the arrays.
    """
    rows = []
    for field in sorted(stated.keys() & {*_SIZES, *(name for name, value in shown.items() if isinstance(value, bool))}):
        if type(stated[field]) is not type(shown.get(field)) or stated[field] != shown[field]:
            rows.append(f"{field}: {str(stated[field])[:80]} is stated, the arrays have {shown.get(field)}")
    activations = stated.get("mlp_activations", shown["mlp_activations"])
    if not isinstance(activations, list | tuple) or len(activations) != len(shown["mlp_activations"]):
        rows.append(f"mlp_activations: {str(activations)[:80]}, the arrays have {len(shown['mlp_activations'])}")
    return rows


def is_decoder_only(config: Mapping[str, Any]) -> bool:
    """Return whether these are fields of a TransformerConfig rather than of a T5Config."""
    return "num_layers" in config


def parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return {canonical name: anything with a `.shape`} for all parameters of the network that `config` describes."""
    if not is_decoder_only(config):
        return {parameter.name: parameter for parameter in t5_parameters(config)}
    towers = {**config, "num_encoder_layers": 0, "num_decoder_layers": config["num_layers"]}
    parameters = {}
    for parameter in t5_parameters(towers):
        name = parameter.name.replace("target/token_embedder/", "target/decoder/token_embedder/")
        if name.startswith("target/decoder/") and not re.search("/(encoder_decoder|pre_cross)_attention", name):
            parameters[name] = dataclasses.replace(parameter, name=name)
    return parameters


def name_of(config: Mapping[str, Any], model_type: str | None = None) -> str:
    """Return a readable family and size: `T5 1.1 small`, or `T5 1.1 of its own size`.

    Args:
      model_type: what the checkpoint itself states (see Source); a trimmed vocabulary hides that a model is an mT5.
    """
    if is_decoder_only(config):
        family, sizes = "decoder-only T5", _T5_1_1
    elif len(config["mlp_activations"]) == 1:
        family, sizes = "T5 1.0", _T5_1_0
    elif config.get("per_layer_relative_position_bias"):
        family, sizes = "umT5", _T5_1_1
    elif model_type == "mt5" or config["vocab_size"] == 250112:
        family, sizes = "mT5", _T5_1_1
    elif config["vocab_size"] == 384:
        family, sizes = "ByT5", _BYT5
    else:
        family, sizes = "T5 1.1", _T5_1_1
    depths = ("num_layers",) if is_decoder_only(config) else _DEPTHS
    dimensions = tuple(config[field] for field in (*_WIDTHS, *depths))
    size = next((size for size, known in sizes.items() if known[: len(dimensions)] == dimensions), "of its own size")
    return f"{family} {size}"


def _count_layers(names: Mapping[str, Any], tower: str) -> int:
    layers = {int(m.group(1)) for name in names if (m := re.match(rf"{tower}/layers_(\d{{1,6}})/", name))}
    if gaps := [number for number in range(len(layers)) if number not in layers]:
        raise UserError(f"its arrays are not all of a T5: {tower}/layers_{gaps[0]} is missing.")
    return len(layers)


# --- Names


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
