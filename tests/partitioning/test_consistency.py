"""Processes that were not started alike are refused before anything is computed."""

import functools
import json
import shutil
import subprocess
from pathlib import Path

import flax
import pytest

import t5x
from t5x import configuration
from t5x.cli.main import VERBS
from t5x.cli.parser import parser_of
from t5x.partitioning import consistency
from tests.inference.models import byte_model
from tests.partitioning.test_distributed import assert_one_line, begin, finish
from tests.support.paths import REPO
from tests.support.programs import SMALL, environment, free_port, start_python

GIN = ["--gin_file=t5x/examples/demo/dates.gin", *SMALL, "--gin.MODEL_DIR='runs/x'"]


def test_the_message_shows_what_differs():
    """Cases one after the other in one pair of processes; each leaves them in step for the next."""
    for process in finish(begin("compare", 2)):
        assert process.returncode == 0, process.stderr
        told = json.loads(process.stdout)
        assert told["same"] is None
        assert "  steps: process 0 has 10 / process 1 has 11\n" in told["value"] and "rate" not in told["value"]
        assert "  new: process 0 has nothing / process 1 has 1\n" in told["missing"]
        assert told["many"].count(" / process 1 has ") == 20 and "and 10 more" in told["many"]
        assert "0 and so on / process 1" in told["long"] and "1 and so on\n" in told["long"] and len(told["long"]) < 700
        assert told["afterwards"] is None


# --- What is compared -------------------------------------------------------------------------------------------------


def describe(verb: str, *argv: str) -> dict[str, str]:
    parser = parser_of(verb)
    words, bindings = configuration.split_gin_args(argv)
    args = parser.parse_args(words)
    args.verb = verb
    configuration.clear()
    try:
        if getattr(args, "gin_file", None):
            from t5x.runs.train import train

            configuration.parse(
                gin_files=args.gin_file, bindings=[*args.gin_bindings, *bindings], search_paths=["."],
                entry_points={"train": train},
            )  # fmt: skip
        return consistency.describe_command(args)
    finally:
        configuration.clear()


def differences(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in one | other if one.get(name) != other.get(name)}


@functools.cache
def without_changes() -> dict[str, str]:
    return describe("train", *GIN)


@pytest.fixture
def here(monkeypatch):
    monkeypatch.chdir(REPO)


@pytest.mark.parametrize(
    "binding",
    [
        "TRAIN_STEPS=501", "RANDOM_SEED=1", "BATCH_SIZE=16", "DROPOUT_RATE=0.2", "MODEL_DIR='runs/y'",
        "MIXTURE_OR_TASK_NAME='other'", "network.T5Config.emb_dim=32", "network.T5Config.dtype='bfloat16'",
        "train.eval_period=3", "train/utils.DatasetConfig.pack=True", "train/utils.DatasetConfig.num_workers=2",
        "utils.SaveCheckpointConfig.period=7", "trainer.Trainer.num_microbatches=2",
        "utils.create_learning_rate_scheduler.base_learning_rate=0.5",
        "utils.create_learning_rate_scheduler.warmup_steps=201", "partitioning.PjitPartitioner.num_partitions=2",
        "TASK_FEATURE_LENGTHS={'inputs': 41, 'targets': 12}", "train.gc_period=9",
    ],
)  # fmt: skip
def test_every_binding_counts(here, binding):
    name = binding.partition("=")[0]
    (found,) = differences(without_changes(), describe("train", *GIN, f"--gin.{binding}"))
    assert found in (name, f"train_script.{name}")


@pytest.mark.parametrize(
    ("verb", "given", "more"),
    [
        ("train", ["--data=a", "--model_dir=m", "--size=small", "--steps=10"], ["--steps=11"]),
        ("train", ["--data=a", "--model_dir=m", "--size=small", "--steps=10"], ["--learning_rate=0.1"]),
        ("train", ["--data=a", "--model_dir=m", "--size=small", "--steps=10"], ["--skip_bad_examples"]),
        ("eval", ["--model=m", "--data=a"], ["--beams=2"]),
        ("eval", ["--model=m", "--data=a"], ["--model=other"]),
        ("infer", ["--model=m", "--input=a", "--output=b"], ["--output=c"]),
        ("infer", ["--model=m", "--input=a"], ["--temperature=0.5"]),
        ("rerank", ["--model=m", "--input=a"], ["--max_length=100"]),
        ("answer", ["--model=m", "--input=a"], ["--no_answer=none"]),
    ],
)
def test_every_option_counts(verb, given, more):
    (option,) = more
    assert differences(describe(verb, *given), describe(verb, *given, *more)) == {option.partition("=")[0]}


def test_the_verb_counts():
    assert "verb" in differences(describe("infer", "--model=m", "--input=a"), describe("answer", "--model=m"))
    assert {"train", "eval", "infer", "rerank", "answer"} <= set(VERBS)


@pytest.mark.parametrize("size", [3, 20_000_000])
def test_the_content_of_an_input_file_counts(tmp_path, size):
    file = tmp_path / "in.txt"
    found = []
    for letter in (b"a", b"b", b"a"):
        file.write_bytes(letter * size)
        found.append(describe("infer", "--model=m", f"--input={file}"))
    assert differences(found[0], found[1]) == {"--input"}
    assert found[0] == found[2]


def test_settings_of_one_process_are_not_compared(here, tmp_path, monkeypatch):
    shutil.copy(REPO / "t5x/examples/demo/dates.gin", tmp_path / "copy.gin")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/a --xla_force_host_platform_device_count=2")
    one = describe("train", *GIN, "--process_index=0", "--coordinator_address=a:1", "--initialization_timeout=3")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.setenv("T5X_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    other = describe(
        "train", f"--gin_file={tmp_path}/copy.gin", *GIN[1:], "--process_index=1", "--debug", "--tfds_data_dir=/x"
    )
    assert differences(one, other) == set()


# --- Verbs of two processes -------------------------------------------------------------------------------------------


def refused(directories: list[Path], command: list[str], more: list[str], *names: str, **env: str) -> None:
    """Both processes of a run end with one message that has the names; the second has more arguments and variables."""
    port = free_port()
    started = []
    for index, (directory, words, variables) in enumerate(zip(directories, ([], more), ({}, env), strict=True)):
        several = [f"--coordinator_address=127.0.0.1:{port}", "--process_count=2", f"--process_index={index}"]
        started.append(
            start_python(
                "-m", "t5x", *command, *words, *several, cwd=directory,
                env=environment(PYTHONFAULTHANDLER="1") | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True,
            )
        )  # fmt: skip
    for done in finish(started):
        assert done.returncode == 2, done.stdout + done.stderr
        assert_one_line(done, "differ in their ", *names)
        assert done.stderr.count(" / process 1 has ") == len(names), done.stderr


def pair(tmp_path: Path) -> list[Path]:
    """Two directories in which a relative path means different files, as on two machines."""
    directories = [tmp_path / "0", tmp_path / "1"]
    for directory in directories:
        directory.mkdir()
    return directories


@pytest.mark.parametrize(
    ("command", "more", "name"),
    [
        (["train", *GIN], ["--gin.utils.create_learning_rate_scheduler.base_learning_rate=0.5"], "base_learning_rate"),
        pytest.param(
            ["train", "--data=a.jsonl", "--size=small", "--family=byt5", "--model_dir=m", "--steps=3"], ["--steps=4"],
            "--steps: process 0 has 3 / process 1 has 4", marks=pytest.mark.slow),
        pytest.param(["eval", "--model=m", "--data=a.jsonl"], ["--metric=bleu"], "--metric", marks=pytest.mark.slow),
        pytest.param(["infer", "--model=m", "--input=a.jsonl"], ["--beams=2"], "--beams", marks=pytest.mark.slow),
        pytest.param(["rerank", "--model=m", "--input=a.jsonl"], ["--top=3"], "--top", marks=pytest.mark.slow),
    ],
    ids=["train with gin", "train from a file", "eval", "infer", "rerank"],
)  # fmt: skip
def test_another_configuration_is_refused(tmp_path, command, more, name):
    directory = REPO if command[1:] == GIN else tmp_path
    (tmp_path / "a.jsonl").write_text('{"inputs": "a", "targets": "b"}\n')
    refused([directory] * 2, command, more, name)


@pytest.mark.slow
def test_other_software_is_refused(tmp_path):
    directories = pair(tmp_path)
    for number, directory in enumerate(directories):
        (directory / "module.py").write_text(f"number = {number}\n")
        (directory / "in.txt").write_text(f"{number}\n")
    path = tmp_path / "path"
    shutil.copytree(Path(t5x.__file__).parent, path / "t5x", ignore=shutil.ignore_patterns("__pycache__"))
    (path / "t5x/losses.py").open("a").write("# changed\n")
    (path / "flax-9.9.dist-info").mkdir()
    (path / "flax-9.9.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: flax\nVersion: 9.9\n")
    refused(
        directories, ["infer", "--model=m", "--input=in.txt", "--import=module"], [],
        "  t5x: ", f"  flax: process 0 has {flax.__version__} / process 1 has 9.9", "  code of module: ", "  --input: ",
        "  jax_default_matmul_precision: ",
        PYTHONPATH=str(path), JAX_DEFAULT_MATMUL_PRECISION="highest",
    )  # fmt: skip


TASKS = """
import json
from t5x import data
features = {name: data.Feature(data.ByteVocabulary()) for name in ("inputs", "targets")}
data.TaskRegistry.add(
    "pairs", data.JsonLinesDataSource({"train": "/proc/self/cwd/a.jsonl"}), output_features=features,
    preprocessors=[data.preprocessors.tokenize, data.preprocessors.append_eos],
)
"""


def train_on_files(tmp_path: Path, *contents: str) -> tuple[list[Path], list[str]]:
    """The directories and the command of processes that train on files of the same name."""
    directories = pair(tmp_path)
    for directory, content in zip(directories, contents, strict=True):
        (directory / "tasks.py").write_text(TASKS)
        (directory / "a.jsonl").write_text(content)
    command = [
        "train", *GIN, "--gin.MIXTURE_OR_TASK_NAME='pairs'", f"--gin.MODEL_DIR='{tmp_path}/m'", "--import=tasks.py",
        "--gin.seqio.ByteVocabulary.extra_ids=0",
    ]  # fmt: skip
    return directories, command


def test_other_data_is_refused(tmp_path):
    directories, command = train_on_files(
        tmp_path, *(f'{{"inputs": "{number}", "targets": "b"}}\n' for number in range(2))
    )
    refused(directories, command, [], "split train of pairs: ")


def test_a_changed_line_that_is_not_sampled_is_refused(tmp_path):
    lines = [json.dumps({"inputs": str(number), "targets": "b"}) + "\n" for number in range(1000)]
    others = [*lines[:501], lines[501].replace("501", "999"), *lines[502:]]  # examples 500 and 503 are sampled
    directories, command = train_on_files(tmp_path, "".join(lines), "".join(others))
    content = f"content of a.jsonl, file 1 of pairs: process 0 has {len(''.join(lines)):,} bytes with the hash "
    refused(directories, command, [], content)
    assert not list((tmp_path / "m").glob("checkpoint_*"))


def test_another_checkpoint_is_refused(tmp_path):
    directories = pair(tmp_path)
    for number, directory in enumerate(directories):
        byte_model(directory / "model", seed=number)
        (directory / "in.txt").write_text("a\n")
    refused(directories, ["infer", "--model=/proc/self/cwd/model", "--input=in.txt"], [], "/proc/self/cwd/model: ")
