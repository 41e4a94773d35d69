"""Whole checkpoints of one tiny T5 in every format that can be read: what the fuzz mutates."""

import io
import json
import shutil
from pathlib import Path

import msgpack
import numpy as np

from t5x.checkpoints import layout
from t5x.checkpoints.families import t5_parameters
from t5x.checkpoints.formats import LazyArray
from t5x.checkpoints.formats.huggingface import write_huggingface
from t5x.checkpoints.formats.native_t5x import write_native
from t5x.checkpoints.formats.own_checkpoint import write_own_checkpoint
from t5x.checkpoints.model_description import describe_network
from t5x.checkpoints.tree import nest
from t5x.data.vocabularies import HuggingFaceVocabulary, SentencePieceVocabulary
from t5x.optimizers.adafactor import Adafactor
from tests.checkpoints.formats import bundle_writer

CONFIG = {
    "vocab_size": 384, "emb_dim": 8, "num_heads": 2, "head_dim": 4, "mlp_dim": 16, "num_encoder_layers": 2,
    "num_decoder_layers": 1, "mlp_activations": ("gelu", "linear"), "logits_via_embedding": False,
}  # fmt: skip
STEP = 7
# Those without a vocabulary of their own are loaded with `--vocabulary bytes`.
FORMATS = {
    "t5x": None, "t5x scanned": None, "native": "bytes", "native scanned": "bytes", "Orbax OCDBT": "bytes",
    "Orbax zarr": "bytes", "Orbax zarr3": "bytes", "early Orbax": "bytes", "Mesh TensorFlow": "bytes",
    "Hugging Face": None, "Hugging Face, tokenizer.json": None,
}  # fmt: skip


def write_originals(directory: Path) -> None:
    """Writes a directory for each of FORMATS."""
    arrays = _arrays()
    params = {name: array for name, array in arrays.items() if name.startswith(layout.PARAMS)}
    vocabularies = _vocabularies(directory / "vocabularies")
    _write_ours(directory, arrays, vocabularies)
    for format, kept in (("native", arrays), ("native scanned", _stacked(arrays))):
        write_native(directory / format, STEP, kept.items())
    _write_orbax(directory, arrays)
    _write_mesh_tensorflow(directory / "Mesh TensorFlow", params)
    lazy = {name: _lazy(array) for name, array in params.items()}
    for (format, vocabulary), shard_bytes in zip(
        (("Hugging Face", "inputs"), ("Hugging Face, tokenizer.json", "targets")), (10**9, 8000), strict=True
    ):
        files = {feature: vocabularies[vocabulary] for feature in ("inputs", "targets")}
        write_huggingface(directory / format, CONFIG, lazy, vocabulary_files=files, shard_bytes=shard_bytes)
    shutil.rmtree(directory / "vocabularies")


def _arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for parameter in t5_parameters(CONFIG):
        arrays[parameter.name] = rng.standard_normal(parameter.shape, np.float32)
        path = parameter.name.removeprefix(layout.PARAMS)
        if not path.endswith(
            ("token_embedder/embedding", "attention/query/kernel")
        ):  # state of the others adds nothing
            continue
        for slot, zeros in Adafactor().init({path: arrays[parameter.name]}, {path: None})[path].items():
            arrays[f"{layout.STATES}{path}/{slot}"] = rng.random(zeros.shape, np.float32)
    return arrays


def _stacked(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.read() for name, array in layout.stacked({n: _lazy(a) for n, a in arrays.items()}).items()}


def _lazy(array: np.ndarray) -> LazyArray:
    return LazyArray(array.shape, array.dtype, lambda: array)


def _vocabularies(directory: Path) -> dict[str, dict[str, bytes]]:
    """The files of a SentencePiece vocabulary for the inputs, and of a tokenizer.json for the targets."""
    import sentencepiece

    directory.mkdir(parents=True)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a quick brown fox jumps over the lazy dog", "pack my box with jugs"] * 20),
        model_writer=model, vocab_size=40, hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
        normalization_rule_name="nfkc", minloglevel=2,
    )  # fmt: skip
    (directory / "spiece.model").write_bytes(model.getvalue())
    (directory / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    inputs = SentencePieceVocabulary(directory / "spiece.model", extra_ids=10)
    return {
        "inputs": inputs.to_files(),
        "targets": HuggingFaceVocabulary(directory / "tokenizer.json").to_files(),
    }


def _tokenizer() -> dict:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz", "▁the", "<extra_id_0>"]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    words = {
        "type": "Split",
        "pattern": {"Regex": r"\s*[\r\n]+|\s+(?!\S)|\s+"},
        "behavior": "Isolated",
        "invert": False,
    }
    added = (0, 1, 2, len(pieces) - 1)
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 512, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [special | {"id": i, "content": pieces[i]} for i in added],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}, spaces]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, space]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"</s>": {"id": "</s>", "ids": [1], "tokens": ["</s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [spaces, space]},
        "model": {"type": "Unigram", "unk_id": 2, "vocab": [[p, -float(i)] for i, p in enumerate(pieces)]},
    }


def _write_ours(directory: Path, arrays: dict[str, np.ndarray], vocabularies: dict[str, dict[str, bytes]]) -> None:
    files = {f"vocabulary/{f}/{name}": content for f, of in vocabularies.items() for name, content in of.items()}
    for format, kept in (("t5x", arrays), ("t5x scanned", _stacked(arrays))):
        described = describe_network(CONFIG | {"scan_layers": format != "t5x"})
        sidecars = files | {"model.json": json.dumps(described).encode()}
        directory.joinpath(format).mkdir()
        write_own_checkpoint(directory / format / f"checkpoint_{STEP}", STEP, kept.items(), sidecars=sidecars)


def _write_orbax(directory: Path, arrays: dict[str, np.ndarray]) -> None:
    import orbax.checkpoint as ocp

    tree = nest(arrays | {"state/step": np.asarray(STEP, np.int32)})
    kinds = {"OCDBT": (True, False), "zarr": (False, False), "zarr3": (False, True)}
    for kind, (ocdbt, zarr3) in kinds.items():
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)) as checkpointer:
            checkpointer.save(directory / f"Orbax {kind}", ocp.args.PyTreeSave(tree))
    early = directory / "early Orbax"
    shutil.copytree(directory / "Orbax zarr", early)
    for name in ("_METADATA", "_CHECKPOINT_METADATA", "_sharding"):
        early.joinpath(name).unlink(missing_ok=True)
    names = {name: f"PLACEHOLDER://{name.replace('/', '.')}" for name in [*arrays, "state/step"]}
    early.joinpath("checkpoint").write_bytes(msgpack.packb(nest(names)))


def _write_mesh_tensorflow(directory: Path, params: dict[str, np.ndarray]) -> None:
    """The variables, under Mesh TensorFlow's names: the opposite of `mesh_tensorflow.translate`."""
    variables = {"global_step": np.asarray(STEP, np.int64)}
    projections = {"query": "q", "key": "k", "value": "v", "out": "o"}
    for name, array in params.items():
        match name.removeprefix(layout.PARAMS).split("/"):
            case ["token_embedder", _]:
                variable = "shared/embedding"
            case [tower, "relpos_bias", _]:
                variable = f"{tower}/block_000/layer_000/SelfAttention/relative_attention_bias"
            case [tower, ("encoder_norm" | "decoder_norm"), _]:
                variable = f"{tower}/rms_norm/scale"
            case [tower, "logits_dense", kernel]:
                variable = f"{tower}/logits/{kernel}"
            case [tower, layer, "mlp", dense, kernel]:
                variable = f"{tower}/block_{int(layer[7:]):03d}/layer_002/DenseReluDense/{dense}/{kernel}"
            case [tower, layer, norm, "scale"]:
                number = {"pre_mlp_layer_norm": 1 if tower == "encoder" else 2, "pre_cross_attention_layer_norm": 1}
                variable = f"{tower}/block_{int(layer[7:]):03d}/layer_{number.get(norm, 0):03d}/rms_norm/scale"
            case [tower, layer, attention, projection, _]:
                kind = "EncDecAttention" if attention == "encoder_decoder_attention" else "SelfAttention"
                variable = f"{tower}/block_{int(layer[7:]):03d}/layer_001/{kind}/{projections[projection]}"
        variables[variable] = array
    directory.mkdir()
    bundle_writer.write_bundle(directory / f"model.ckpt-{STEP}", variables)
    content = f'model_checkpoint_path: "model.ckpt-{STEP}"\n'
    directory.joinpath("checkpoint").write_text(content)
