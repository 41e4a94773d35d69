"""Write the files that tests/saved/test_saved.py reads, with the present version: what users have on their disks.

    python -m tests.saved.make [DIRECTORY]

Later versions must read these files. Write them anew only for a format that is new.
"""

import contextlib
import io
import json
import os
import shutil
import sys
from pathlib import Path

from tests.support.xla_flags import QUICK_COMPILATION

os.environ["JAX_PLATFORMS"] = "cpu"  # as tests/conftest.py does
os.environ["XLA_FLAGS"] = f" {QUICK_COMPILATION}"

import numpy as np

from t5x.checkpoints.convert import convert
from t5x.cli.main import run_verb
from t5x.inference.output import FileOutput
from tests.cli.test_file_training import fresh
from tests.inference.models import byte_model, texts
from tests.saved import runs
from tests.saved.runs import CHECKPOINTS, EXPORTS, FILES, HALF, JOBS, PLACE, RUNS, STEPS

HERE = Path(__file__).parent
_FINISHED = 2  # chunks of a job that is killed
_NOT_READ = ("events.out.tfevents.*", ".*", "command.txt", "saved_tasks.py")
_RECIPES = ("squad", "nq_open", "monot5", "rankt5")
# How config.gin of earlier versions named the function that writes it.
_EARLIER = {
    "plain": ("from t5x import plain", "plain.write_down"),
    "file_training": ("from t5x.cli import file_training", "file_training.write_configuration"),
}


def run(verb: str, *arguments: str, code: int = 0) -> None:
    with fresh():
        sys.modules.pop("saved_tasks", None)  # to register its tasks again
        assert run_verb(verb, arguments) == code


def inspect(checkpoint: Path) -> dict:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run("inspect", str(checkpoint), "--json")
    return runs.described(printed.getvalue())


def write_inputs(place: Path) -> None:
    place.mkdir()
    shutil.copy(HERE / "saved_tasks.py", place)
    pairs = [{"q": f"{i} + {i}", "a": 2 * i} for i in range(12)]
    judged = [
        {"query": f"q{q}", "passage": f"{'bcdfgh'[i]}{'x' if i % 3 == q % 3 else 'o'}{q}", "label": int(i % 3 == q % 3)}
        for q in range(9)
        for i in range(6)
    ]
    inputs = [f"{text:a<7}"[:7] for text in texts(6)]
    questions = [{"question": "ab", "context": text} for text in inputs]
    for name, records in {"train": pairs, "valid": pairs[:3], "judged": judged, "questions": questions}.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (place / "texts.txt").write_text("".join(f"{text}\n" for text in inputs))
    (place / "passages.tsv").write_text("".join(f"a{i % 2}\t{text}\n" for i, text in enumerate(inputs)))


def as_killed(run: Path) -> None:
    """Make of a run what a kill soon after step HALF leaves."""
    shutil.rmtree(run / f"checkpoint_{STEPS}")
    for path in run.rglob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        if path.name.startswith("metrics") or "-metrics" in path.name:
            path.write_text("".join(line for line in lines if json.loads(line)["step"] <= HALF))
        elif str(STEPS) in path.name:
            path.unlink()


def kill_job(verb: str, place: Path) -> None:
    """Run a job until so many chunks are finished."""
    write = FileOutput.write

    def write_or_end(self, *content):
        if len(self._chunks.finished) == _FINISHED:
            raise KeyboardInterrupt
        write(self, *content)

    FileOutput.write = write_or_end
    try:
        run(verb, *runs.job_arguments(verb, place), code=130)
    finally:
        FileOutput.write = write


def write_runs(place: Path, expected: dict) -> None:
    for name in RUNS:
        run("train", *runs.train_arguments(name, place))
        np.savez_compressed(place / f"{name}.npz", **runs.arrays(place / name / f"checkpoint_{STEPS}"))
        expected["metrics"][name] = runs.metrics(place / name)
        as_killed(place / name)


def write_jobs(place: Path, expected: dict) -> None:
    byte_model(place / "downloaded")
    convert(str(place / "downloaded"), str(place / "model"), to="t5x")
    (place / "jobs").mkdir()
    for verb in JOBS:
        run(verb, *runs.job_arguments(verb, place))
        output = place / "jobs" / f"{verb}.jsonl"
        expected["jobs"][verb] = output.read_text()
        output.unlink()
        kill_job(verb, place)


def write_cache(place: Path, expected: dict) -> None:
    tasks, caches = place / "inputs/saved_tasks.py", place / "cache"
    run("cache", "saved_sums", f"--import={tasks}", "--split=train", f"--output_dir={caches}", "--num_workers=0")
    expected["batches"] = runs.batches(place)


def write_configs(place: Path) -> None:
    """Write config.gin files of recipes, as `--dry_run` prints them, and of earlier versions."""
    (place / "configs").mkdir()
    values = {
        "MODEL_DIR": "run",
        "TRAIN_FILE": "train.json",
        "VALIDATION_FILE": "valid.json",
        "DATA_DIR": "inputs",
        "INITIAL_CHECKPOINT_PATH": "checkpoint",
        "seqio.SentencePieceVocabulary.sentencepiece_model_file": "spiece.model",
    }
    for recipe in _RECIPES:
        with open(place / "configs" / f"{recipe}.gin", "w") as file, contextlib.redirect_stdout(file):
            options = [f"--gin.{name}={f'{PLACE}/{value}'!r}" for name, value in values.items()]
            run("train", f"--gin_file=t5x/examples/recipes/{recipe}.gin", *options, "--dry_run")
    text, written = (place / "pairs/config.gin").read_text(), "gin_utils.summarize_gin_config"
    assert written in text
    for name, (statement, function) in _EARLIER.items():
        earlier = text.replace("from t5x import utils\n", f"from t5x import utils\n{statement}\n")
        (place / "configs" / f"{name}.gin").write_text(earlier.replace(written, function))


def write_exports(place: Path, expected: dict) -> None:
    for name in EXPORTS:
        runs.export(name, place)
    expected["stablehlo"] = runs.stablehlo_outputs(place / "exports/stablehlo")
    expected["generated"] = runs.generated(place / "model")
    expected["ranked"] = runs.ranked(place / "ranker")
    expected["inspected"] = {path: inspect(place / path) for path in CHECKPOINTS}


def main() -> None:
    place = Path(PLACE)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    os.environ["T5X_TASK_CACHES"] = ""
    expected = {"software": runs.software(), "python": sys.version_info[:2], "metrics": {}, "jobs": {}}
    write_inputs(place / "inputs")
    write_runs(place, expected)
    write_jobs(place, expected)
    write_cache(place, expected)
    write_configs(place)
    write_exports(place, expected)
    (place / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")
    shutil.rmtree(place / "downloaded")
    target = Path(sys.argv[1]) if sys.argv[1:] else FILES
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(place, target, ignore=shutil.ignore_patterns(*_NOT_READ))


if __name__ == "__main__":
    main()
