"""Which model a set of parameters is: its configuration, family and size, read off the shapes."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from t5x.errors import UserError

# (family, size): (emb_dim, num_heads, head_dim, mlp_dim, encoder layers, decoder layers). T5 1.1's sizes are also those
# of the LM-adapted and the Flan models, and, with other vocabularies, of mT5 and umT5.
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
_DECODER_ONLY = {  # without an encoder
    "base": (768, 12, 64, 2048, 12),
    "large": (1024, 16, 64, 2816, 24),
    "xl": (2048, 32, 64, 5120, 24),
    "xxl": (4096, 64, 64, 10240, 24),
}


def config_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of T5Config (of TransformerConfig, for a decoder alone) that the shapes of canonical parameters tell.

    Args:
      params: canonical names (`target/…`) with things that have a `.shape`.

    The activation of a gated MLP cannot be seen: it is taken to be T5 1.1's, and a plain one to be T5 1.0's.
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
        mlp_dim = shape[f"{tower}/layers_0/mlp/{'wi_0' if gated else 'wi'}/kernel"][1]
    except (KeyError, ValueError, IndexError) as error:
        message = f"These are not the parameters of a T5: {error} is missing or misshapen."
        raise UserError(message) from None
    depths = {"num_encoder_layers": layers["encoder"], "num_decoder_layers": layers["decoder"]}
    return {
        "vocab_size": vocab_size,
        "emb_dim": emb_dim,
        "num_heads": num_heads,
        "head_dim": width // num_heads,
        "mlp_dim": mlp_dim,
        **({"num_layers": layers["decoder"]} if decoder_alone else depths),
        "mlp_activations": ("gelu", "linear") if gated else ("relu",),
        "logits_via_embedding": "decoder/logits_dense/kernel" not in shape,
        "per_layer_relative_position_bias": per_layer,
    }


def is_decoder_only(config: Mapping[str, Any]) -> bool:
    """Whether these are fields of a TransformerConfig rather than of a T5Config."""
    return "num_layers" in config


def parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """All parameters of the network that `config` describes: canonical names with things that have a `.shape`."""
    from t5x.checkpoints.formats.huggingface import names

    if not is_decoder_only(config):
        return {parameter.name: parameter for parameter in names.parameters(config)}
    towers = {**config, "num_encoder_layers": 0, "num_decoder_layers": config["num_layers"]}
    found = {}
    for parameter in names.parameters(towers):
        name = parameter.name.replace("target/token_embedder/", "target/decoder/token_embedder/")
        if name.startswith("target/decoder/") and not re.search("/(encoder_decoder|pre_cross)_attention", name):
            found[name] = dataclasses.replace(parameter, name=name)
    return found


def name_of(config: Mapping[str, Any], model_type: str | None = None) -> str:
    """Family and size for people: `T5 1.1 small`, or `T5 1.1 of its own size`.

    Args:
      model_type: what the checkpoint itself states (see Source); a trimmed vocabulary hides that a model is an mT5.
    """
    fields = ("emb_dim", "num_heads", "head_dim", "mlp_dim", "num_encoder_layers", "num_decoder_layers")
    if is_decoder_only(config):
        family, sizes, fields = "decoder-only T5", _DECODER_ONLY, (*fields[:4], "num_layers")
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
    dimensions = tuple(config[field] for field in fields)
    size = next((size for size, known in sizes.items() if known == dimensions), "of its own size")
    return f"{family} {size}"


def _count_layers(names: Mapping[str, Any], tower: str) -> int:
    found = {int(m.group(1)) for name in names if (m := re.match(rf"{tower}/layers_(\d{{1,6}})/", name))}
    if gaps := [number for number in range(len(found)) if number not in found]:
        raise UserError(f"These are not all parameters of a T5: {tower}/layers_{gaps[0]} is missing.")
    return len(found)
