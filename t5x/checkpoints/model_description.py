"""The files with which a checkpoint describes itself: the model, its vocabularies and the run's configuration.

With these files beside the weights, a model can be rebuilt from the directory alone, and a run that would resume from
another model's checkpoint is refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from etils import epath

from t5x._runtime.errors import UserError
from t5x.checkpoints import families, transfer
from t5x.checkpoints.formats import Source
from t5x.checkpoints.formats.own_checkpoint import description_files, read_description, read_vocabulary_files
from t5x.data.data_description import DataDescription
from t5x.data.vocabularies import PassThroughVocabulary, Vocabulary
from t5x.data.vocabularies.loading import rebuild_vocabulary
from t5x.decoding import greedy_decode
from t5x.models import BaseTransformerModel, DecoderOnlyModel, EncoderDecoderModel
from t5x.network import DecoderWrapper, T5Config, Transformer, TransformerConfig

GIN_FILE = "config.gin"

_RESUME_FIELDS = ("model", "network", "inputs_bidirectional_attention", "template")

# How the network runs rather than what it is. These may differ between a checkpoint and the run that resumes from it.
_RUNTIME_FIELDS = {
    "attention_backend", "dropout_rate", "dtype", "float32_attention_logits", "matmul_dtype", "param_scan_axis",
    "remat_policy", "scan_layers",
}  # fmt: skip


def describe(model: BaseTransformerModel) -> dict[str, Any]:
    """Return the model as JSON: its classes, its treatment of inputs, and the network's configuration."""
    fields = _fields_of(getattr(model.module, "config", None)) or {}
    description: dict[str, Any] = {
        "model": _name(type(model)),
        "network": _name(type(model.module)),
        "config": {k: _as_json(v) for k, v in fields.items()},
    }
    if isinstance(model, DecoderOnlyModel):
        description["inputs_bidirectional_attention"] = model.inputs_bidirectional_attention
    if (template := _fields_of(getattr(model, "template", None))) is not None:  # a ranker, whatever its class
        description["template"] = template
    return description


def _fields_of(value: Any) -> dict[str, Any] | None:
    is_instance = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_instance else None


def describe_network(
    config: Mapping[str, Any],
    *,
    inputs_bidirectional_attention: bool = False,
    template: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the description of a model with our network of that configuration."""
    vocabulary = PassThroughVocabulary(config["vocab_size"])
    vocabularies = {"inputs": vocabulary, "targets": vocabulary}
    model = _build_network(config, vocabularies, inputs_bidirectional_attention=inputs_bidirectional_attention)
    more = {"template": template, "data": data}
    return describe(model) | {name: dict(value) for name, value in more.items() if value is not None}


def sidecars(
    model: BaseTransformerModel, config_gin: bytes | None, data: DataDescription | None = None
) -> dict[str, bytes]:
    """Return the files to store beside the weights, by their path in the checkpoint.

    Args:
      data: how the run reads its data file; None if it has none.
    """
    description = describe(model) | ({} if data is None else {"data": data.to_json()})
    vocabularies = {feature: vocabulary.to_files() for feature, vocabulary in model.vocabularies.items()}
    files = description_files(description, vocabularies)
    return files if config_gin is None else files | {GIN_FILE: config_gin}


def load_model(source: Source, dtype: str | None = None) -> BaseTransformerModel:
    """Build the model of a checkpoint, without an optimizer, from what it states and what its shapes show.

    Args:
      dtype: dtype of the activations; None is that of the run which wrote the checkpoint, or float32 if unknown.
    """
    if source.network not in (None, _name(Transformer), _name(DecoderWrapper)):
        raise UserError(
            f"{source.path} has a network of class {source.network[:200]}, which cannot be rebuilt from its "
            "description. Pass its gin file (--gin_file) instead of --model."
        )
    layers = {k: v for k, v in (source.config or {}).items() if k in ("scan_layers", "param_scan_axis")}
    config = transfer.config_of(source) | layers
    vocabularies = {
        feature: rebuild_vocabulary(files.__getitem__, f"{source.path}/vocabulary/{feature}")
        for feature, files in sorted(source.vocabulary_files.items())
    }
    _check_vocabularies(source.path, vocabularies, config)
    prefix = source.inputs_bidirectional_attention
    return _build_network(config, vocabularies, dtype=dtype, inputs_bidirectional_attention=prefix)


def _build_network(
    config: Mapping[str, Any],
    vocabularies: Mapping[str, Vocabulary],
    *,
    dtype: str | None = None,
    inputs_bidirectional_attention: bool = False,
) -> BaseTransformerModel:
    """Return a model with our network and greedy decoding; unknown configuration fields are ignored."""
    config_cls: type[TransformerConfig | T5Config]
    config_cls = TransformerConfig if families.is_decoder_only(config) else T5Config
    known = {field.name for field in dataclasses.fields(config_cls)}
    fields = config if dtype is None else {**config, "dtype": dtype}
    network_config = config_cls(**{k: v for k, v in fields.items() if k in known})
    if isinstance(network_config, T5Config):
        inputs, targets = vocabularies["inputs"], vocabularies["targets"]
        return EncoderDecoderModel(Transformer(network_config), inputs, targets, None, decode_fn=greedy_decode)
    return DecoderOnlyModel(
        DecoderWrapper(network_config),
        vocabularies["targets"],
        optimizer_def=None,
        decode_fn=greedy_decode,
        inputs_bidirectional_attention=inputs_bidirectional_attention,
    )


def check_same_model(path: epath.PathLike, model: BaseTransformerModel, *, same_classes: bool) -> None:
    """Raise a UserError with the differences if the checkpoint is of another model or vocabulary than `model`.

    Args:
      same_classes: also require the same Python classes of model and network, as for resuming a run.
    """
    stored, here = read_description(path), describe(model)
    rows = []
    if same_classes:
        rows += _differences("", *({name: d.get(name) for name in _RESUME_FIELDS} for d in (stored, here)))
    rows += _differences("config.", _identity(_defaults(model) | stored["config"]), _identity(here["config"]))
    included = read_vocabulary_files(path)
    for feature, vocabulary in model.vocabularies.items():
        if feature in included and not _is_stored(vocabulary, included[feature]):
            rows.append((f"vocabulary of {feature}", "has another", str(vocabulary)))
    if rows:
        width = max(len(name) for name, *_ in rows)
        table = "\n".join(f"  {name:<{width}}  checkpoint {saved}, this run {current}" for name, saved, current in rows)
        fix = "Choose another MODEL_DIR for this run" if same_classes else "Choose another checkpoint"
        raise UserError(
            f"{path} is a checkpoint of another model; nothing was changed.\n{table}\n"
            f"{fix}, or use the gin file of the run that wrote it."
        )


def _check_vocabularies(
    path: epath.PathLike, vocabularies: Mapping[str, Vocabulary], config: Mapping[str, Any]
) -> None:
    needed = {"targets"} if families.is_decoder_only(config) else {"inputs", "targets"}
    if missing := needed - vocabularies.keys():
        raise UserError(
            f"{path} has no vocabulary for {' and '.join(sorted(missing))}, so it cannot process text. In a Hugging "
            "Face directory, put spiece.model or tokenizer.json beside the weights. Otherwise use gin files with a "
            "vocabulary (`t5x infer --gin_file …`), or fine-tune with `t5x train --vocabulary FILE`, which stores it."
        )


def _is_stored(vocabulary: Vocabulary, files: Mapping[str, bytes]) -> bool:
    """Return whether these files are those of the vocabulary, or give an equal one."""
    if vocabulary.to_files() == files:
        return True
    try:
        return rebuild_vocabulary(files.__getitem__, "a vocabulary") == vocabulary
    except UserError:  # a user's own class: only its files can be compared
        return False


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in _RUNTIME_FIELDS}


def _defaults(model: BaseTransformerModel) -> dict[str, Any]:
    """Return the defaults of the network's configuration, which hold for fields that an older checkpoint lacks."""
    config = getattr(model.module, "config", None)
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    return {field.name: _as_json(field.default) for field in fields if field.default is not dataclasses.MISSING}


def _differences(prefix: str, stored: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    names = sorted(stored.keys() | here.keys())
    return [(prefix + n, repr(stored.get(n)), repr(here.get(n))) for n in names if stored.get(n) != here.get(n)]


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _as_json(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_as_json(v) for v in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
