"""Hugging Face directories: what transformers writes is read, what is written transformers loads, bit for bit."""

import json
import re
import shlex
import subprocess

import ml_dtypes
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints.formats.huggingface import read_huggingface, write_huggingface
from t5x.checkpoints.formats.source import LazyArray
from t5x.data.vocabularies import ByteVocabulary, PassThroughVocabulary, SentencePieceVocabulary, load_vocabulary
from t5x.network import T5Config
from tests.checkpoints.formats import huggingface_models as models
from tests.support.marks import mark_slow
from tests.support.paths import SHARED

FAMILIES = list(models.FAMILIES)

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the real data (../shared/data) is not here")


@pytest.fixture
def transformers():
    pytest.importorskip("torch")
    found = pytest.importorskip("transformers")
    found.logging.set_verbosity_error()
    return found


def expected_name(tensor, per_layer):
    """The rule of the name map in words of regular expressions: T5X's name and whether to transpose."""
    if tensor == "shared.weight":
        return "target/token_embedder/embedding", False
    if tensor == "lm_head.weight":
        return "target/decoder/logits_dense/kernel", True
    tower = tensor.split(".")[0]
    if tensor.endswith("final_layer_norm.weight"):
        return f"target/{tower}/{tower}_norm/scale", False
    layer, place, rest = re.fullmatch(r"\w+\.block\.(\d+)\.layer\.(\d)\.(.+)\.weight", tensor).groups()
    scope = f"target/{tower}/layers_{layer}"
    if rest.endswith("relative_attention_bias"):
        return f"{scope if per_layer else f'target/{tower}'}/relpos_bias/rel_embedding", True
    if rest == "layer_norm":
        encoder = ["pre_attention_layer_norm", "pre_mlp_layer_norm"]
        decoder = ["pre_self_attention_layer_norm", "pre_cross_attention_layer_norm", "pre_mlp_layer_norm"]
        return f"{scope}/{(encoder if tower == 'encoder' else decoder)[int(place)]}/scale", False
    block, part = rest.split(".")
    if block == "DenseReluDense":
        return f"{scope}/mlp/{part}/kernel", True
    attention = "encoder_decoder_attention" if block == "EncDecAttention" else "self_attention"
    if tower == "encoder":
        attention = "attention"
    return f"{scope}/{attention}/{dict(q='query', k='key', v='value', o='out')[part]}/kernel", True


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_that_transformers_writes_is_read(transformers, tmp_path, family):
    made = models.model(family)
    made.save_pretrained(tmp_path / "hf")
    source = read_huggingface(tmp_path / "hf")
    per_layer = family.startswith("umT5")
    state = {n: t for n, t in made.state_dict().items() if not n.endswith("embed_tokens.weight")}
    if source.config["logits_via_embedding"]:
        del state["lm_head.weight"]
    expected = {}
    for tensor, value in state.items():
        name, transposed = expected_name(tensor, per_layer)
        expected[name] = value.numpy().T if transposed else value.numpy()
    assert source.arrays.keys() == expected.keys()
    for name, value in expected.items():
        array = source.arrays[name]
        assert array.shape == value.shape and array.dtype == np.float32
        np.testing.assert_array_equal(array.read(), value)
    assert T5Config(**source.config) == T5Config(
        vocab_size=64,
        emb_dim=12,
        num_heads=5,
        head_dim=4,
        mlp_dim=20,
        num_encoder_layers=2,
        num_decoder_layers=3,
        mlp_activations=("relu",) if family == "T5 1.0" else ("gelu", "linear"),
        logits_via_embedding=family in ("T5 1.0", "umT5, tied"),
        per_layer_relative_position_bias=per_layer,
    )
    assert source.step is None and not source.vocabulary_files


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_what_the_configuration_says(transformers, tmp_path, family):
    made = models.model(family)
    made.save_pretrained(tmp_path / "hf")
    source = read_huggingface(tmp_path / "hf")
    if family == "umT5":
        made.config.tie_word_embeddings = False  # transformers 5 scales what the published models do not
    theirs, hidden = models.logits(made)
    if source.config["logits_via_embedding"]:
        ours = hidden @ source.arrays["target/token_embedder/embedding"].read().T / np.sqrt(12)
    else:
        ours = hidden @ source.arrays["target/decoder/logits_dense/kernel"].read()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_written_again_transformers_computes_the_same(transformers, tmp_path, family):
    made = models.model(family)
    made.save_pretrained(tmp_path / "hf")
    source = read_huggingface(tmp_path / "hf")
    write_huggingface(tmp_path / "again", source.config, source.arrays)
    loaded, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    before, after = made.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value.numpy(), after[name].numpy(), err_msg=name)
    np.testing.assert_array_equal(models.logits(made)[0], models.logits(loaded.eval())[0])
    assert loaded.config.decoder_start_token_id == 0
    assert loaded.generation_config.decoder_start_token_id == 0
    assert (loaded.generation_config.eos_token_id, loaded.generation_config.pad_token_id) == (1, 0)
    third = read_huggingface(tmp_path / "again")
    assert third.config == source.config
    assert sorted(tmp_path.iterdir()) == [tmp_path / "again", tmp_path / "hf"]


def test_sharded_both_ways(transformers, tmp_path):
    made = models.model("T5 1.1")
    made.save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    source = read_huggingface(tmp_path / "hf")
    write_huggingface(tmp_path / "again", source.config, source.arrays, shard_bytes=4000)
    written = sorted(p.name for p in (tmp_path / "again").glob("*.safetensors"))
    assert written[0] == f"model-00001-of-{len(written):05d}.safetensors" and len(written) > 2
    sizes = [p.stat().st_size for p in (tmp_path / "again").glob("*.safetensors")]
    assert max(sizes) < 4000 + 3000  # the header comes on top
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again").eval()
    np.testing.assert_array_equal(models.logits(made)[0], models.logits(loaded)[0])
    for name, array in read_huggingface(tmp_path / "again").arrays.items():
        np.testing.assert_array_equal(array.read(), source.arrays[name].read())


def test_bfloat16_is_kept(transformers, tmp_path):
    import torch

    made = models.model("T5 1.1")
    made.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    source = read_huggingface(tmp_path / "half")
    kernel = source.arrays["target/encoder/layers_1/mlp/wo/kernel"]
    assert kernel.dtype == ml_dtypes.bfloat16
    theirs = made.state_dict()["encoder.block.1.layer.1.DenseReluDense.wo.weight"].float().numpy().T
    np.testing.assert_array_equal(kernel.read().astype(np.float32), theirs)
    write_huggingface(tmp_path / "again", source.config, source.arrays)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again")
    assert loaded.dtype == torch.bfloat16
    for name, value in made.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])


@pytest.mark.parametrize("family", ["T5 1.0", "T5 1.1", "mT5", "umT5"])
def test_directories_of_transformers_4(transformers, tmp_path, family):
    """They state `tie_word_embeddings` and hold the embedding up to three times."""
    made = models.model(family)
    tensors = {name: value.numpy() for name, value in made.state_dict().items()}
    tied = family == "T5 1.0"
    tensors["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = np.ones((32, 5), np.float32)
    config = models.SIZES | {"model_type": made.config.model_type, "vocab_size": 64, "transformers_version": "4.46.3"}
    config |= {"feed_forward_proj": made.config.feed_forward_proj} | ({} if tied else {"tie_word_embeddings": False})
    assert "encoder.embed_tokens.weight" in tensors and "lm_head.weight" in tensors
    source = read_huggingface(models.write_directory(tmp_path / "old", tensors, config))
    assert source.config["logits_via_embedding"] is tied
    made.save_pretrained(tmp_path / "new")
    new = read_huggingface(tmp_path / "new")
    assert source.config == new.config and source.arrays.keys() == new.arrays.keys()
    for name, array in source.arrays.items():
        np.testing.assert_array_equal(array.read(), new.arrays[name].read())


def test_a_pickle_is_refused_with_the_command_that_converts_it(transformers, tmp_path):
    import torch

    made = models.model("T5 1.1")
    directory = tmp_path / "it's old"
    directory.mkdir()
    torch.save(made.state_dict(), directory / "pytorch_model.bin")
    config = models.SIZES | {"model_type": "t5", "vocab_size": 64, "feed_forward_proj": "gated-gelu"}
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    (directory / "spiece.model").write_bytes(b"carried along")
    with pytest.raises(UserError, match="pickle") as refused:
        read_huggingface(directory)
    command = str(refused.value).splitlines()[-1]
    convert, copy = command.split(" && ")
    python, option, program = shlex.split(convert)
    assert (python, option) == ("python", "-c")
    exec(program, {})  # here, where torch is imported
    subprocess.run(copy, shell=True, check=True)
    converted = tmp_path / "it's old-safetensors"
    assert (converted / "spiece.model").read_bytes() == b"carried along"
    (converted / "spiece.model").unlink()
    kernel = read_huggingface(converted).arrays["target/decoder/logits_dense/kernel"]
    np.testing.assert_array_equal(kernel.read(), made.lm_head.weight.detach().numpy().T)


TEXTS = [
    "translate English to German: That is good.",
    "  two  spaces, a\ttab\nand a line ",
    "Ein Mädchen läuft über die Straße.",
    "日本語 ꙮ 𓀀 🤖 ﬁ ½ ™ {x}",
    "",
]


@needs_shared
@pytest.mark.parametrize("name", mark_slow(["t5", "mt5", "umt5", "bytes", "its own"], slow=["mt5", "umt5"]))
def test_tokenizers_give_the_ids_of_the_vocabulary(transformers, tmp_path, name):
    vocabulary = {
        "t5": lambda: SentencePieceVocabulary(SHARED / "t5_vocab/spiece.model", extra_ids=100),
        "mt5": lambda: SentencePieceVocabulary(SHARED / "mt5_vocab/spiece.model"),
        "umt5": lambda: SentencePieceVocabulary(SHARED / "umt5_vocab/spiece.model", extra_ids=300),
        "bytes": lambda: ByteVocabulary(extra_ids=125),
        "its own": lambda: SentencePieceVocabulary(
            SHARED / "t5_vocab/spiece.model", 7, {"remove_extra_whitespaces": False}, reverse_extra_ids=False
        ),
    }[name]()
    family = "umT5" if name == "umt5" else "T5 1.1"
    models.model(family, vocab_size=vocabulary.vocab_size + 4, d_model=2).save_pretrained(tmp_path / "hf")
    source = read_huggingface(tmp_path / "hf")
    files = {feature: vocabulary.to_files() for feature in ("inputs", "targets")}
    write_huggingface(tmp_path / "new", source.config, source.arrays, vocabulary_files=files)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    for text in TEXTS:
        assert tokenizer(text).input_ids == [*vocabulary.encode(text), vocabulary.eos_id], text
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, vocabulary.eos_id)
    assert tokenizer.unk_token_id == vocabulary.unk_id and len(tokenizer) == vocabulary.vocab_size
    sentinel = tokenizer("a <extra_id_3> b").input_ids
    if name != "bytes":  # there only transformers finds sentinels in text
        assert sentinel == [*vocabulary.encode("a <extra_id_3> b"), vocabulary.eos_id]
    assert any(i >= vocabulary.vocab_size - max(vocabulary.extra_ids, 100) for i in sentinel)

    again = read_huggingface(tmp_path / "new").vocabulary_files
    assert again.keys() == {"inputs", "targets"}
    for name, content in again["targets"].items():
        (tmp_path / name).write_bytes(content)
    assert load_vocabulary(tmp_path) == vocabulary


@needs_shared
def test_extra_ids_of_a_bare_sentencepiece_model(tmp_path):
    """T5's own model lacks the sentinels that its vocabulary has; a table without room for them has none."""
    for vocab_size, extra_ids in ((32128, 100), (32000, 0)):
        tensors = models.tiny_tensors() | {"shared.weight": np.zeros((vocab_size, 4), np.float32)}
        directory = models.write_directory(
            tmp_path / str(vocab_size), tensors, models.tiny_config(vocab_size=vocab_size)
        )
        (directory / "spiece.model").write_bytes((SHARED / "t5_vocab/spiece.model").read_bytes())
        content = read_huggingface(directory).vocabulary_files["inputs"]
        assert json.loads(content["vocabulary.json"])["extra_ids"] == extra_ids


def test_byt5_is_known_by_its_tokenizer_class(tmp_path):
    tensors = models.tiny_tensors() | {"shared.weight": np.zeros((384, 4), np.float32)}
    config = models.tiny_config(vocab_size=384, tokenizer_class="ByT5Tokenizer")
    source = read_huggingface(models.write_directory(tmp_path / "hf", tensors, config))
    assert source.vocabulary_files["inputs"] == ByteVocabulary(extra_ids=125).to_files()


@pytest.mark.parametrize("kind", ["different", "ids"])
def test_vocabulary_without_a_tokenizer_is_logged(tmp_path, caplog, kind):
    source = read_huggingface(models.write_directory(tmp_path / "hf", models.tiny_tensors(), models.tiny_config()))
    vocabularies = {"inputs": PassThroughVocabulary(10), "targets": PassThroughVocabulary(10)}
    if kind == "different":
        vocabularies["inputs"] = ByteVocabulary()
    files = {feature: vocabulary.to_files() for feature, vocabulary in vocabularies.items()}
    caplog.clear()
    write_huggingface(tmp_path / "new", source.config, source.arrays, vocabulary_files=files)
    assert "no tokenizer files" in caplog.text
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "t5x_checksums.json",
    ]


@pytest.mark.parametrize(
    "activations, theirs",
    [(("gelu",), "gelu_new"), (("silu", "linear"), "gated-silu"), (("relu", "linear"), "gated-relu")],
)
def test_other_activations_travel(tmp_path, activations, theirs):
    tensors = models.tiny_tensors()
    if len(activations) == 2:
        for name in [name for name in tensors if name.endswith("wi.weight")]:
            value = tensors.pop(name)
            tensors |= {name.replace("wi", "wi_0"): value, name.replace("wi", "wi_1"): value + 1}
    config = models.tiny_config(feed_forward_proj=theirs)
    source = read_huggingface(models.write_directory(tmp_path / "hf", tensors, config))
    assert source.config["mlp_activations"] == activations
    write_huggingface(tmp_path / "new", source.config, source.arrays)
    assert json.loads((tmp_path / "new/config.json").read_text())["feed_forward_proj"] == theirs


def test_each_array_is_read_once_and_optimizer_state_is_excluded(tmp_path):
    source = read_huggingface(models.write_directory(tmp_path / "hf", models.tiny_tensors(), models.tiny_config()))
    reads = []

    def counted(name, array):
        return LazyArray(array.shape, array.dtype, lambda: (reads.append(name), array.read())[1])

    arrays = {name: counted(name, array) for name, array in source.arrays.items()}
    state = {"state/step": counted("step", LazyArray((), np.dtype(np.int32), lambda: np.int32(1)))}
    write_huggingface(tmp_path / "new", source.config, arrays | state)
    assert sorted(reads) == sorted(source.arrays)


@needs_shared
def test_the_real_flan_t5_small(tmp_path):
    source = read_huggingface(models.real_directory(tmp_path / "hf", SHARED))
    assert T5Config(**source.config) == T5Config(
        vocab_size=32128,
        emb_dim=512,
        num_heads=6,
        head_dim=64,
        mlp_dim=1024,
        num_encoder_layers=8,
        num_decoder_layers=8,
        mlp_activations=("gelu", "linear"),
    )
    assert sum(array.size for array in source.arrays.values()) == 76_961_152
    shapes = {name: array.shape for name, array in source.arrays.items()}
    assert shapes["target/encoder/layers_7/attention/query/kernel"] == (512, 384)
    assert shapes["target/decoder/layers_0/encoder_decoder_attention/out/kernel"] == (384, 512)
    assert shapes["target/decoder/relpos_bias/rel_embedding"] == (6, 32)
    assert shapes["target/decoder/logits_dense/kernel"] == (512, 32128)
    with np.load(SHARED / "flan_t5_small_titler/flan_t5_small_titler_int8.npz") as arrays:
        name = "decoder.block.3.layer.2.DenseReluDense.wi_1.weight"
        value = (arrays[name].astype(np.float32) - arrays[f"{name}::zp"]) * arrays[f"{name}::scale"]
    read = source.arrays["target/decoder/layers_3/mlp/wi_1/kernel"].read()
    np.testing.assert_array_equal(read, value.T.astype(np.float32))
