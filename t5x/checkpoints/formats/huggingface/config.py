"""config.json of Hugging Face's T5, mT5 and umT5, and the fields of T5Config that say the same."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5x.checkpoints.formats.huggingface.names import BUCKETS, PER_LAYER_BIAS
from t5x.errors import UserError

TEMPLATE = "ranking_template"  # a field of our own, which transformers keeps and does not use
_SIZES = {  # config.json: T5Config
    "vocab_size": "vocab_size",
    "d_model": "emb_dim",
    "num_heads": "num_heads",
    "d_kv": "head_dim",
    "d_ff": "mlp_dim",
    "num_layers": "num_encoder_layers",
    "num_decoder_layers": "num_decoder_layers",
}
# What transformers computes with these is what T5X computes; its "gelu" is the exact one, T5's is the approximation.
_ACTIVATIONS = {
    "relu": "relu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "silu": "silu",
    "swish": "silu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "linear",
}
_FIXED = {
    "relative_attention_num_buckets": BUCKETS,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "is_encoder_decoder": True,
}
_CLASSES = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
}
_MT5_VOCABULARY = 250112


def model_type(stated: Mapping[str, Any], path: str) -> str:
    """`t5`, `mt5` or `umt5`; a config.json that does not say is a T5's."""
    kind = stated.get("model_type", "t5")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise UserError(
            f"{path} says model_type {kind!r}: that is no model of the T5 family ({', '.join(_CLASSES)}). "
            "T5, T5 1.1, Flan-T5, ByT5, mT5 and umT5 can be read."
        )
    return kind


def read_config(stated: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The fields of T5Config that config.json states, without `logits_via_embedding`, for which see `logits`.

    Args:
      stated: the content of config.json.
      path: of config.json, for messages.
    """
    kind = model_type(stated, path)
    differing = [f"{k} is {stated[k]!r}, not {v!r}" for k, v in _FIXED.items() if stated.get(k, v) != v]
    if differing:
        raise UserError(f"{path} describes another network than T5's, which cannot be read: {'; '.join(differing)}.")
    sizes = {"num_decoder_layers": stated.get("num_layers")}
    sizes |= {key: stated[key] for key in _SIZES if stated.get(key) is not None}
    for key in _SIZES:
        if type(value := sizes.get(key)) is not int or value < 1:
            raise UserError(f"{path} is damaged: {key} is {value!r}; it must be a whole number of at least 1.")
    rate = stated.get("dropout_rate", 0.1)
    if type(rate) not in (int, float) or not 0 <= rate < 1:
        raise UserError(f"{path}: dropout_rate is {rate!r}; it must be a number of at least 0 and below 1.")
    return {ours: sizes[theirs] for theirs, ours in _SIZES.items()} | {
        "mlp_activations": _activations(stated, kind, path),
        "dropout_rate": float(rate),
        PER_LAYER_BIAS: kind == "umt5",
    }


def _activations(stated: Mapping[str, Any], kind: str, path: str) -> tuple[str, ...]:
    project = stated.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu")
    gated, _, function = str(project).rpartition("-")
    if project == "gated-gelu":
        function = "gelu_new"
    # Where config.json has them, these two decide, whatever feed_forward_proj says.
    function = str(stated.get("dense_act_fn", function))
    is_gated = stated.get("is_gated_act", gated == "gated")
    if gated not in ("", "gated") or function not in _ACTIVATIONS:
        raise UserError(
            f"{path}: feed_forward_proj {project!r} (dense_act_fn {function!r}) is not known here; T5 1.0 has 'relu', "
            "T5 1.1 and later 'gated-gelu'."
        )
    return (_ACTIVATIONS[function], "linear") if is_gated else (_ACTIVATIONS[function],)


def is_scaled(stated: Mapping[str, Any], path: str, *, own_head: bool) -> bool:
    """Whether the decoder's output is multiplied by 1/sqrt(d_model) before the logits.

    T5 1.0 does, the later ones do not, and config.json says it in a way that changed. Until version 4 of transformers
    `tie_word_embeddings` was the sign. Version 5 writes `tie_word_embeddings: true` always: T5 has the key
    `scale_decoder_outputs` instead, mT5 never scales, and umT5 always does. The last contradicts the published umT5,
    whose logits are their own and not scaled, so that it is believed for tied logits only.

    Args:
      stated: the content of config.json.
      path: of config.json, for messages.
      own_head: whether the checkpoint has `lm_head.weight` with values of its own.
    """
    kind = model_type(stated, path)
    tied = stated.get("tie_word_embeddings", True) is not False
    if kind == "t5":
        return bool(stated.get("scale_decoder_outputs", tied))
    if written_by_version_5(stated):
        return kind == "umt5" and not own_head
    return tied


def written_by_version_5(stated: Mapping[str, Any]) -> bool:
    """Whether transformers 5 or later wrote this config.json."""
    version = re.match(r"\d+", str(stated.get("transformers_version", "")))
    return "scale_decoder_outputs" in stated or (version is not None and int(version[0]) >= 5)


def write_config(config: Mapping[str, Any], dtype: np.dtype, eos_id: int) -> dict[str, Any]:
    """The content of config.json for fields of T5Config."""
    if missing := sorted({*_SIZES.values(), "mlp_activations", "logits_via_embedding"} - config.keys()):
        raise UserError(
            f"The model configuration lacks {', '.join(missing)}, so that no Hugging Face config.json can be written."
        )
    tied = bool(config["logits_via_embedding"])
    if config.get(PER_LAYER_BIAS, False):
        kind = "umt5"
    elif config["vocab_size"] == _MT5_VOCABULARY and not tied:
        kind = "mt5"
    else:
        kind = "t5"
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        **{theirs: int(config[ours]) for theirs, ours in _SIZES.items()},
        "feed_forward_proj": _feed_forward(tuple(config["mlp_activations"])),
        "dropout_rate": float(config.get("dropout_rate", 0.1)),
        "tie_word_embeddings": tied,
        **_FIXED,
        "initializer_factor": 1.0,
        "use_cache": True,
        "pad_token_id": 0,
        "eos_token_id": eos_id,
        "decoder_start_token_id": 0,
        "torch_dtype": dtype.name,
    }


def _feed_forward(activations: tuple[str, ...]) -> str:
    if activations == ("gelu", "linear"):
        return "gated-gelu"
    names = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    if len(activations) == 1 and activations[0] in names:
        return names[activations[0]]
    if len(activations) == 2 and activations[1] == "linear" and activations[0] in names:
        return f"gated-{names[activations[0]]}"
    raise UserError(
        f"mlp_activations {activations} cannot be written for Hugging Face: its T5 has one activation, or one and "
        '"linear" (a gated MLP), such as ("gelu", "linear").'
    )
