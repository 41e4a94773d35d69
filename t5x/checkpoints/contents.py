"""What a checkpoint says about itself: the model, its vocabularies and the configuration of the run.

With these files beside the weights, a model can be rebuilt from the directory alone, and a run that would continue
another model's checkpoint is refused.
"""

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from etils import epath

from t5x.checkpoints import families, manifest, paths, transfer
from t5x.checkpoints.formats import Source
from t5x.data.vocabularies import PassThroughVocabulary, Vocabulary
from t5x.decoding import greedy_decode
from t5x.errors import UserError
from t5x.models import BaseTransformerModel, DecoderOnlyModel, EncoderDecoderModel
from t5x.network import DecoderWrapper, T5Config, Transformer, TransformerConfig
from t5x.ranking.templates import Template, from_fields

MODEL_FILE = "model.json"
GIN_FILE = "config.gin"

_CLASSES = ("model", "network", "inputs_bidirectional_attention", "template")

# How the network runs rather than what it is: these may differ between a checkpoint and the run that continues it.
_RUNTIME_FIELDS = {
    "attention_backend", "dropout_rate", "dtype", "float32_attention_logits", "param_scan_axis", "remat_policy",
    "scan_layers",
}  # fmt: skip


def describe(model: BaseTransformerModel) -> dict[str, Any]:
    """The model as JSON: its classes, what it does with its inputs, and the fields of the network's configuration."""
    module = model.module
    config = getattr(module, "config", None)
    fields = dataclasses.asdict(config) if dataclasses.is_dataclass(config) else {}
    description = {
        "model": _name(type(model)),
        "network": _name(type(module)),
        "config": {k: _plain(v) for k, v in fields.items()},
    }
    if isinstance(model, DecoderOnlyModel):
        description["inputs_bidirectional_attention"] = model.inputs_bidirectional_attention
    if isinstance(template := getattr(model, "template", None), Template):  # of a ranker, whatever its class
        description["template"] = dataclasses.asdict(template)
    return description


def describe_network(
    config: Mapping[str, Any], *, inputs_bidirectional_attention: bool = False, template: Template | None = None
) -> dict[str, Any]:
    """The description of a model with our network of that configuration."""
    vocabulary = PassThroughVocabulary(config["vocab_size"])
    vocabularies = {"inputs": vocabulary, "targets": vocabulary}
    model = _model(config, vocabularies, inputs_bidirectional_attention=inputs_bidirectional_attention)
    if template is not None:
        model.template = template
    return describe(model)


def sidecars(model: BaseTransformerModel, config_gin: bytes | None) -> dict[str, bytes]:
    """The files that travel with the weights, by their path in the checkpoint."""
    files = {MODEL_FILE: (json.dumps(describe(model), indent=1) + "\n").encode()}
    for feature, vocabulary in model.vocabularies.items():
        files |= {f"vocabulary/{feature}/{name}": data for name, data in vocabulary.to_files().items()}
    return files if config_gin is None else files | {GIN_FILE: config_gin}


def load_model(path: epath.PathLike, dtype: str | None = None) -> BaseTransformerModel:
    """The model of a checkpoint, rebuilt from its description; without an optimizer, for inference.

    Args:
      dtype: of the activations; None is that of the run which made the checkpoint.
    """
    description = json.loads(manifest.read_file(path, MODEL_FILE))
    if description["network"] not in (_name(Transformer), _name(DecoderWrapper)):
        raise UserError(
            f"{path} holds a {description['network']}, which cannot be rebuilt from its description alone. Give "
            "its gin file (--gin_file) instead of --model."
        )
    vocabularies = load_vocabularies(path)
    _check_vocabularies(path, vocabularies, description["config"])
    prefix = description.get("inputs_bidirectional_attention", False)
    model = _model(description["config"], vocabularies, dtype=dtype, inputs_bidirectional_attention=prefix)
    if (template := description.get("template")) is not None:
        model.template = from_fields(template, f"{path}/{MODEL_FILE}")
    return model


def model_of(source: Source, dtype: str | None = None) -> BaseTransformerModel:
    """The model of a checkpoint of another format, from what it states and what its shapes tell.

    Args:
      dtype: of the activations; None is float32.
    """
    config = transfer.config_of(source)
    vocabularies = {}
    for feature, files in source.vocabulary_files.items():
        with tempfile.TemporaryDirectory() as directory:
            for name, content in files.items():
                paths.write_file(epath.Path(directory) / name, content)
            vocabularies[feature] = Vocabulary.from_files(directory)
            vocabularies[feature].to_files()  # reads what it needs while the directory is there
    _check_vocabularies(source.path, vocabularies, config)
    prefix = source.inputs_bidirectional_attention
    model = _model(config, vocabularies, dtype=dtype, inputs_bidirectional_attention=prefix)
    if source.template is not None:
        model.template = source.template
    return model


def _model(
    config: Mapping[str, Any],
    vocabularies: Mapping[str, Vocabulary],
    *,
    dtype: str | None = None,
    inputs_bidirectional_attention: bool = False,
) -> BaseTransformerModel:
    """A model with our network, which decodes greedily; fields that its configuration does not know are left out."""
    config_cls = TransformerConfig if families.is_decoder_only(config) else T5Config
    known = {field.name for field in dataclasses.fields(config_cls)}
    given = config if dtype is None else {**config, "dtype": dtype}
    network_config = config_cls(**{k: v for k, v in given.items() if k in known})
    if config_cls is T5Config:
        inputs, targets = vocabularies["inputs"], vocabularies["targets"]
        return EncoderDecoderModel(Transformer(network_config), inputs, targets, None, decode_fn=greedy_decode)
    return DecoderOnlyModel(
        DecoderWrapper(network_config),
        vocabularies["targets"],
        optimizer_def=None,
        decode_fn=greedy_decode,
        inputs_bidirectional_attention=inputs_bidirectional_attention,
    )


def load_vocabularies(path: epath.PathLike) -> dict[str, Vocabulary]:
    """The vocabularies in a checkpoint, by feature."""
    names = [PurePosixPath(name).parts for name in manifest.read(path).files]
    features = sorted({parts[1] for parts in names if len(parts) == 3 and parts[0] == "vocabulary"})
    return {f: Vocabulary.from_files(paths.local_path(path) / "vocabulary" / f) for f in features}


def check_same_model(path: epath.PathLike, model: BaseTransformerModel, *, same_classes: bool) -> None:
    """Raises where the checkpoint is of another model or vocabulary than `model`; the message shows the difference.

    Args:
      same_classes: the Python classes of model and network must be the same too, as when a run goes on.
    """
    stored, here = json.loads(manifest.read_file(path, MODEL_FILE)), describe(model)
    rows = []
    if same_classes:
        rows += _differences("", {k: stored.get(k) for k in _CLASSES}, {k: here.get(k) for k in _CLASSES})
    rows += _differences("config.", _identity(stored["config"]), _identity(here["config"]))
    travelling = {parts[1] for name in manifest.read(path).files if (parts := name.split("/"))[0] == "vocabulary"}
    for feature, vocabulary in model.vocabularies.items():
        if feature in travelling and not _has_vocabulary(path, feature, vocabulary):
            rows.append((f"vocabulary of {feature}", "has another", str(vocabulary)))
    if rows:
        width = max(len(name) for name, *_ in rows)
        table = "\n".join(f"  {name:<{width}}  checkpoint {theirs}, this run {ours}" for name, theirs, ours in rows)
        mend = "Choose another MODEL_DIR for this run" if same_classes else "Choose another checkpoint"
        raise UserError(
            f"{path} is a checkpoint of another model; nothing was changed.\n{table}\n"
            f"{mend}, or the gin file that the checkpoint was made with."
        )


def _check_vocabularies(
    path: epath.PathLike, vocabularies: Mapping[str, Vocabulary], config: Mapping[str, Any]
) -> None:
    needed = {"targets"} if families.is_decoder_only(config) else {"inputs", "targets"}
    if missing := needed - vocabularies.keys():
        raise UserError(
            f"{path} holds no vocabulary for {' and '.join(sorted(missing))}, so text cannot be read with it. A "
            "Hugging Face directory takes spiece.model or tokenizer.json beside the weights; otherwise use gin files "
            "that name a vocabulary (`t5x infer --gin_file …`), or fine-tune with `t5x train --vocabulary FILE`, which "
            "keeps it."
        )


def _has_vocabulary(path: epath.PathLike, feature: str, vocabulary: Vocabulary) -> bool:
    """Whether the vocabulary that travels with the checkpoint is this one: the same files, or equal once loaded."""
    files = {f"vocabulary/{feature}/{name}": content for name, content in vocabulary.to_files().items()}
    there = {name for name in manifest.read(path).files if name.startswith(f"vocabulary/{feature}/")}
    if files.keys() == there and all(manifest.read_file(path, name) == content for name, content in files.items()):
        return True
    try:
        return load_vocabularies(path).get(feature) == vocabulary
    except UserError:  # a class of the user's own, which only its files can be compared of
        return False


def _identity(config: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in config.items() if k not in _RUNTIME_FIELDS}


def _differences(prefix: str, stored: Mapping[str, Any], here: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    names = sorted(stored.keys() | here.keys())
    return [(prefix + n, repr(stored.get(n)), repr(here.get(n))) for n in names if stored.get(n) != here.get(n)]


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    return value if isinstance(value, bool | int | float | str | None) else str(value)
