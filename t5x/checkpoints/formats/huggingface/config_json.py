"""Translation between config.json of Hugging Face's T5, mT5 and umT5 and the fields of T5Config."""

import os
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.checkpoints.families import PER_LAYER_BIAS
from t5x.files.untrusted import MAX_JSON_BYTES, parse_json
from t5x.files.user_files import read_regular
from t5x.network.config import FIXED_IN_T5X, TOKEN_IDS, T5Config

# Our own fields, which transformers keeps but does not use.
TEMPLATE, DATA = "ranking_template", "t5x_data"
_SIZES = {  # config.json: T5Config
    "vocab_size": "vocab_size",
    "d_model": "emb_dim",
    "num_heads": "num_heads",
    "d_kv": "head_dim",
    "d_ff": "mlp_dim",
    "num_layers": "num_encoder_layers",
    "num_decoder_layers": "num_decoder_layers",
}
# transformers computes the same as T5X with these. Its "gelu" is missing: it is exact, T5's is the approximation.
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
_BUCKETS = {name: usual for name, usual in FIXED_IN_T5X.items() if name not in TOKEN_IDS}  # named as in T5Config
_FIXED = {"layer_norm_epsilon": 1e-6, "is_encoder_decoder": True}
_UNSUPPORTED = {"is_decoder": False, "pruned_heads": {}, "quantization_config": None}  # with the values that do nothing
# Constraints on outputs that `generate` of transformers applies by itself, and neutral values. Preferences, such
# as num_beams and max_length, are options of the user here.
_CONSTRAINTS = (
    "bad_words_ids", "begin_suppress_tokens", "constraints", "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty", "exponential_decay_length_penalty", "force_words_ids", "forced_decoder_ids",
    "forced_eos_token_id", "guidance_scale", "sequence_bias", "suppress_tokens", "watermarking_config",
)  # fmt: skip
_NEUTRAL = {"encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1, "guidance_scale": 1}
# Fields of config.json that a converted model must not inherit: they describe the file, or repeat other fields.
_NOT_KEPT = (
    "auto_map", "dense_act_fn", "dtype", "is_gated_act", "scale_decoder_outputs", "torch_dtype", "transformers_version",
)  # fmt: skip
SUPPORTED_MODEL_TYPES = {
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
    "umt5": "UMT5ForConditionalGeneration",
}
_MT5_VOCABULARY = 250112


def read_json(path: str) -> dict[str, Any]:
    """Return the JSON object in a file of a Hugging Face directory."""
    try:
        content = parse_json(read_regular(path, max_bytes=MAX_JSON_BYTES))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}. Download it again.") from error
    return content


def read_own_field(stated: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any] | None:
    """Return one of our own fields, a JSON object; None if it is missing."""
    value = stated.get(name) or None
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"{path}: {name} is {str(value)[:80]!r}, which is not a JSON object.")
    return value


def model_type(stated: Mapping[str, Any], path: str) -> str:
    """Return `t5`, `mt5` or `umt5`; the default is `t5`."""
    kind = stated.get("model_type", "t5")
    if not isinstance(kind, str) or kind not in SUPPORTED_MODEL_TYPES:
        raise UserError(
            f"{path}: model_type {kind!r} is not supported (supported: {', '.join(SUPPORTED_MODEL_TYPES)}). "
            "T5, T5 1.1, Flan-T5, ByT5, mT5 and umT5 can be read."
        )
    return kind


def read_config(stated: Mapping[str, Any], path: str, generation: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the fields of T5Config that config.json states, except `logits_via_embedding`, for which see `is_scaled`.

    Args:
      stated: the content of config.json.
      path: path of config.json, for messages.
      generation: the content of generation_config.json; None if there is none.
    """
    kind = model_type(stated, path)
    required = _FIXED | _UNSUPPORTED
    differing = [f"{k} is {stated[k]!r}, not {v!r}" for k, v in required.items() if stated.get(k, v) != v]
    if differing:
        raise UserError(f"{path} describes a network that is not supported: {'; '.join(differing)}.")
    sizes = {"num_decoder_layers": stated.get("num_layers")}
    sizes |= {key: stated[key] for key in _SIZES if stated.get(key) is not None}
    for key in _SIZES:
        if type(value := sizes.get(key)) is not int or value < 1:
            raise UserError(f"{path}: {key} is {value!r}; it must be an integer of at least 1.")
    config: dict[str, Any] = {t5x_name: sizes[hf_name] for hf_name, t5x_name in _SIZES.items()} | {
        "mlp_activations": _activations(stated, kind, path),
        "dropout_rate": stated.get("dropout_rate", 0.1),
        PER_LAYER_BIAS: kind == "umt5",
        **{name: stated.get(name, usual) for name, usual in _BUCKETS.items()},
        **_token_ids(stated, generation, path),
    }
    try:
        checked = T5Config(**config)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return config | {"eos_token_id": checked.eos_token_id}


def _token_ids(stated: Mapping[str, Any], generation: Mapping[str, Any] | None, path: str) -> dict[str, Any]:
    """Return the special tokens; those of generation_config.json override those of config.json, as in transformers."""
    deciding = stated if generation is None else generation
    active = [name for name in _CONSTRAINTS if deciding.get(name) not in (None, [], {}, _NEUTRAL.get(name))]
    if active:
        where = path if generation is None else os.path.join(os.path.dirname(path), "generation_config.json")
        raise UserError(
            f"{where} constrains every output by {', '.join(active)}, which is not supported. Remove it to use the "
            "model without it."
        )
    tokens = {"forced_bos_token_id": deciding.get("forced_bos_token_id")}
    for name, usual in (("decoder_start_token_id", 0), ("pad_token_id", 0), ("eos_token_id", 1)):
        values = [value for file in (deciding, stated) if (value := file.get(name)) is not None]
        if name != "eos_token_id" and len(values) == 2 and values[0] != values[1]:
            raise UserError(
                f"{path}: {name} is {values[1]!r}, but {values[0]!r} in generation_config.json. Training and "
                "generation need one value: correct the wrong file."
            )
        tokens[name] = values[0] if values else usual
    if tokens["pad_token_id"] and deciding.get("decoder_start_token_id", stated.get("decoder_start_token_id")) is None:
        raise UserError(f"{path} has pad_token_id {tokens['pad_token_id']!r}, but no decoder_start_token_id. Add it.")
    return tokens


def parse_kept(content: bytes) -> dict[str, Any]:
    """Return what `kept_fields` returned, from the file in which a checkpoint stores it."""
    try:
        return dict(parse_json(content))
    except (TypeError, ValueError) as error:
        raise UserError(f"The config.json kept in the checkpoint is damaged: {error}.") from error


def kept_fields(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json to keep for conversion back to Hugging Face."""
    return {name: value for name, value in stated.items() if name not in _NOT_KEPT}


def _activations(stated: Mapping[str, Any], kind: str, path: str) -> tuple[str, ...]:
    project = stated.get("feed_forward_proj", "relu" if kind == "t5" else "gated-gelu")
    gated, _, function = str(project).rpartition("-")
    if project == "gated-gelu":
        function = "gelu_new"
    # If config.json has these two, they override feed_forward_proj.
    function = str(stated.get("dense_act_fn", function))
    is_gated = stated.get("is_gated_act", gated == "gated")
    if gated not in ("", "gated") or function not in _ACTIVATIONS:
        raise UserError(
            f"{path}: feed_forward_proj {project!r} (dense_act_fn {function!r}) is not supported; T5 1.0 has 'relu', "
            "T5 1.1 and later have 'gated-gelu'."
        )
    return (_ACTIVATIONS[function], "linear") if is_gated else (_ACTIVATIONS[function],)


def is_scaled(stated: Mapping[str, Any], path: str, *, own_head: bool) -> bool:
    """Return whether the decoder's output is multiplied by 1/sqrt(d_model) before the logits.

    T5 1.0 does so, later ones do not, and the field of config.json has changed. Until version 4 of transformers,
    `tie_word_embeddings` implied it. Version 5 always writes `tie_word_embeddings: true`: T5 has the key
    `scale_decoder_outputs` instead, mT5 never scales, and umT5 always does. The last contradicts the published umT5,
    which has separate, unscaled logits, so for umT5 scaling is assumed only if the logits are tied.

    Args:
      stated: the content of config.json.
      path: path of config.json, for messages.
      own_head: whether the checkpoint has an `lm_head.weight` that differs from the embedding.
    """
    kind = model_type(stated, path)
    tied = stated.get("tie_word_embeddings", True) is not False
    if kind == "t5":
        return bool(stated.get("scale_decoder_outputs", tied))
    if written_by_version_5(stated):
        return kind == "umt5" and not own_head
    return tied


def written_by_version_5(stated: Mapping[str, Any]) -> bool:
    """Return whether transformers 5 or later wrote this config.json."""
    version = re.match(r"\d{1,9}", str(stated.get("transformers_version", "")))
    return "scale_decoder_outputs" in stated or (version is not None and int(version[0]) >= 5)


def write_config(
    config: Mapping[str, Any], dtype: np.dtype, generation: Mapping[str, Any], kept: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of config.json for fields of T5Config.

    Args:
      generation: the content of generation_config.json.
      kept: `kept_fields` of the config.json that the model was read from. Its special tokens are those of `config`, but
        EOS, which generation_config.json may override.
    """
    if missing := sorted({*_SIZES.values(), "mlp_activations", "logits_via_embedding"} - config.keys()):
        raise UserError(f"The model configuration lacks {', '.join(missing)}, which Hugging Face's config.json needs.")
    tied = bool(config["logits_via_embedding"])
    if config.get(PER_LAYER_BIAS, False):
        kind = "umt5"
    elif config["vocab_size"] == _MT5_VOCABULARY and not tied:
        kind = "mt5"
    else:
        kind = "t5"
    return {
        **kept,
        "architectures": [SUPPORTED_MODEL_TYPES[kind]],
        "model_type": kind,
        **{hf_name: int(config[t5x_name]) for hf_name, t5x_name in _SIZES.items()},
        "feed_forward_proj": _feed_forward(tuple(config["mlp_activations"])),
        "dropout_rate": float(config.get("dropout_rate", 0.1)),
        "tie_word_embeddings": tied,
        **{name: config.get(name, usual) for name, usual in _BUCKETS.items()},
        **_FIXED,
        "initializer_factor": 1.0,
        "use_cache": True,
        **{name: kept.get(name, token) for name, token in generation.items() if name != "forced_bos_token_id"},
        "torch_dtype": dtype.name,
    }


def write_generation(config: Mapping[str, Any], eos_id: int | None) -> dict[str, Any]:
    """Return the content of generation_config.json for fields of T5Config.

    Args:
      eos_id: EOS of the vocabulary.
    """
    tokens: dict[str, Any] = {"decoder_start_token_id": 0, "pad_token_id": 0, "forced_bos_token_id": None}
    tokens |= {name: config[name] for name in TOKEN_IDS if name in config}
    first, *more = tokens.get("eos_token_id") or (1 if eos_id is None else eos_id,)
    tokens["eos_token_id"] = [first, *more] if more else first
    return {name: token for name, token in sorted(tokens.items()) if token is not None}


def _feed_forward(activations: tuple[str, ...]) -> str:
    names = {t5x_name: hf_name for hf_name, t5x_name in reversed(_ACTIVATIONS.items())}
    match activations:
        case ("gelu", "linear"):
            return "gated-gelu"
        case (activation,) if activation in names:
            return names[activation]
        case (activation, "linear") if activation in names:
            return f"gated-{names[activation]}"
    raise UserError(
        f"mlp_activations {activations} cannot be stored in a Hugging Face checkpoint: its T5 has one activation, or "
        'one and "linear" (a gated MLP), such as ("gelu", "linear").'
    )
