"""The fields of config.json and generation_config.json decide: logits, loss and outputs equal transformers'."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import t5x
from t5x._runtime.errors import UserError
from t5x.apps.exporting import checking, external
from t5x.apps.exporting.programs import Exportable
from t5x.apps.exporting.t5x_api import create_inference_function
from t5x.apps.ranking.models import RankingModel
from t5x.checkpoints.convert import convert
from t5x.checkpoints.formats.huggingface import read_huggingface, write_huggingface
from t5x.checkpoints.model_description import check_same_model, load_model
from t5x.data.feature_converters import EncDecFeatureConverter
from t5x.data.vocabularies import HuggingFaceVocabulary, PassThroughVocabulary
from t5x.inference.generation import Decoding
from t5x.models import EncoderDecoderModel
from t5x.network import T5Config, Transformer
from tests.checkpoints.formats import huggingface_models as models
from tests.cli.test_file_training import train, write_jsonl
from tests.support.marks import mark_slow

SIZES = {"num_decoder_layers": 2}  # the cache of transformers 5 needs as many as encoder layers
BUCKETS = {"relative_attention_num_buckets": 64, "relative_attention_max_distance": 256}
START_PAD = {"decoder_start_token_id": 2, "pad_token_id": 3}
# name: (family, fields of config.json, fields of generation_config.json, tensors to omit)
CASES = {
    "start 2, pad 3, three EOS, 64 buckets": (
        "T5 1.1", START_PAD | BUCKETS | {"eos_token_id": 1}, START_PAD | {"eos_token_id": [1, 12, 48]}, (),
    ),
    "forced first token, tied": ("T5 1.0", START_PAD | {"eos_token_id": [45, 1], "forced_bos_token_id": 7}, None, ()),
    "MADLAD": (
        "T5 1.1", {"decoder_start_token_id": 0, "pad_token_id": 3, "eos_token_id": 1}, None,
        ("shared.weight", "encoder.embed_tokens.weight"),
    ),
    "umT5 with 40 buckets": (
        "umT5", START_PAD | {"relative_attention_num_buckets": 40, "relative_attention_max_distance": 60}, None, (),
    ),
}  # fmt: skip
WORDS = [f"w{i}" for i in range(models.VOCABULARY)]
WORDS[1], WORDS[3], WORDS[2] = "</s>", "<pad>", "<unk>"
INPUTS = [[5, 0, 7, 8, 0, 1], [9, 10, 1], [0, 0, 1]]
TARGETS = [[11, 0, 13, 1], [14, 1], [0, 1]]


@pytest.fixture
def transformers():
    pytest.importorskip("torch")
    found = pytest.importorskip("transformers")
    found.logging.set_verbosity_error()
    return found


def write_tokenizer(path, words=WORDS):
    """Write a tokenizer.json of whole words, in which id 0 is an ordinary word."""
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["<pad>", "</s>", "<unk>"])
    made.post_processor = tokenizers.processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    made.save(str(path / "tokenizer.json"))


def write_case(path, name):
    """Write a directory as version 4 of transformers did; return the model that computes what it describes."""
    import transformers

    family, config, generation, omitted = CASES[name]
    architecture = {key: config[key] for key in BUCKETS if key in config}
    made = models.model(family, **SIZES, **architecture)
    if family == "umT5":
        made.config.tie_word_embeddings = False  # transformers 5 would scale the logits
    tensors = {key: value.detach().numpy() for key, value in made.state_dict().items() if key not in omitted}
    content = models.SIZES | SIZES | {"vocab_size": models.VOCABULARY, "model_type": made.config.model_type} | config
    content |= {"feed_forward_proj": "relu" if family == "T5 1.0" else "gated-gelu", "transformers_version": "4.46.3"}
    models.write_directory(path, tensors, content | {"tie_word_embeddings": family == "T5 1.0"})
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(path)
    tokens = {key: value for key, value in (config | (generation or {})).items() if key.endswith("token_id")}
    made.generation_config = transformers.GenerationConfig(**({"eos_token_id": 1} | tokens))
    return made


def padded(rows, pad):
    import torch

    longest = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    return ids, torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])


def hf_generate(made, inputs, **options):
    pad = made.generation_config.pad_token_id
    ids, mask = padded(inputs, pad)
    outputs = made.generate(ids, attention_mask=mask, do_sample=False, **options)[:, 1:].tolist()
    return [without(row, pad) for row in outputs]


def without(row, pad):
    while row and row[-1] == pad:
        row = row[:-1]
    return row


def hf_logits(made, inputs, targets):
    import torch

    pad, start = made.generation_config.pad_token_id, made.generation_config.decoder_start_token_id
    ids, mask = padded(inputs, pad)
    shifted, _ = padded([[start, *row[:-1]] for row in targets], pad)
    with torch.no_grad():
        return made(input_ids=ids, attention_mask=mask, decoder_input_ids=shifted).logits


def texts(rows):
    """Return strings with these ids and EOS."""
    return [" ".join(WORDS[i] for i in row[:-1]) for row in rows]


@pytest.mark.parametrize("name", mark_slow(list(CASES), slow=CASES.keys() - {"start 2, pad 3, three EOS, 64 buckets"}))
def test_computes_as_transformers(transformers, tmp_path, name):
    made = write_case(tmp_path / "hf", name)
    model = t5x.load(str(tmp_path / "hf"), dtype="float32")
    assert model.tokenize(texts(INPUTS)) == INPUTS
    long = [[*range(4, 60), 0] * 6 + [1]], [[*range(60, 10, -1), 0] * 6 + [1]]  # up to distance 342
    for inputs, targets in ((INPUTS, TARGETS), long):
        expected = hf_logits(made, inputs, targets).numpy()
        actual = model.logits(inputs, targets)
        for row, target in enumerate(targets):
            np.testing.assert_allclose(actual[row, : len(target)], expected[row, : len(target)], atol=1e-4, rtol=1e-4)
    expected = hf_generate(made, INPUTS, max_new_tokens=20)
    generations = model.generate(texts(INPUTS), max_length=20, token_scores=True)
    assert [each.tokens for each in generations] == expected
    ends = made.generation_config.eos_token_id
    assert isinstance(ends, int) or any(row[-1] in ends and row[-1] != 1 for row in expected), "no output ends"
    for each in generations:
        body = each.tokens[:-1] if each.tokens[-1] in np.atleast_1d(ends) else each.tokens
        assert each.text.split() == [WORDS[i] for i in body if i not in (1, made.generation_config.pad_token_id)]
    expected = hf_generate(made, INPUTS, max_new_tokens=12, num_beams=3, length_penalty=1.0)
    assert [each.tokens for each in model.generate(texts(INPUTS), num_beams=3, max_new_tokens=12)] == expected


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("pack", [False, True])
def test_loss_is_that_of_transformers(transformers, tmp_path, name, pack):
    import torch

    made = write_case(tmp_path / "hf", name)
    model = t5x.load(str(tmp_path / "hf"), dtype="float32")
    expected_logits = hf_logits(made, INPUTS, TARGETS)
    labels, mask = padded(TARGETS, made.generation_config.pad_token_id)
    losses = torch.nn.functional.cross_entropy(expected_logits.transpose(1, 2), labels, reduction="none") * mask
    converter = model.model.FEATURE_CONVERTER_CLS(pack=pack)
    examples = [{"inputs": i, "targets": t} for i, t in zip(INPUTS, TARGETS, strict=True)]
    rows = [examples] if pack else [[example] for example in examples]
    batch = converter.convert_batch(rows, {"inputs": 15, "targets": 12})
    assert batch["decoder_loss_weights"].sum() == sum(map(len, TARGETS))
    loss, metrics = model.model.loss_fn(model.engine.params, {key: jnp.asarray(value) for key, value in batch.items()})
    np.testing.assert_allclose(loss, losses.sum().item(), rtol=1e-5)
    assert metrics["target_tokens"].compute() == sum(map(len, TARGETS))
    if not pack:
        pairs = list(zip(texts(INPUTS), texts(TARGETS), strict=True))
        np.testing.assert_allclose(model.score(pairs), -losses.sum(1).numpy(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.slow
def test_every_field_returns_to_hugging_face(transformers, tmp_path, name):
    made = write_case(tmp_path / "hf", name)
    _, config, generation, _ = CASES[name]
    config = config | {"task_specific_params": {"translation": {"prefix": "to German: "}}}
    content = json.loads((tmp_path / "hf/config.json").read_text()) | config
    (tmp_path / "hf/config.json").write_text(json.dumps(content))
    convert(str(tmp_path / "hf"), str(tmp_path / "own"), to="t5x")
    convert(str(tmp_path / "own"), str(tmp_path / "again"), to="hf")
    written = json.loads((tmp_path / "again/config.json").read_text())
    assert {key: written[key] for key in config} == config
    assert written["tie_word_embeddings"] == content["tie_word_embeddings"]
    if generation is not None:
        assert json.loads((tmp_path / "again/generation_config.json").read_text()) == generation
    first, again = read_huggingface(tmp_path / "hf"), read_huggingface(tmp_path / "again")
    assert again.config == first.config
    assert again.vocabulary_files == first.vocabulary_files
    own = t5x.load(str(tmp_path / "own"), dtype="float32")
    expected = hf_generate(made, INPUTS, max_new_tokens=20)
    assert [each.tokens for each in own.generate(texts(INPUTS), max_length=20)] == expected
    check_same_model(own.source.path, own.model, same_classes=False)


def test_transformers_loads_what_is_written(transformers, tmp_path):
    made = write_case(tmp_path / "hf", "start 2, pad 3, three EOS, 64 buckets")
    source = read_huggingface(tmp_path / "hf")
    write_huggingface(tmp_path / "again", source.config, source.arrays, vocabulary_files=source.vocabulary_files)
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again").eval()
    generation = loaded.generation_config
    assert generation.eos_token_id == [1, 12, 48] and generation.decoder_start_token_id == 2
    assert (loaded.config.decoder_start_token_id, loaded.config.pad_token_id) == (2, 3)
    np.testing.assert_array_equal(hf_logits(loaded, INPUTS, TARGETS), hf_logits(made, INPUTS, TARGETS))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert tokenizer.pad_token_id == 3 and tokenizer("w0 w5").input_ids == [0, 5, 1]


def tiny_directory(path, generation=None, **config):
    models.write_directory(path, models.tiny_tensors(), models.tiny_config(**config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


@pytest.mark.parametrize(
    ("config", "generation", "message"),
    [
        ({"layer_norm_epsilon": 1e-5}, None, "layer_norm_epsilon is 1e-05"),
        ({"quantization_config": {"load_in_8bit": True}}, None, "quantization_config is"),
        ({"is_decoder": True}, None, "is_decoder is True"),
        ({"feed_forward_proj": "gelu"}, None, "feed_forward_proj 'gelu'"),
        (
            {"decoder_start_token_id": 0, "pad_token_id": 10},
            None,
            r"config.json: T5Config.pad_token_id is 10: the model's tokens are 0 to 9",
        ),
        ({"decoder_start_token_id": 0, "pad_token_id": True}, None, "pad_token_id is True"),
        ({"eos_token_id": [1, "2"]}, None, "eos_token_id is "),
        (
            {"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
            None,
            "pad_token_id and eos_token_id are both 1",
        ),
        ({"decoder_start_token_id": -1}, None, "decoder_start_token_id is -1"),
        ({"decoder_start_token_id": 0}, {"decoder_start_token_id": 2}, "decoder_start_token_id is 0, but 2 in gen"),
        ({"pad_token_id": 3}, None, "pad_token_id 3, but no decoder_start_token_id"),
        ({"forced_bos_token_id": 99}, None, "forced_bos_token_id is 99"),
        ({"relative_attention_num_buckets": 2}, None, "relative_attention_num_buckets is 2"),
        ({"relative_attention_num_buckets": "32"}, None, "relative_attention_num_buckets is '32'"),
        ({"relative_attention_max_distance": 10**12}, None, "relative_attention_max_distance is 1000000000000"),
        ({"relative_attention_max_distance": 16}, None, "relative_attention_max_distance is 16"),
        ({"suppress_tokens": [4]}, None, "config.json constrains every output by suppress_tokens"),
        ({}, {"bad_words_ids": [[4]], "forced_eos_token_id": 1}, "generation_config.json constrains .* bad_words_ids"),
    ],
)
def test_unsupported_field_raises_user_error(tmp_path, config, generation, message):
    with pytest.raises(UserError, match=message):
        read_huggingface(tiny_directory(tmp_path / "hf", generation, **config))


def test_fields_that_change_nothing_are_accepted(tmp_path):
    neutral = {"bad_words_ids": None, "suppress_tokens": [], "encoder_repetition_penalty": 1.0, "num_beams": 4}
    more = {"task_specific_params": {"x": {"num_beams": 4}}, "classifier_dropout": 0.0, "max_length": 200}
    source = read_huggingface(tiny_directory(tmp_path / "hf", neutral, **more, bad_words_ids=[[3]]))
    assert source.config["eos_token_id"] == () and source.config["pad_token_id"] == 0


def test_different_copies_of_the_embedding_raise_user_error(tmp_path):
    tensors = models.tiny_tensors()
    table = tensors.pop("shared.weight")
    tensors |= {"encoder.embed_tokens.weight": table, "decoder.embed_tokens.weight": table + 1}
    models.write_directory(tmp_path / "hf", tensors, models.tiny_config())
    with pytest.raises(UserError, match=r"decoder\.embed_tokens\.weight differs from encoder\.embed_tokens\.weight"):
        read_huggingface(tmp_path / "hf")


def test_tokenizer_with_another_eos_logs_a_warning(tmp_path, caplog):
    path = tiny_directory(tmp_path / "hf", eos_token_id=5)
    write_tokenizer(path, ["<pad>", "</s>", "<unk>", *"abcdefg"])
    read_huggingface(path)
    assert "outputs end with eos_token_id [5], but the tokenizer's EOS" in caplog.text


def network(**fields):
    sizes = {"vocab_size": 64, "emb_dim": 8, "num_heads": 2, "head_dim": 4, "mlp_dim": 8}
    return Transformer(T5Config(**sizes, num_encoder_layers=1, num_decoder_layers=1, **fields))


def test_a_tokenizer_that_pads_with_zero_raises_user_error(tmp_path):
    write_tokenizer(tmp_path)
    ids = PassThroughVocabulary(64, eos_id=1)
    vocabulary = HuggingFaceVocabulary(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="pad_token_id is 3, but the vocabulary pads with 0"):
        EncoderDecoderModel(network(pad_token_id=3), vocabulary, vocabulary, None)

    class Converter(EncDecFeatureConverter):
        def __init__(self, pack=False):
            super().__init__(pack)

    with pytest.raises(UserError, match="decoder_start_token_id 2 and pad_token_id 0, but Converter does not take bos"):
        EncoderDecoderModel(network(decoder_start_token_id=2), ids, ids, None, feature_converter_cls=Converter)
    with pytest.raises(UserError, match="listwise"):
        RankingModel(network(pad_token_id=3), ids, ids, None, loss="listwise")
    model = EncoderDecoderModel(network(pad_token_id=3, forced_bos_token_id=4), ids, ids, None)
    with pytest.raises(UserError, match="do not support the pad_token_id, forced_bos_token_id"):
        create_inference_function(model=model, inference_mode="predict")


def test_a_run_without_the_fields_is_refused(transformers, tmp_path):
    from t5x.checkpoints import transfer

    write_case(tmp_path / "hf", "start 2, pad 3, three EOS, 64 buckets")
    source = read_huggingface(tmp_path / "hf")
    assert not transfer.describe_differences(source.config, load_model(source).module.config)
    differences = transfer.describe_differences(source.config, network().config)
    for name in ("relative_attention_max_distance", "decoder_start_token_id", "pad_token_id", "eos_token_id"):
        assert any(line.startswith(f"{name}: checkpoint ") for line in differences), name


def test_native_checkpoints_log_what_they_cannot_store(transformers, tmp_path, caplog):
    write_case(tmp_path / "hf", "start 2, pad 3, three EOS, 64 buckets")
    convert(str(tmp_path / "hf"), str(tmp_path / "native"), to="native")
    assert "pad_token_id 3; eos_token_id (1, 12, 48)" in caplog.text


@pytest.mark.slow
def test_a_fine_tuned_model_keeps_the_fields(transformers, tmp_path):
    name = "start 2, pad 3, three EOS, 64 buckets"
    write_case(tmp_path / "hf", name)
    records = [{"q": f"w5 w0 w{i}", "a": f"w0 w{i} w0"} for i in range(10, 18)]
    data, valid = (write_jsonl(tmp_path / f"{split}.jsonl", records) for split in ("train", "valid"))
    train(tmp_path / "run", 2, (), model=str(tmp_path / "hf"), data=data, valid=valid, eval_every=2)
    tuned = t5x.load(str(tmp_path / "run"), dtype="float32")
    config = tuned.model.module.config
    assert (config.decoder_start_token_id, config.pad_token_id, config.eos_token_id) == (2, 3, (1, 12, 48))
    convert(str(tmp_path / "run"), str(tmp_path / "again"), to="hf")
    assert json.loads((tmp_path / "again/generation_config.json").read_text()) == CASES[name][2]
    loaded = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "again").eval()
    assert [each.tokens for each in tuned.generate(texts(INPUTS), max_length=9)] == hf_generate(
        loaded, INPUTS, max_new_tokens=9
    )
    metrics = json.loads((tmp_path / "run/training_eval/pairs/metrics.jsonl").read_text().splitlines()[-1])
    pairs = [(record["q"], record["a"]) for record in records]
    loss = -np.sum(tuned.score(pairs)) / sum(len(tuned.target_ids(target)[0]) for _, target in pairs)
    np.testing.assert_allclose(metrics["loss_per_nonpadding_target_token"], loss, rtol=2e-2)


@pytest.mark.parametrize("name", ["start 2, pad 3, three EOS, 64 buckets", "forced first token, tied"])
@pytest.mark.slow
def test_exported_programs_compute_the_same(transformers, tmp_path, name):
    write_case(tmp_path / "hf", name)
    model = t5x.load(str(tmp_path / "hf"), dtype="float32")
    exportable = Exportable(model, Decoding(beams=2), max_input_length=20, max_length=8)
    programs = exportable.programs()
    assert "outputs equal" in checking.compare_ids(
        exportable, lambda program, *ids: programs[program].function(exportable.arrays, *ids)
    )
    (tmp_path / "exported").mkdir()
    report = external.write_huggingface(str(tmp_path / "exported"), model.source.path, None, checking.Sample(), 8)
    assert "4 of 4 outputs equal" in report
