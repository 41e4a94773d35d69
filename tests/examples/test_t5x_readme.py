"""The commands of T5X's README, word for word but for paths and sizes, on a tiny local dataset.

They run in one process of the environment that has TFDS, so that its imports and compiled programs are shared. Public
files are read from T5X_MIRROR.
"""

import functools
import io
import json
import os
import shlex
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from t5x import configuration
from t5x.checkpoints.formats import open_checkpoint
from t5x.runs.train import train
from tests.support.paths import REPO
from tests.support.programs import run_reference

pytestmark = pytest.mark.nightly

PROGRAM = Path(__file__).parent / "programs/readme_commands.py"
TASK = "wmt_t2t_ende_v003"
MTF_STEP = 1000000

COMMANDS = {
    "train": r"""
        python3 ${T5X_DIR}/t5x/train.py \
          --gin_file="t5x/examples/t5/t5_1_1/examples/base_wmt_from_scratch.gin" \
          --gin.MODEL_DIR=\"${MODEL_DIR}\" \
          --tfds_data_dir=${TFDS_DATA_DIR}""",
    "fine_tune": r"""
        python3 ${T5X_DIR}/t5x/train.py \
          --gin_file="t5x/examples/t5/t5_1_1/examples/base_wmt_finetune.gin" \
          --gin.MODEL_DIR=\"${MODEL_DIR}\" \
          --tfds_data_dir=${TFDS_DATA_DIR} \
          --gin.partitioning.PjitPartitioner.num_partitions=8""",
    "eval": r"""
        python3 ${T5X_DIR}/t5x/eval.py \
          --gin_file="t5x/examples/t5/t5_1_1/examples/base_wmt_eval.gin" \
          --gin.CHECKPOINT_PATH=\"${CHECKPOINT_PATH}\" \
          --gin.EVAL_OUTPUT_DIR=\"${EVAL_OUTPUT_DIR}\" \
          --tfds_data_dir=${TFDS_DATA_DIR}""",
    "infer": r"""
        python3 ${T5X_DIR}/t5x/infer.py \
          --gin_file="t5x/examples/t5/t5_1_1/examples/base_wmt_infer.gin" \
          --gin.CHECKPOINT_PATH=\"${CHECKPOINT_PATH}\" \
          --gin.INFER_OUTPUT_DIR=\"${INFER_OUTPUT_DIR}\" \
          --tfds_data_dir=${TFDS_DATA_DIR}""",
    "export": r"""
        python3 ${T5X_DIR}/t5x/export.py \
          --gin_file=t5x/examples/t5/t5_1_1/base.gin \
          --gin_file=t5x/configs/runs/export.gin \
          --gin.TASK_FEATURE_LENGTHS="{'inputs': 32, 'targets': 16}" \
          --gin.CHECKPOINT_PATH=\"${CHECKPOINT_PATH}\" \
          --gin.MODEL_NAME=\"/ml/${USER}/t5x_base\" \
          --gin.MODEL_OUTPUT_DIR=\"${OUTPUT}\" \
          --gin.BEAM_SIZE=${BEAM_SIZE} \
          --gin.BATCH_SIZE=${BATCH_SIZE} \
          --gin.export_lib.save.partitioner=None \
          --gin.export_lib.save.warmup_examples="['hello world']" \
          --gin.export_lib.ExportableModule.use_batch_function=False \
          --gin.export_lib.ExportableModule.use_gpu=False \
          --gin.export_lib.ExportableModule.jit_compile=False \
          --gin.ACTIVATION_DTYPE=\"${ACTIVATION_DTYPE}\" \
          --gin.network.T5Config.dtype=\"${ACTIVATION_DTYPE}\" \
          --gin.utils.RestoreCheckpointConfig.dtype=\"${ACTIVATION_DTYPE}\" \
          --gin.DROPOUT_RATE=0.0""",
    "mesh_tensorflow_start": r"""
        python3 ${T5X_DIR}/t5x/train.py \
          --gin_file="t5x/examples/t5/t5_1_1/examples/base_wmt19_ende_train.gin" \
          --gin.MODEL_DIR=\"${MODEL_DIR}\" \
          --gin.MIXTURE_OR_TASK_NAME=\"wmt_t2t_ende_v003\" \
          --gin.INIT_CHECKPOINT=\"gs://t5-data/pretrained_models/t5.1.1.base/model.ckpt-1000000\" \
          --tfds_data_dir=${TFDS_DATA_DIR}""",
    "convert": r"""
        python3 ${T5X_DIR}/t5x/scripts/convert_tf_checkpoint.py \
          --gin_file="t5x/examples/t5/t5_1_1/base.gin" \
          --gin.convert_checkpoint.model=%MODEL \
          --gin.convert_checkpoint.tf_checkpoint_path=\"${TF_CHECKPOINT_PATH}\" \
          --gin.convert_checkpoint.output_dir=\"${MODEL_DIR}\"""",
    "custom_dataset": r"""
        python3 ${T5X_DIR}/t5x/train.py \
          --gin_search_paths=${PROJECT_DIR} \
          --gin_file="t5_1_1_base_de_en.gin" \
          --gin.MODEL_DIR=\"${MODEL_DIR}\" \
          --tfds_data_dir=${TFDS_DATA_DIR}""",
}

SIZES = [
    "--gin.network.T5Config.emb_dim=16", "--gin.network.T5Config.num_heads=8", "--gin.network.T5Config.head_dim=2",
    "--gin.network.T5Config.mlp_dim=16", "--gin.network.T5Config.num_encoder_layers=1",
    "--gin.network.T5Config.num_decoder_layers=1", "--gin.network.T5Config.vocab_size=256",
    "--gin.network.T5Config.dtype='float32'",
]  # fmt: skip
LENGTHS = "--gin.TASK_FEATURE_LENGTHS={'inputs': 32, 'targets': 16}"
TRAINING_SIZES = [
    LENGTHS, "--gin.BATCH_SIZE=8", "--gin.train.eval_steps=1", "--gin.train.eval_period=2",
]  # fmt: skip
MORE = {
    "train": [*SIZES, *TRAINING_SIZES, "--gin.TRAIN_STEPS=2"],
    "fine_tune": [*SIZES, *TRAINING_SIZES, "--gin.TRAIN_STEPS=4", "--gin.infer_eval/utils.DatasetConfig.batch_size=8"],
    "eval": [*SIZES, "--gin.utils.DatasetConfig.batch_size=8"],
    "infer": [*SIZES, "--gin.utils.DatasetConfig.batch_size=8", LENGTHS],
    "export": SIZES[:-1],  # the command has its own dtype
    "mesh_tensorflow_start": [
        *SIZES, LENGTHS, "--gin.BATCH_SIZE=8", "--gin.TRAIN_STEPS=1", "--gin.train.train_eval_dataset_cfg=None",
        "--gin.train.infer_eval_dataset_cfg=None",
    ],
    "convert": [*SIZES, "--gin.DROPOUT_RATE=0.0"],
    "custom_dataset": [*SIZES, *TRAINING_SIZES, "--gin.TRAIN_STEPS=2"],
}  # fmt: skip

# README, "Example: custom dataset in a user directory".
CUSTOM_TASKS = """\
import functools
import seqio
import tensorflow_datasets as tfds
from t5.evaluation import metrics
from t5.data import preprocessors

vocabulary = seqio.SentencePieceVocabulary(
    'gs://t5-data/vocabs/cc_all.32000/sentencepiece.model', extra_ids=100)
output_features = {
    'inputs': seqio.Feature(vocabulary=vocabulary),
    'targets': seqio.Feature(vocabulary=vocabulary)
}

seqio.TaskRegistry.add(
    'wmt_t2t_de_en_v003',
    source=seqio.TfdsDataSource(tfds_name='wmt_t2t_translate/de-en:1.0.0'),
    preprocessors=[
        functools.partial(
            preprocessors.translate,
            source_language='de', target_language='en'),
        seqio.preprocessors.tokenize,
        seqio.CacheDatasetPlaceholder(),
        seqio.preprocessors.append_eos_after_trim,
    ],
    metric_fns=[metrics.bleu],
    output_features=output_features)
"""
CUSTOM_GIN = """\
from __gin__ import dynamic_registration
import tasks  # This imports the task defined in dir1/user_dir/tasks.py.

include "t5x/examples/t5/t5_1_1/examples/base_wmt_from_scratch.gin"
MIXTURE_OR_TASK_NAME = "wmt_t2t_de_en_v003"
"""

# Files and bindings of the run whose operative configuration gin writes.
OPERATIVE = (
    ["t5x/examples/t5/t5_1_1/small.gin", "t5x/configs/runs/finetune.gin"],
    [
        "MODEL_DIR = '/run'", "MIXTURE_OR_TASK_NAME = 'my_task'", "TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 8}",
        "TRAIN_STEPS = 1_000_010", "INITIAL_CHECKPOINT_PATH = '/checkpoint_1000000'", "DROPOUT_RATE = 0.25",
        "adafactor.Adafactor.decay_rate = 0.7",
    ],
)  # fmt: skip


def translations() -> dict[str, list[tuple[str, str]]]:
    numbers = {"one": "eins", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs"}
    qualities = {"good": "gut", "bad": "schlecht", "red": "rot", "old": "alt"}
    pairs = [
        (f"Number {number} is {quality}.", f"Nummer {zahl} ist {wie}.")
        for number, zahl in numbers.items()
        for quality, wie in qualities.items()
    ]
    return {"train": pairs[:16], "validation": pairs[16:20], "test": pairs[20:]}


def write_vocabularies(mirror: Path) -> None:
    """Write T5's vocabulary, small, as its two public files: without the extra ids and with them."""
    content = io.BytesIO()
    texts = [text for pairs in translations().values() for pair in pairs for text in pair]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*texts, "translate English to German: German to English"]), model_writer=content,
        vocab_size=90, hard_vocab_limit=False, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece_model_pb2.ModelProto.FromString(content.getvalue())
    for name in ("cc_all.32000", "cc_all.32000.100extra"):
        path = mirror / "vocabs" / name / "sentencepiece.model"
        path.parent.mkdir(parents=True)
        path.write_bytes(model.SerializeToString())
        for i in range(99, -1, -1):
            model.pieces.add(piece=f"\u2581<extra_id_{i}>", score=0.0, type=model.SentencePiece.USER_DEFINED)


def mesh_tensorflow_variables() -> dict[str, np.ndarray]:
    """Return the variables of a T5 1.1 with one layer in each tower and the sizes above, named by Mesh TensorFlow."""
    rng = np.random.default_rng(0)
    shapes = {"shared/embedding": (256, 16), "decoder/logits/kernel": (16, 256)}
    attention = {"q": (16, 16), "k": (16, 16), "v": (16, 16), "o": (16, 16)}
    layers = {"encoder": ["SelfAttention"], "decoder": ["SelfAttention", "EncDecAttention"]}
    for tower, blocks in layers.items():
        shapes[f"{tower}/final_layer_norm/scale"] = (16,)
        for number, block in enumerate(blocks):
            at = f"{tower}/block_000/layer_{number:03}"
            shapes |= {f"{at}/{block}/{name}": shape for name, shape in attention.items()}
            shapes[f"{at}/layer_norm/scale"] = (16,)
        shapes[f"{tower}/block_000/layer_000/SelfAttention/relative_attention_bias"] = (8, 32)
        at = f"{tower}/block_000/layer_{len(blocks):03}"
        shapes |= {f"{at}/DenseReluDense/{name}/kernel": (16, 16) for name in ("wi_0", "wi_1", "wo")}
        shapes[f"{at}/layer_norm/scale"] = (16,)
    return {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def home(request, tmp_path_factory) -> Path:
    """A directory in which the commands of the selected tests were run, after `train`.

    `results.json` has their exit codes, `output.txt` their messages.
    """
    selected = {item.originalname.removeprefix("test_") for item in request.session.items if item.path == request.path}
    home = tmp_path_factory.mktemp("readme")
    mirror, project = home / "mirror", home / "dir1/user_dir"
    write_vocabularies(mirror)
    np.savez(home / "variables.npz", global_step=np.int64(MTF_STEP), **mesh_tensorflow_variables())
    project.mkdir(parents=True)
    (project / "tasks.py").write_text(CUSTOM_TASKS)
    (project / "t5_1_1_base_de_en.gin").write_text(CUSTOM_GIN)
    places = {
        "T5X_DIR": str(REPO), "TFDS_DATA_DIR": str(home / "tfds"), "PROJECT_DIR": str(project),
        "CHECKPOINT_PATH": str(home / "train/checkpoint_2"), "EVAL_OUTPUT_DIR": str(home / "eval"),
        "INFER_OUTPUT_DIR": str(home / "infer"), "OUTPUT": str(home / "saved_model.t5x_base_float32/20261117"),
        # The README's dtype on GPUs before the A100. In bfloat16, an untrained model has ties that rounding breaks.
        "USER": "me", "BATCH_SIZE": "None", "BEAM_SIZE": "1", "ACTIVATION_DTYPE": "float32",
        "TF_CHECKPOINT_PATH": f"gs://t5-data/pretrained_models/t5.1.1.base/model.ckpt-{MTF_STEP}",
    }  # fmt: skip
    commands = []
    for name, command in COMMANDS.items():
        if name not in selected | {"train"}:
            continue
        command = command.replace("\\\n", "")  # shlex does not join lines
        words = string.Template(command).substitute(places, MODEL_DIR=str(home / name))
        variables = {"PYTHONPATH": str(project)} if name == "custom_dataset" else {}
        commands.append([name, [*shlex.split(words), *MORE[name]], variables])
    job = {
        "tfds_data_dir": places["TFDS_DATA_DIR"],
        "translations": translations(),
        "mesh_tensorflow": [
            str(home / "variables.npz"), str(mirror / f"pretrained_models/t5.1.1.base/model.ckpt-{MTF_STEP}"),
        ],
        "gin": [str(REPO), *OPERATIVE, str(home / "operative.gin")],
        "commands": commands,
    }  # fmt: skip
    (home / "job.json").write_text(json.dumps(job))
    # The public checkpoint is the one that the first command makes.
    public = f"gs://t5-data/pretrained_models/t5x/t5_1_1_base/checkpoint_1000000={home / 'train/checkpoint_2'}"
    settings = {
        "T5X_MIRROR": f"gs://t5-data={mirror},{public}", "T5X_CACHE_DIR": str(home / "cache"),
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
    }  # fmt: skip
    done = run_reference(PROGRAM, home / "job.json", home / "results.json", cwd=home, env=settings)
    (home / "output.txt").write_text(done.stdout + done.stderr)
    assert (home / "results.json").exists(), (home / "output.txt").read_text()[-5000:]
    return home


def succeeded(home: Path, name: str) -> Path:
    """Assert that a command ended well; return its MODEL_DIR."""
    output = (home / "output.txt").read_text()
    assert json.loads((home / "results.json").read_text())[name] == 0, output[-6000:]
    return home / name


def params(checkpoint: Path) -> dict[str, np.ndarray]:
    source = open_checkpoint(checkpoint)
    return {name: np.asarray(array.read()) for name, array in source.arrays.items() if name.startswith("target/")}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def arguments_of_train(files: list[str], bindings: Sequence[str] = ()) -> dict[str, Any]:
    """Return what `train` would be called with."""
    found = {}

    @functools.wraps(train)
    def recorded(**arguments):
        found.update(arguments)

    configuration.clear()
    try:
        configuration.parse(gin_files=files, bindings=bindings, search_paths=[], entry_points={"train": recorded})
        configuration.check(recorded)
        configuration.configured(recorded)()
    finally:
        configuration.clear()
    return found


def test_an_operative_configuration_rebuilds_the_run(home):
    text = (home / "operative.gin").read_text()
    assert "# Parameters for" in text and "import __main__ as" in text
    expected, found = arguments_of_train(*OPERATIVE), arguments_of_train([str(home / "operative.gin")])
    assert found["model"].module == expected["model"].module
    assert found["model"].module.config.dropout_rate == 0.25
    optimizers = [vars(arguments["model"].optimizer_def) for arguments in (found, expected)]
    assert optimizers[0] == optimizers[1]
    assert found["model"].optimizer_def.decay_rate == 0.7
    data = ("train_dataset_cfg", "train_eval_dataset_cfg", "infer_eval_dataset_cfg")
    for name in (*data, "total_steps", "eval_period"):
        assert found[name] == expected[name], name
    assert found["checkpoint_cfg"].save == expected["checkpoint_cfg"].save
    assert found["checkpoint_cfg"].restore.path == expected["checkpoint_cfg"].restore.path


def test_train(home):
    run = succeeded(home, "train")
    assert open_checkpoint(run / "checkpoint_2").step == 2
    assert "wmt_t2t_ende_v003" in (run / "config.gin").read_text()
    assert "Total number of parameters" in (run / "model-info.txt").read_text()
    assert list((run / "train").glob("events.out.tfevents.*"))
    assert {"bleu"} <= lines(run / f"inference_eval/{TASK}-metrics.jsonl")[-1].keys()
    examples = lines(run / f"inference_eval/{TASK}-000002.jsonl")
    assert [example["target"] for example in examples] == [german for _, german in translations()["validation"]]


def test_fine_tune(home):
    """From the public checkpoint, on another mesh."""
    run = succeeded(home, "fine_tune")
    assert open_checkpoint(run / "checkpoint_4").step == 4
    before, after = params(home / "train/checkpoint_2"), params(run / "checkpoint_4")
    assert before.keys() == after.keys()
    name = "target/token_embedder/embedding"
    assert 0 < np.abs(before[name] - after[name]).max() < 0.1
    assert "model 8" in (home / "output.txt").read_text()


def test_eval(home):
    succeeded(home, "eval")
    assert {"bleu"} <= lines(home / f"eval/inference_eval/{TASK}-metrics.jsonl")[-1].keys()
    (file,) = (home / "eval/inference_eval").glob(f"{TASK}-0*.jsonl")
    assert [example["target"] for example in lines(file)] == [german for _, german in translations()["test"]]


def test_infer(home):
    succeeded(home, "infer")
    found = lines(home / f"infer/{TASK}-predict.jsonl-00000-of-00001")
    assert [line["inputs"]["inputs_pretokenized"] for line in found] == [
        f"translate English to German: {english}" for english, _ in translations()["test"]
    ]
    assert all(isinstance(line["prediction"], str) for line in found)
    assert (home / f"infer/{TASK}-predict.jsonl-00000-of-00001.COMPLETED").exists()


def test_export(home):
    succeeded(home, "export")
    directory = home / "saved_model.t5x_base_float32_cpu/20261117"
    assert (directory / "saved_model.pb").exists()
    assert (directory / "assets.extra/tf_serving_warmup_requests").exists()


def test_mesh_tensorflow_start(home):
    run = succeeded(home, "mesh_tensorflow_start")
    after = params(run / f"checkpoint_{MTF_STEP + 1}")
    start = mesh_tensorflow_variables()
    for name, theirs in {
        "token_embedder/embedding": "shared/embedding",
        "encoder/layers_0/attention/query/kernel": "encoder/block_000/layer_000/SelfAttention/q",
        "decoder/layers_0/mlp/wo/kernel": "decoder/block_000/layer_002/DenseReluDense/wo/kernel",
    }.items():
        np.testing.assert_allclose(after[f"target/{name}"], start[theirs], atol=0.05)


def test_convert(home):
    directory = succeeded(home, "convert")
    source = open_checkpoint(directory / f"checkpoint_{MTF_STEP}")
    assert source.step == MTF_STEP and "T5X" in source.format
    found, start = params(directory / f"checkpoint_{MTF_STEP}"), mesh_tensorflow_variables()
    assert len(found) == len(start)
    np.testing.assert_array_equal(found["target/decoder/logits_dense/kernel"], start["decoder/logits/kernel"])


def test_custom_dataset(home):
    if not json.loads((home / "results.json").read_text())["t5"]:
        pytest.skip("t5.evaluation needs packages that are not installed: see docs/seqio.md")
    run = succeeded(home, "custom_dataset")
    assert open_checkpoint(run / "checkpoint_2").step == 2
    examples = lines(run / "inference_eval/wmt_t2t_de_en_v003-000002.jsonl")
    assert [example["target"] for example in examples] == [english for english, _ in translations()["validation"]]
