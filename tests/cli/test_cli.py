"""The command line as a newcomer meets it."""

import json
import logging
import os
import pkgutil
import signal
import subprocess
import sys
import time
import weakref

import jax
import pytest
import tqdm

import t5x as t5x_package
from t5x._runtime import startup
from t5x.cli import inspect_verb, main
from t5x.cli.verbs import GIN_ENTRY_POINTS, SCRIPTS, VERBS, import_verb
from tests.support.paths import REPO
from tests.support.programs import SMALL, environment, start_python, t5x, train

DATES = "--gin_file=t5x/examples/demo/dates.gin"


@pytest.mark.parametrize(
    "arguments", [["--help"], [], ["train", "--help"], ["eval", "--help"], ["infer", "--help"], ["demo", "--help"]]
)
def test_help_has_examples_and_needs_no_jax(arguments):
    script = (
        "import sys; from t5x.cli import main as cli\n"
        f"try: cli.main({arguments!r})\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert not {'jax', 'flax', 'numpy'} & set(sys.modules), 'slow imports'"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "t5x" in done.stdout and ("example" in done.stdout or "runs/demo" in done.stdout)


def test_help_needs_hardly_anything():
    script = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from t5x.cli import main as cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'argparse', 'logging', 't5x.configuration'} & set(sys.modules) - before, 'slow imports'"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_import_needs_no_jax():
    script = "import sys, t5x; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=REPO, check=True)


def test_every_name_in_the_verb_table_resolves():
    for verb in (*VERBS, *SCRIPTS):
        assert callable(import_verb(verb).define) and callable(import_verb(verb).run)
    for name, path in GIN_ENTRY_POINTS.items():
        assert pkgutil.resolve_name(path).__name__ == name


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit):
        main.main(["--version"])
    assert capsys.readouterr().out == f"t5x {t5x_package.__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize("program", [["-m", "t5x.train"], ["t5x/train.py"]])
def test_every_way_to_start_it(program, tmp_path):
    command = [sys.executable, *program, DATES, *SMALL, f"--gin.MODEL_DIR={tmp_path}", "--dry_run"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "import __main__ as train_script" in done.stdout and str(tmp_path) in done.stdout
    assert not list(tmp_path.iterdir()), "--dry_run must run nothing"


def test_dry_run_is_a_configuration_that_parses_again(run_here, tmp_path):
    first = run_here("train", DATES, *SMALL, '--gin.MODEL_DIR="/x"', "--gin.TRAIN_STEPS=7", "--dry_run")
    (tmp_path / "again.gin").write_text(first.out)
    second = run_here("train", f"--gin_file={tmp_path / 'again.gin'}", "--dry_run")
    assert second.code == 0, second.err
    assert "TRAIN_STEPS = 7" in second.out


NETWORK = [argument for argument in SMALL if "T5Config" in argument]
MISTAKES = {
    "a typo in a macro of a file that needs it": (["--gin.MODEL_DIRR=/x"], ["MODEL_DIR", "dates.gin:"]),
    "a parameter that does not exist": (
        ["--gin.MODEL_DIR=/x", "--gin.trainer.Trainer.num_microbatch=2"],
        ["num_microbatches"],
    ),
    "an unknown name": (["--gin.MODEL_DIR=/x", "--gin.utils.DatasetConfg.seed=1"], ["DatasetConfig"]),
    "a value of the wrong type": (["--gin.MODEL_DIR=/x", "--gin.TRAIN_STEPS=many"], ["total_steps", "int", "'many'"]),
    "a macro that nothing reads": (["--gin.MODEL_DIR=/x", "--gin.BATCH_SZIE=2", "--strict"], ["BATCH_SIZE"]),
    "a missing file": (["--gin_file=nowhere.gin"], ["nowhere.gin"]),
    "a space instead of =": (["--gin.MODEL_DIR", "/x"], ["--gin.MODEL_DIR"]),
    "an unknown scheme": (["--gin.MODEL_DIR=nosuch://bucket/run"], ["nosuch://bucket/run", "gs://"]),
    "a dtype that does not exist": (["--gin.MODEL_DIR={tmp}", "--gin.network.T5Config.dtype=bfloat61"], ["bfloat61"]),
    "no evaluation steps": (["--gin.MODEL_DIR={tmp}", "--gin.train.eval_steps=0"], ["eval_steps is 0"]),
    "an evaluation split that does not exist": (
        [*NETWORK, "--gin.MODEL_DIR={tmp}", '--gin.train_eval/utils.DatasetConfig.split="dev"'],
        ["dev", "validation"],
    ),
    "a wrong flag": (["--gin_flie=x"], ["--gin_flie"]),
    "an unknown task": (["--gin.MODEL_DIR={tmp}", "--gin.MIXTURE_OR_TASK_NAME=datse"], ["datse", "dates"]),
    "a batch the mesh does not divide": (
        ["--gin.MODEL_DIR={tmp}", "--gin.partitioning.PjitPartitioner.num_partitions=3"],
        ["num_partitions is 3", "1 devices"],
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_message_with_its_fix(mistake, run_here, tmp_path):
    arguments, expected = MISTAKES[mistake]
    run_here("train", DATES, *(a.format(tmp=tmp_path / "run") for a in arguments)).refused(*expected)


def test_without_strict_a_doubtful_binding_is_a_warning(run_here):
    done = run_here("train", DATES, *SMALL, "--gin.MODEL_DIR=/x", "--gin.BATCH_SZIE=2", "--dry_run")
    assert done.code == 0
    assert "--gin.BATCH_SZIE=2 has no effect" in done.err and "`BATCH_SIZE`" in done.err


def test_gin_is_refused_where_nothing_reads_it(run_here):
    run_here("rerank", "--model=x", "--input=y", "--gin.BATCH_SIZE=3").refused("t5x rerank", "--gin")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_is_reported(unbuffered, tmp_path):
    (tmp_path / "qrels").write_text("q 0 d 1\n")
    (tmp_path / "run").write_text("q Q0 d 1 9.5 x\n")
    command = [sys.executable, "-m", "t5x", "rank-eval", "--qrels=qrels", "run"]
    env = environment(PYTHONUNBUFFERED=unbuffered)
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, cwd=tmp_path, env=env, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: Standard output") and "No space left" in done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize(
    "error",
    [
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 31200040864 bytes.\nallocator: …"),
        MemoryError("Unable to allocate 31200040864 bytes"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_too_little_memory_is_one_message(error, run_here, monkeypatch):
    def run(args):
        raise error

    monkeypatch.setattr(inspect_verb, "run", run)
    run_here("inspect", "nowhere").refused("31200040864 bytes", "Lower the batch size")


def test_unknown_verb_names_the_nearest():
    done = t5x("trian", cwd=REPO)
    assert done.returncode == 2 and "`t5x train`" in done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tmp_path_factory.mktemp("model") / "run"


@pytest.fixture
def model_dir(trained, run_here):
    complete = trained.with_name("complete")
    if not complete.exists():
        done = run_here(*train(trained, 4, save_period=2))
        assert done.code == 0, done.err
        complete.touch()
    return trained


@pytest.mark.slow
def test_infer_from_the_directory_alone(model_dir, run_here, tmp_path, monkeypatch):
    (tmp_path / "in.txt").write_text("3 March 1997\nle 3 mars 1997\n\n")
    monkeypatch.chdir(tmp_path)
    done = run_here("infer", "--model", model_dir, "--input", "in.txt", "--output", "out.jsonl", "--max_length=12")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["inputs"] for line in lines] == ["3 March 1997", "le 3 mars 1997", ""]
    assert all(isinstance(line["prediction"], str) and line["score"] < 0 for line in lines)
    run_here("infer", "--model", model_dir, "--input", "in.txt", "--output", "out.jsonl").refused("--overwrite")
    # What greedy decoding found is what scoring gives it.
    pairs = "".join(json.dumps({"inputs": li["inputs"], "targets": li["prediction"]}) + "\n" for li in lines)
    scored = run_here("infer", "--model", model_dir, "--input", "-", "--mode=score", text=pairs)
    assert scored.code == 0, scored.err
    assert len([json.loads(line)["score"] for line in scored.out.splitlines()]) == 3


@pytest.mark.slow  # runs/test_eval.py
def test_eval_scores_every_checkpoint_once(model_dir, run_here, tmp_path):
    arguments = [
        "eval", "--gin_file=t5x/examples/demo/dates_eval.gin", f"--gin.CHECKPOINT_PATH={model_dir}",
        f"--gin.EVAL_OUTPUT_DIR={tmp_path}", '--gin.utils.RestoreCheckpointConfig.mode="all"',
        *(a for a in train(model_dir, 4) if "T5Config" in a),
    ]  # fmt: skip
    done = run_here(*arguments)
    assert done.code == 0, done.err
    lines = (tmp_path / "inference_eval" / "dates-metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 4]
    assert "2 evaluated before" in run_here(*arguments).err


BAD_INPUT = {
    "no such model": (["--model", "nowhere", "--input", "-"], "nowhere"),
    "no such file": (["--model", "{model}", "--input", "nowhere.txt"], "nowhere.txt"),
    "flags of two ways at once": (["--gin_file=x.gin", "--max_length=3"], "--max_length can only be used with --model"),
    "no input": (["--model", "{model}"], "--input"),
    "scores without targets": (["--model", "{model}", "--input", "-", "--mode=score"], "targets"),
    "an impossible length": (["--model", "{model}", "--input", "-", "--max_length=0"], "--max_length is 0"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_to_infer(case, model_dir, run_here):
    arguments, expected = BAD_INPUT[case]
    run_here("infer", *(a.format(model=model_dir) for a in arguments), text="3 March 1997\n").refused(expected)


@pytest.mark.slow  # inference/test_tasks.py
def test_a_mixture_is_inferred_task_by_task(model_dir, tmp_path):
    (tmp_path / "mixed.py").write_text(
        "from t5x import data\n"
        "features = {name: data.Feature(data.ByteVocabulary()) for name in ('inputs', 'targets')}\n"
        "for name, split in (('one', 'test'), ('two', 'test'), ('three', 'train')):\n"
        "    examples = [{'inputs': '3 May 1999', 'targets': 'x'}] * 2\n"
        "    source = data.FunctionDataSource(lambda split: examples, splits=(split,))\n"
        "    steps = [data.preprocessors.tokenize, data.preprocessors.append_eos_after_trim]\n"
        "    data.TaskRegistry.add(name, source, output_features=features, preprocessors=steps)\n"
        "data.MixtureRegistry.add('mixed', ['one', 'two', 'three'], default_rate=1.0)\n"
    )
    sizes = [argument for argument in SMALL if "T5Config" in argument]
    done = t5x(
        "infer", "--gin_file=t5x/examples/demo/model.gin", "--gin_file=t5x/configs/runs/infer.gin", *sizes,
        "--gin.MODEL=@models.EncoderDecoderModel()", "--gin.MIXTURE_OR_TASK_NAME=mixed",
        f"--gin.MIXTURE_OR_TASK_MODULE={tmp_path / 'mixed.py'}", f"--gin.CHECKPOINT_PATH={model_dir}",
        f"--gin.INFER_OUTPUT_DIR={tmp_path / 'out'}", '--gin.TASK_FEATURE_LENGTHS={"inputs": 16, "targets": 8}',
        cwd=REPO,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = sorted(path.name for path in (tmp_path / "out").glob("*-of-00001"))
    assert written == [f"{task}-predict.jsonl-00000-of-00001" for task in ("one", "two")]
    assert len((tmp_path / "out" / written[0]).read_text().splitlines()) == 2


@pytest.mark.parametrize(("signum", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
def test_a_signal_that_comes_during_garbage_collection_is_not_lost(signum, code):
    program = f"""
import gc, os, signal, sys, time
from t5x._runtime.signals import work_begins
work_begins()
def callback(phase, info):
    gc.callbacks.clear()
    os.kill(os.getpid(), signal.{signum})
gc.callbacks.append(callback)
try:
    gc.collect()
    time.sleep(30)
except KeyboardInterrupt:
    sys.exit(130)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == code and "Traceback" not in done.stderr


@pytest.mark.parametrize(("signum", "code"), [("SIGINT", 130), ("SIGTERM", 75)])
@pytest.mark.parametrize(("times", "printed"), [(1, "imported\n"), (2, "")])
def test_a_signal_during_an_import_waits_for_its_end_unless_it_comes_twice(times, printed, signum, code, tmp_path):
    """Extension modules abort where something is raised while they are initialised."""
    (tmp_path / "slow_module.py").write_text(
        "import os, signal, time\n"
        f"for _ in range({times}):\n"
        f"    os.kill(os.getpid(), signal.{signum})\n"
        "    time.sleep(0.3)\n"
        "print('imported', flush=True)\n"
    )
    program = """
import signal, sys, time
from t5x._runtime.signals import work_begins
work_begins()
try:
    import slow_module
    time.sleep(30)
except KeyboardInterrupt:
    sys.exit(130)
"""
    env = environment()
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stdout) == (code, printed) and "Traceback" not in done.stderr


def test_messages_without_a_progress_bar_do_not_pass_through_it(capsys, monkeypatch):
    handler = startup._AboveBar(sys.stderr)
    monkeypatch.setattr(tqdm.tqdm, "write", None)
    monkeypatch.setattr(tqdm.tqdm, "_instances", weakref.WeakSet(), raising=False)
    handler.emit(logging.LogRecord("t5x", logging.INFO, "", 0, "a message", (), None))
    assert capsys.readouterr().err == "a message\n"


@pytest.mark.parametrize(
    ("signum", "code", "says"),
    [("SIGINT", 130, "interrupted"), pytest.param("SIGTERM", 75, "terminated", marks=pytest.mark.slow)],
)
def test_a_signal_while_xla_compiles_ends_the_program_at_once(signum, code, says):
    program = """
import jax, jax.numpy as jnp
from t5x.cli import main as cli
from t5x.apps.doctor import doctor_verb
from t5x._runtime.signals import work_begins
import signal

jax.config.update("jax_enable_compilation_cache", False)

def compiles_for_long(x):
    for i in range(3, 500):  # of different shapes: nothing is compiled once for several
        x = jnp.sin(jnp.resize(x, (i, 7))).sum(0)
    return x

def run(args):
    work_begins()
    lowered = jax.jit(compiles_for_long).lower(jnp.ones(7))
    print("compiling", flush=True)
    lowered.compile()
    print("compiled", flush=True)

doctor_verb.run = run
cli.main(["doctor"])
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = start_python("-c", program, cwd=REPO, env=environment(), **pipes)
    assert child.stdout.readline() == "compiling\n"
    time.sleep(0.2)
    child.send_signal(getattr(signal, signum))
    printed, said = child.communicate(timeout=60)
    assert child.returncode == code and not printed  # not when all is compiled
    assert said.strip() == says
