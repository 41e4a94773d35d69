"""What tests/saved/make.py has written with an earlier version, and the commands that wrote it."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import t5x
from t5x import checkpoints, data
from t5x.data.dataset_config import import_task_module
from tests.cli.test_file_training import fresh
from tests.support.paths import REPO
from tests.support.programs import run_reference

FILES = Path(__file__).parent / "files"
PLACE = "/tmp/t5x-saved"  # where make.py has written them: config.gin and job.json have absolute paths
HALF, STEPS = 4, 8
RUNS = ("mixture", "pairs", "ranker")
JOBS = ("infer", "rerank", "answer")
CHECKPOINTS = ("mixture", "pairs", "ranker", "model", "exports/hf")
EXPORTS = ("stablehlo", "hf")
INPUTS = ["abc", "hgfed cba", "aaaa bbbb"]
_NETWORK = [
    "network.T5Config.num_heads = 2", "network.T5Config.head_dim = 4", "network.T5Config.num_encoder_layers = 1",
    "network.T5Config.num_decoder_layers = 1", "network.T5Config.dropout_rate = 0.1", "train.stats_period = 3",
    "train.random_seed = 5", "train/utils.DatasetConfig.num_workers = 0",
]  # fmt: skip


def train_arguments(run: str, place: Path) -> list[str]:
    """Arguments of `t5x train` for one of RUNS, whose files are in `place`."""
    if run == "pairs":
        options = {
            "data": place / "inputs/train.jsonl", "valid": place / "inputs/valid.jsonl", "inputs": "q", "targets": "a",
            "prefix": "add: ", "model_dir": place / run, "size": "tiny", "family": "byt5", "steps": STEPS,
            "batch_size": 4, "max_input_length": 12, "max_target_length": 6, "metric": "accuracy",
            "eval_every": HALF, "save_every": HALF, "dtype": "float32",
        }  # fmt: skip
        return [f"--{name}={value}" for name, value in options.items()] + [f"--gin_bindings={b}" for b in _NETWORK]
    more = {
        "mixture": [f"--gin.MIXTURE_OR_TASK_MODULE={str(place / 'inputs/saved_tasks.py')!r}"],
        "ranker": [f"--gin.JUDGED={str(place / 'inputs/judged.jsonl')!r}"],
    }
    return [f"--gin_file=tests/saved/{run}.gin", f"--gin.MODEL_DIR={str(place / run)!r}", *more[run]]


def job_arguments(verb: str, place: Path) -> list[str]:
    """Arguments of one of JOBS: six inputs in chunks of two."""
    own = {
        "infer": ["--model=model", "--input=inputs/texts.txt", "--temperature=1.2", "--seed=7", "--output_ids"],
        "answer": ["--model=model", "--input=inputs/questions.jsonl", "--max_input_length=40", "--stride=1"],
        "rerank": [f"--model=ranker/checkpoint_{HALF}", "--input=inputs/passages.tsv", "--format=jsonl"],
    }[verb]
    own = [word.replace("=model", f"={place}/model").replace("=ranker", f"={place}/ranker") for word in own]
    own = [word.replace("=inputs", f"={place}/inputs") for word in own]
    length = [] if verb == "rerank" else ["--max_length=6"]
    return [*own, *length, f"--output={place}/jobs/{verb}.jsonl", "--batch_size=2", "--checkpoint_period=1"]


def export(name: str, place: Path) -> None:
    """Write one of EXPORTS, where what writes it is installed."""
    (place / "exports").mkdir(exist_ok=True)
    options = [f"--format={name}", "--max_length=6", "--max_input_length=12", "--platforms=cpu"]
    done = run_reference("-m", "t5x", "export", place / "model", place / "exports" / name, *options)
    assert done.returncode == 0, done.stderr


def copy_to(place: Path, *names: str) -> None:
    """Copy directories of FILES to `place`, and put this path where files beside checkpoints have PLACE.

    The files in a checkpoint stay as they are: its manifest has their hashes.
    """
    for name in names:
        shutil.copytree(FILES / name, place / name)
    if "inputs" in names:
        shutil.copy(FILES.parent / "saved_tasks.py", place / "inputs")
    for path in [*place.glob("*/config.gin"), *place.glob("jobs/tmp-*/job.json")]:
        path.write_text(path.read_text().replace(PLACE, str(place)))


# --- What runs come to ------------------------------------------------------------------------------------------------


def arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint by their path."""
    leaves = jax.tree_util.tree_leaves_with_path(checkpoints.restore(str(checkpoint)))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def metrics(model_dir: Path) -> dict[str, list[Any]]:
    """The lines of metrics and predictions by their file, without times."""
    return {
        str(path.relative_to(model_dir)): [_without_times(json.loads(line)) for line in path.read_text().splitlines()]
        for path in sorted(model_dir.rglob("*.jsonl"))
    }


def _without_times(record: Any) -> Any:
    is_metrics = isinstance(record, dict)
    return {name: value for name, value in record.items() if not name.startswith("timing/")} if is_metrics else record


def records(lines: str) -> list[Any]:
    return [json.loads(line) for line in lines.splitlines()]


def contents(directory: Path) -> dict[str, bytes]:
    """The files below a directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def described(printed: str) -> dict[str, Any]:
    """What `t5x inspect --json` has printed, except what later versions may add."""
    names = ("format", "step", "model", "num_params", "optimizer_state", "vocabularies", "params_sha256")
    report = json.loads(printed)
    return {name: report[name] for name in names}


def batches(place: Path) -> list[Any]:
    """The first training batches of the cached task."""
    with fresh():
        sys.modules.pop("saved_tasks", None)
        import_task_module(str(place / "inputs/saved_tasks.py"))
        lengths = {"inputs": 12, "targets": 6}
        cfg = data.DatasetConfig("saved_sums", lengths, "train", 4, shuffle=True, seed=3, num_workers=0)
        with data.train_loader(cfg, feature_converter=data.EncDecFeatureConverter()) as loader:
            return [{name: array.tolist() for name, array in next(loader).items()} for _ in range(3)]


def generated(model_dir: Path) -> list[Any]:
    """What the model generates with beams: texts, scores and tokens."""
    return [list(each[:3]) for each in t5x.load(str(model_dir)).generate(INPUTS, beams=3, max_length=6)]


def ranked(model_dir: Path) -> list[Any]:
    """The order of passages and their scores."""
    passages = ["bx0", "co0", "dx1", "fo1"]
    return [[each.index, each.score] for each in t5x.load(str(model_dir)).rank("q0", passages)]


def stablehlo_outputs(directory: Path) -> list[Any]:
    """Outputs of the programs of an export, which jax runs alone where its serialization is installed."""
    description = json.loads((directory / "description.json").read_text())
    rng, calls = np.random.default_rng(0), []
    for name, program in sorted(description["programs"].items()):
        shapes = {
            key: [2 if isinstance(n, str) else n for n in each["shape"]] for key, each in program["inputs"].items()
        }
        calls.append([name, {key: rng.integers(3, 120, shape).tolist() for key, shape in shapes.items()}])
    program = REPO / "tests/apps/exporting/programs/run_stablehlo.py"
    done = run_reference(program, directory, input="".join(json.dumps(call) + "\n" for call in calls))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def software() -> dict[str, str]:
    """What floating-point numbers depend on: XLA generates code for the features of the processor."""
    try:
        lines = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(("flags", "Feat"))}
    except OSError:
        lines = set()
    features = {feature for line in lines for feature in line.partition(":")[2].split()}
    vectors = sorted(name for name in features if name.startswith(("avx", "fma", "sse", "amx", "asimd", "sve", "f16c")))
    flags = sorted(os.environ.get("XLA_FLAGS", "").split())
    return {"jax": jax.__version__, "processor": " ".join(vectors), "XLA_FLAGS": " ".join(flags)}


def expected() -> dict[str, Any]:
    return json.loads((FILES / "expected.json").read_text())


def assert_same(actual: Any, recorded: Any, where: str = "") -> None:
    """Assert that JSON values or arrays are equal; numbers only nearly, with another JAX or processor."""
    is_exact = software() == expected()["software"]
    if isinstance(recorded, dict):
        assert isinstance(actual, dict) and actual.keys() == recorded.keys(), where
        for name in recorded:
            assert_same(actual[name], recorded[name], f"{where}/{name}")
    elif isinstance(recorded, Sequence) and not isinstance(recorded, str):
        assert len(actual) == len(recorded), f"{where}: {actual}"
        for index, pair in enumerate(zip(actual, recorded, strict=True)):
            assert_same(*pair, f"{where}[{index}]")
    elif isinstance(recorded, np.ndarray):
        assert (actual.shape, actual.dtype) == (recorded.shape, recorded.dtype), where
        # Another processor or JAX rounds differently, so results are not bitwise the same there.
        tolerance = 0 if is_exact else 1e-5
        np.testing.assert_allclose(actual, recorded, rtol=tolerance, atol=tolerance, err_msg=where)
        assert not is_exact or actual.tobytes() == recorded.tobytes(), where
    elif isinstance(recorded, float) and not is_exact:
        assert actual == pytest.approx(recorded, rel=1e-5, abs=1e-5), where
    else:
        assert actual == recorded, where
