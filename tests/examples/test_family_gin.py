"""The gin files of the package: the command line takes each of them, and each model has the size it has in T5X."""

import re
from pathlib import Path

import jax
import pytest

import t5x
from t5x import configuration
from t5x.apps.exporting.t5x_api import save
from t5x.partitioning import PjitPartitioner
from t5x.runs.eval import evaluate
from t5x.runs.infer import infer
from t5x.runs.precompile import precompile
from t5x.runs.train import train
from tests.support.paths import SHARED

needs_data = pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data is not there")

PACKAGE = Path(t5x.__file__).parent
GIN_FILES = sorted(str(path.relative_to(PACKAGE.parent)) for path in PACKAGE.rglob("*.gin"))
ENTRIES = {entry.__name__: entry for entry in (train, evaluate, infer, precompile, save)}

TINY, FINETUNE = "t5x/examples/t5/t5_1_1/tiny.gin", "t5x/configs/runs/finetune.gin"
UMT5 = "t5x/examples/scalable_t5/umt5"

GIVEN = {
    "MODEL_DIR": "'run'",
    "MIXTURE_OR_TASK_NAME": "'my_task'",
    "TRAIN_EVAL_MIXTURE_OR_TASK_NAME": "'my_task'",
    "TASK_FEATURE_LENGTHS": "{'inputs': 8, 'targets': 8}",
    "TRAIN_STEPS": "10",
    "INITIAL_CHECKPOINT_PATH": "'checkpoint_1'",
    "CHECKPOINT_PATH": "'checkpoint_1'",
    "EVAL_OUTPUT_DIR": "'out'",
    "INFER_OUTPUT_DIR": "'out'",
    "MODEL_OUTPUT_DIR": "'out/1'",
    "MODEL_NAME": "'mine'",
    "FEATURE_LENGTHS": "{'inputs': 8, 'targets': 8}",
    "TF_EXAMPLE_FILE_PATHS": "['in.tfrecord']",
    "TF_EXAMPLE_FILE_TYPE": "'tfrecord'",
    "DROPOUT_RATE": "0.0",
    "DATA_DIR": "'data'",
    "TRAIN_FILE": "'train.json'",
    "VALIDATION_FILE": "'dev.json'",
}

# The sizes of T5X's models. Those of the tiny ones, and of the scalable T5 1.1 and mT5, which have a relative-position
# table in each layer, are counted by hand.
PARAMETERS = {
    "t5/t5_1_0/tiny": 260_704,
    "t5/t5_1_0/small": 60_506_624,
    "t5/t5_1_0/base": 222_903_552,
    "t5/t5_1_0/large": 737_668_096,
    "t5/t5_1_0/3B": 2_851_598_336,
    "t5/t5_1_0/11B": 11_307_321_344,
    "t5/t5_1_1/tiny": 518_240,
    "t5/t5_1_1/small": 76_961_152,
    "t5/t5_1_1/base": 247_577_856,
    "t5/t5_1_1/large": 783_150_080,
    "t5/t5_1_1/xl": 2_849_757_184,
    "t5/t5_1_1/xxl": 11_135_332_352,
    "t5/mt5/tiny": 4_005_984,
    "t5/mt5/small": 300_176_768,
    "t5/mt5/base": 582_401_280,
    "t5/mt5/large": 1_229_581_312,
    "t5/mt5/xl": 3_742_619_648,
    "t5/mt5/xxl": 12_921_057_280,
    "t5/byt5/tiny": 10_336,
    "t5/byt5/small": 299_637_760,
    "t5/byt5/base": 581_653_248,
    "t5/byt5/large": 1_228_183_552,
    "t5/byt5/xl": 3_737_801_728,
    "t5/byt5/xxl": 12_906_899_328,
    "scalable_t5/t5_1_1/small": 76_961_152 + 14 * 32 * 6,
    "scalable_t5/t5_1_1/base": 247_577_856 + 22 * 32 * 12,
    "scalable_t5/t5_1_1/large": 783_150_080 + 46 * 32 * 16,
    "scalable_t5/t5_1_1/xl": 2_849_757_184 + 46 * 32 * 32,
    "scalable_t5/t5_1_1/xxl": 11_135_332_352 + 46 * 32 * 64,
    "scalable_t5/mt5/small": 300_176_768 + 14 * 32 * 6,
    "scalable_t5/mt5/base": 582_401_280 + 22 * 32 * 12,
    "scalable_t5/mt5/large": 1_229_581_312 + 46 * 32 * 16,
    "scalable_t5/mt5/xl": 3_742_619_648 + 46 * 32 * 32,
    "scalable_t5/mt5/xxl": 12_921_057_280 + 46 * 32 * 64,
    "scalable_t5/umt5/pretrain_small": 306_601_984,
    "scalable_t5/umt5/pretrain_base": 592_043_520,
    "scalable_t5/umt5/pretrain_large": 1_242_449_920,
    "scalable_t5/umt5/pretrain_xl": 3_768_356_864,
    "scalable_t5/umt5/pretrain_xxl": 12_972_531_712,
    "decoder_only/models/base": 109_628_544,
    "decoder_only/models/large": 341_231_104,
    "decoder_only/models/xl": 1_223_527_424,
    "decoder_only/models/xxl": 4_762_310_656,
}


@pytest.fixture(autouse=True)
def fresh_configuration():
    configuration.clear()
    yield
    configuration.clear()


def read(path: str) -> str:
    return (PACKAGE.parent / path).read_text(encoding="utf-8")


def with_includes(path: str) -> str:
    """The text of a gin file, and in place of each include that of the file it names."""
    return re.sub(r"^include '(.+)'$", lambda match: with_includes(match[1]), read(path), flags=re.MULTILINE)


def command(path: str) -> list[str] | None:
    """The gin files of a command line that uses this one; None for a part that is only included by others."""
    text = with_includes(path)
    runs = "_script." in text
    if path.endswith("/local_tiny.gin"):
        return [path.replace("local_tiny", "t5_1_1/small"), FINETUNE, path]
    if "module = @network" in text and runs:
        return [path]
    if "\nMODEL = @" in text:
        return [path, FINETUNE]
    return [TINY, path] if path.startswith("t5x/configs/runs/") else None


def left_open(files: list[str]) -> set[str]:
    """The macros that nothing gives a value: what a user has to give."""
    text = "\n".join(map(with_includes, files))
    last = dict(re.findall(r"^([A-Z_]+) = (.+)$", text, flags=re.MULTILINE))
    return {name for name, value in last.items() if value == "%gin.REQUIRED"}


def dry_run(files: list[str]) -> str:
    """What `t5x VERB --gin_file=… --dry_run` does, with a value for every required macro; the whole configuration."""
    configuration.parse(
        gin_files=files,
        bindings=[f"{name} = {GIVEN[name]}" for name in sorted(left_open(files))],
        search_paths=[],
        entry_points=ENTRIES,
    )
    (entry,) = configuration.entry_points_in_use()
    configuration.check(entry)
    return configuration.resolved_str()


def build(*files: str, macro: str = "MODEL", bindings=()):
    """The value of a macro of these files."""

    def value_of(value):
        return value

    configuration.clear()
    configuration.parse(
        gin_files=files,
        bindings=[f"value_of.value = %{macro}", "DROPOUT_RATE = 0.1", *bindings],
        search_paths=[],
        entry_points={"value_of": value_of, "train": train},
    )
    configuration.check(value_of)
    return configuration.configured(value_of)()


def num_params(model) -> int:
    shapes = model.input_shapes({"inputs": 2, "targets": 2})
    variables = jax.eval_shape(lambda: model.get_initial_variables(jax.random.key(0), shapes))
    return sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))


def num_params_by_hand(config) -> int:
    """Count the parameters of a network from its configuration alone."""
    is_decoder_alone = hasattr(config, "num_layers")
    attention = 4 * config.emb_dim * config.num_heads * config.head_dim + config.emb_dim  # with the norm before it
    mlp = (len(config.mlp_activations) + 1) * config.emb_dim * config.mlp_dim + config.emb_dim
    depths = [config.num_layers] if is_decoder_alone else [config.num_encoder_layers, config.num_decoder_layers]
    tables = sum(depths) if config.per_layer_relative_position_bias else len(depths)
    cross = 0 if is_decoder_alone else config.num_decoder_layers * attention
    towers = sum(depths) * (attention + mlp) + cross + len(depths) * config.emb_dim + tables * 32 * config.num_heads
    return towers + (1 if config.logits_via_embedding else 2) * config.vocab_size * config.emb_dim


@pytest.mark.parametrize("path", [path for path in GIN_FILES if command(path)])
def test_the_command_line_takes_it(path):
    assert "model = @models." in dry_run(command(path))
    assert f"--gin_file={path}" in read(path), "the file does not show the command that runs it"


def test_every_part_is_included_by_a_file_that_can_be_run():
    run = [path for path in GIN_FILES if command(path)]
    included = {name for path in run for name in re.findall(r"^include '(.+)'$", read(path), flags=re.MULTILINE)}
    assert set(GIN_FILES) - set(run) <= included


# One of each architecture, whose parameters are counted in the network itself: the others differ in sizes only.
COUNTED = (
    "t5/t5_1_0/tiny", "t5/t5_1_1/tiny", "scalable_t5/t5_1_1/small", "scalable_t5/umt5/pretrain_small",
    "decoder_only/models/base",
)  # fmt: skip


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_model_has_the_size_of_t5xs(name):
    path = f"t5x/examples/{name}.gin"
    model = build(path)
    assert num_params_by_hand(model.module.config) == PARAMETERS[name]
    assert name not in COUNTED or num_params(model) == PARAMETERS[name]
    assert f"{PARAMETERS[name]:,} parameters" in read(path)


def test_the_table_has_all_model_files():
    models = {path for path in GIN_FILES if re.search("^network.T.+Config:", read(path), flags=re.MULTILINE)}
    untabled = models - {f"t5x/examples/{name}.gin" for name in PARAMETERS}
    assert {path for path in untabled if not re.search("demo|local_tiny", path)} == set()


@pytest.mark.parametrize(
    ("path", "names"),
    {
        f"{UMT5}/pretrain_small.gin": {"MODEL_DIR", "MIXTURE_OR_TASK_NAME", "TRAIN_EVAL_MIXTURE_OR_TASK_NAME"},
        f"{UMT5}/pretrain_xxl.gin": {"MODEL_DIR", "MIXTURE_OR_TASK_NAME", "TRAIN_EVAL_MIXTURE_OR_TASK_NAME"},
        f"{UMT5}/tydiqa_base.gin": {"MODEL_DIR", "MIXTURE_OR_TASK_NAME"},
        "t5x/examples/t5/t5_1_1/examples/base_c4_pretrain.gin": {"MODEL_DIR"},
        "t5x/examples/t5/t5_1_1/examples/base_wmt_eval.gin": {"CHECKPOINT_PATH", "EVAL_OUTPUT_DIR"},
        "t5x/examples/decoder_only/examples/base_wmt_from_scratch.gin": {"MODEL_DIR"},
    }.items(),
)
def test_a_run_file_asks_for_no_more_than_t5x_did(path, names):
    assert left_open([path]) == names
    dry_run([path])


@needs_data
@pytest.mark.parametrize(
    ("path", "vocabulary", "extra_ids", "size"),
    [
        ("t5/t5_1_0/small", "t5_vocab", 100, 32_100),  # the file has no sentinels; T5X's own copy has them inside
        ("t5/t5_1_1/small", "t5_vocab", 100, 32_100),
        ("decoder_only/models/base", "t5_vocab", 100, 32_100),
        ("t5/mt5/small", "mt5_vocab", None, 250_100),
        ("scalable_t5/mt5/small", "mt5_vocab", None, 250_100),
        ("scalable_t5/umt5/pretrain_small", "umt5_vocab", None, 256_300),
        ("t5/byt5/small", None, None, 259),
        ("t5/byt5/tiny", None, None, 259),
    ],
)
def test_the_embedding_table_fits_the_real_vocabulary(path, vocabulary, extra_ids, size):
    bindings = []
    if vocabulary:
        file = SHARED / vocabulary / "spiece.model"
        bindings.append(f"seqio.SentencePieceVocabulary.sentencepiece_model_file = '{file}'")
    if extra_ids:
        bindings.append(f"seqio.SentencePieceVocabulary.extra_ids = {extra_ids}")
    model = build(f"t5x/examples/{path}.gin", bindings=bindings)
    assert {found.vocab_size for found in model.vocabularies.values()} == {size}
    assert model.module.config.vocab_size == -(-size // 128) * 128


def test_scalable_t5_stacks_its_layers_and_gives_each_a_position_table():
    from t5x.examples.scalable_t5 import network

    plain = network.T5Config(vocab_size=8)
    assert (plain.scan_layers, plain.remat_policy, plain.per_layer_relative_position_bias) == (True, "none", True)
    config = build("t5x/examples/scalable_t5/t5_1_1/small.gin").module.config
    assert (config.scan_layers, config.remat_policy, config.per_layer_relative_position_bias) == (True, "minimal", True)
    unrolled = build("t5x/examples/t5/t5_1_1/small.gin").module.config
    assert not unrolled.scan_layers and not unrolled.per_layer_relative_position_bias


def test_scalable_t5_can_take_the_shape_of_public_checkpoints():
    model = build(
        "t5x/examples/scalable_t5/t5_1_1/small.gin",
        bindings=["network.T5Config.per_layer_relative_position_bias = False"],
    )
    assert num_params(model) == PARAMETERS["t5/t5_1_1/small"]


@pytest.mark.parametrize(("folder", "model"), [("t5", "t5/byt5/xl"), ("scalable_t5", "scalable_t5/mt5/xl")])
def test_local_tiny_shrinks_any_model_and_keeps_its_vocabulary(folder, model):
    files = [f"t5x/examples/{model}.gin", FINETUNE, f"t5x/examples/{folder}/local_tiny.gin"]
    config = build(*files).module.config
    assert (config.emb_dim, config.num_encoder_layers) == (8, 2)
    assert config.vocab_size == build(files[0]).module.config.vocab_size
    configuration.clear()
    shown = dry_run(files)
    assert "dropout_rate = 0.0" in shown and "batch_size = 128" not in shown


def test_umt5_xxl_trains_with_momentum_and_whole_second_moments():
    optimizer = build(f"{UMT5}/pretrain_xxl.gin").optimizer_def
    assert (optimizer.beta1, optimizer.factored, optimizer.global_norm_clip_threshold) == (0.9, False, 1.0)
    assert optimizer.decay_rate == 0.8
    optimizer = build(f"{UMT5}/pretrain_xl.gin").optimizer_def
    assert (optimizer.beta1, optimizer.factored) == (None, True)


def test_the_partitioner_of_a_umt5_run_can_be_made():
    """configs/runs/*.gin bind num_partitions, which may not be given beside a submesh."""

    def value_of(value):
        return value

    configuration.parse(
        gin_files=[f"{UMT5}/pretrain_large.gin"],
        bindings=["value_of.value = @partitioning.PjitPartitioner()"],
        search_paths=[],
        entry_points={"value_of": value_of, "train": train},
    )
    assert isinstance(configuration.configured(value_of)(), PjitPartitioner)


def test_a_file_of_the_users_own_in_t5x_style(tmp_path):
    """Includes and macros of T5X's paths, names that only the included files import."""
    path = tmp_path / "mine.gin"
    path.write_text(
        """
include "t5x/examples/scalable_t5/mt5/small.gin"
include "t5x/examples/scalable_t5/umt5/architectures/encoder_decoder.gin"
include "t5x/examples/scalable_t5/umt5/runs/finetuning_common.gin"
include "t5x/examples/scalable_t5/umt5/optimizer/adafactor_momentum_nofactor.gin"
include "t5x/examples/scalable_t5/umt5/vocab.gin"

network.T5Config.num_encoder_layers = 3
partitioning.PjitPartitioner.num_partitions = 1
LEARNING_RATE = 0.002
LABEL_SMOOTHING = 0.1
MIXTURE_OR_TASK_NAME = "mine"
INITIAL_CHECKPOINT_PATH = "checkpoint_1"
TRAIN_STEPS = 1_000
MODEL_DIR = "run"
"""
    )
    configuration.parse(gin_files=[str(path)], search_paths=[], entry_points={"train": train})
    configuration.check(train)
    shown = configuration.resolved_str()
    assert "base_learning_rate = 0.002" in shown
    model = build(str(path))
    assert (model.module.config.num_encoder_layers, model.module.config.vocab_size) == (3, 256_384)
    assert (model._label_smoothing, model._loss_normalizing_factor) == (0.1, "NUM_REAL_TARGET_TOKENS")
    assert model.input_vocabulary.extra_ids == 300
    assert model.optimizer_def.beta1 == 0.9
