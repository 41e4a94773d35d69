"""`t5x train --data`: what it runs, how it resumes, and its errors and warnings about files and options."""

import argparse
import contextlib
import gzip
import io
import json
import logging
import pickle
import shlex
import shutil
from pathlib import Path

import pytest

from t5x import configuration, data
from t5x._runtime.errors import UserError
from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.model_description import load_model
from t5x.cli import file_inference, file_options
from t5x.cli.file_options import FileTraining
from t5x.cli.file_training import train_file
from t5x.cli.inspect_verb import canonical_params, params_sha256
from t5x.cli.parser import passed_options
from t5x.data.data_description import DataDescription
from t5x.data.file_tasks import check_examples
from t5x.data.vocabularies.loading import vocabulary_named
from tests.inference.models import byte_model, texts
from tests.support import commands
from tests.support.paths import SHARED

SMALL = [
    "network.T5Config.emb_dim = 8", "network.T5Config.num_heads = 2", "network.T5Config.head_dim = 4",
    "network.T5Config.mlp_dim = 16", "network.T5Config.num_encoder_layers = 1",
    "network.T5Config.num_decoder_layers = 1", "network.T5Config.dropout_rate = 0.0", "train.stats_period = 1",
]  # fmt: skip
PAIRS = [{"q": f"{i} + {i}", "a": 2 * i} for i in range(12)]


def write_jsonl(path: Path, records: list) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@contextlib.contextmanager
def fresh():
    """A configuration and registries of its own, as a new process has them."""
    saved = [(registry, dict(registry._entries)) for registry in (data.TaskRegistry, data.MixtureRegistry)]
    for registry, _ in saved:
        registry.reset()
    configuration.clear()
    try:
        yield
    finally:
        configuration.clear()
        for registry, entries in saved:
            registry._entries.clear()
            registry._entries.update(entries)


def train(model_dir: Path, steps: int, bindings=SMALL, **options) -> str:
    """Trains from a file; what it printed."""
    options = {"inputs": "q", "targets": "a", "batch_size": 4, "max_input_length": 12, "max_target_length": 6} | options
    output = io.StringIO()
    with fresh(), contextlib.redirect_stdout(output):
        train_file(
            FileTraining(model_dir=str(model_dir), steps=steps, **options), bindings=bindings, command="t5x train …"
        )
    return output.getvalue()


def parameters(model_dir: Path) -> str:
    return params_sha256(canonical_params(open_checkpoint(model_dir)))


def steps_of(model_dir: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint_")) for path in model_dir.glob("checkpoint_*"))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, str]:
    directory = tmp_path_factory.mktemp("files")
    valid = write_jsonl(directory / "valid.jsonl", PAIRS[:3])
    return {"data": write_jsonl(directory / "train.jsonl", PAIRS), "valid": valid}


@pytest.fixture(scope="module")
def scratch(files, tmp_path_factory) -> tuple[Path, str]:
    """A byte-level model trained for six steps, in two runs, and what the second one printed."""
    model_dir = tmp_path_factory.mktemp("scratch") / "run"
    train(model_dir, 3, data=files["data"], size="tiny", family="byt5")
    assert steps_of(model_dir) == [3]
    return model_dir, train(model_dir, 6, **files, size="tiny", family="byt5", eval_every=3, metric="accuracy")


def test_from_scratch_trains_evaluates_and_prints_next_steps(scratch):
    model_dir, printed = scratch
    assert steps_of(model_dir)[-1] == 6
    lines = (model_dir / "inference_eval/pairs-metrics.jsonl").read_text().splitlines()
    scores = [json.loads(line) for line in lines]
    assert [score["step"] for score in scores] == [3, 6] and "accuracy" in scores[-1]
    losses = [json.loads(x) for x in (model_dir / "training_eval/pairs/metrics.jsonl").read_text().splitlines()]
    assert f"loss {losses[-1]['loss_per_nonpadding_target_token']:.4g} per token, accuracy" in printed
    assert "infer --model" in printed and "'0 + 0'" in printed
    assert (model_dir / "command.txt").read_text().splitlines()[1] == "t5x train …"


def test_fewer_steps_than_a_run_has_are_refused(scratch, files):
    with pytest.raises(UserError, match=r"6 steps.*--steps 5\b"):
        train(scratch[0], 5, **files, size="tiny", family="byt5")


EARLIER = """
from t5x import plain
train_script.train.summarize_config_fn = @plain.write_down
plain.write_down.command = 'x'
"""


@pytest.mark.slow
def test_config_gin_repeats_the_run_without_a_stop(scratch, tmp_path):
    """Stopped and started again, it ended the same. Also with the module that earlier versions named in it."""
    from t5x.runs.train import train as entry

    text = (scratch[0] / "config.gin").read_text()
    (tmp_path / "earlier.gin").write_text(text + EARLIER)
    with fresh():
        configuration.parse(
            gin_files=[str(tmp_path / "earlier.gin")],
            bindings=[f"MODEL_DIR = {str(tmp_path / 'again')!r}"],
            entry_points={"train": entry},
        )
        configuration.check(entry)
        configuration.configured(entry)()
    assert parameters(tmp_path / "again") == parameters(scratch[0])
    assert (tmp_path / "again/command.txt").read_text().splitlines()[1] == "x"


@pytest.mark.slow
def test_fine_tuning_counts_steps_from_its_start_and_brings_the_vocabulary(scratch, files, tmp_path, caplog, capsys):
    caplog.set_level(logging.INFO, logger="t5x")
    train(tmp_path / "tuned", 2, bindings=(), model=str(scratch[0]), data=files["data"])
    assert steps_of(tmp_path / "tuned") == [8]
    assert "train: step 2/2" in capsys.readouterr().err
    description = json.loads((tmp_path / "tuned/checkpoint_8/vocabulary/inputs/vocabulary.json").read_text())
    assert description["class"] == "ByteVocabulary"
    assert parameters(tmp_path / "tuned") != parameters(scratch[0])
    assert "no --valid" in caplog.text


def dry_run(capsys, **options) -> str:
    with fresh():
        train_file(FileTraining(steps=1, model_dir="run", inputs="q", targets="a", **options), dry_run=True)
    return capsys.readouterr().out


def test_a_native_checkpoint_and_a_hugging_face_one_are_understood(files, tmp_path, capsys):
    native = SHARED / "t5x_testdata/test_t5_tiny.checkpoint_0"
    spiece = SHARED / "t5_vocab/spiece.model"
    if not native.exists():
        pytest.skip("the real data sets (../shared/data) are not here")
    with pytest.raises(UserError, match=r"test_t5_tiny.*--vocabulary spiece"):
        dry_run(capsys, data=files["data"], model=str(native))
    said = dry_run(capsys, data=files["data"], model=str(native), vocabulary=str(spiece))
    for expected in ("T5Config.emb_dim = 8", "T5Config.num_heads = 4", "SentencePieceVocabulary.extra_ids = 100"):
        assert expected in said
    assert "base_learning_rate = 0.001" in said and "train_eval_dataset_cfg = None" in said

    from t5x.checkpoints.convert import convert

    convert(str(native), str(tmp_path / "hf"), to="hf")
    shutil.copy(spiece, tmp_path / "hf")
    said = dry_run(capsys, data=files["data"], model=str(tmp_path / "hf"))
    assert load_model(open_checkpoint(tmp_path / "hf")).input_vocabulary.encode("Hello") == [8774]
    assert "hf/spiece.model'" in said and "SentencePieceVocabulary.extra_ids = 100" in said
    assert not Path("run").exists(), "a dry run writes nothing"


def test_a_vocabulary_is_recognised_by_its_name():
    assert vocabulary_named("bytes").load() == data.ByteVocabulary()
    with pytest.raises(UserError, match=r"--vocabulary words\.txt"):
        vocabulary_named("words.txt")
    if not SHARED.is_dir():
        pytest.skip("the real data sets (../shared/data) are not here")
    t5 = vocabulary_named(str(SHARED / "t5_vocab/spiece.model"), rows=32128).load()
    assert t5.vocab_size == 32100
    assert pickle.loads(pickle.dumps(t5)).encode("Hello") == t5.encode("Hello"), "workers need it"
    assert vocabulary_named(str(SHARED / "mt5_vocab/spiece.model")).load().vocab_size == 250100
    with pytest.raises(UserError, match=r"spiece\.model.*32,000.*384"):
        vocabulary_named(str(SHARED / "t5_vocab/spiece.model"), rows=384)


# --- Files ------------------------------------------------------------------------------------------------------------


def write_parquet(path: Path, rows: list) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


KINDS = {
    "x.jsonl": lambda path: write_jsonl(path, [{"q": "a, b", "a": 1}, {"q": "c", "a": 2}]),
    "x.JSONL.gz": lambda path: path.write_bytes(gzip.compress(b'{"q": "a, b", "a": 1}\n{"q": "c", "a": 2}\n')),
    "x.tsv": lambda path: path.write_text("q\ta\na, b\t1\nc\t2\n"),
    "x.csv": lambda path: path.write_text('q,a\n"a, b",1\nc,2\n'),
    "x.parquet": lambda path: write_parquet(path, [{"q": "a, b", "a": 1}, {"q": "c", "a": 2}]),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_pairs(name, tmp_path):
    KINDS[name](tmp_path / name)
    vocabulary = data.ByteVocabulary()
    with fresh():
        task = data.file_task({"train": str(tmp_path / name)}, vocabulary, "q", "a", prefix="say: ")
        again = data.file_task({"train": str(tmp_path / name)}, data.ByteVocabulary(), "q", "a", prefix="say: ")
        assert again is task is data.TaskRegistry.get("pairs")
        with pytest.raises(UserError, match="already"):
            data.file_task({"train": str(tmp_path / name)}, vocabulary, "a", "q")
        (example,) = task.pipeline("train", {"inputs": 8, "targets": 8}).outputs(0, 0)
    assert example["inputs_pretokenized"] == "say: a, b" and example["targets_pretokenized"] == "1"
    assert example["inputs"].tolist() == [*vocabulary.encode("say: a,")[:7], 1], "cut, and EOS kept"
    assert example["targets"].tolist() == [*vocabulary.encode("1"), 1]


SUMS = [{"x": text, "y": i, "z": f"z{i}"} for i, text in enumerate(texts(12))]
SUM_FILES = {
    "x.jsonl": lambda path: write_jsonl(path, SUMS),
    "x.jsonl.gz": lambda path: path.write_bytes(gzip.compress("".join(json.dumps(r) + "\n" for r in SUMS).encode())),
    "x.tsv": lambda path: write_table(path, "\t", header=True),
    "x.csv": lambda path: write_table(path, ",", header=True),
    "bare.tsv": lambda path: write_table(path, "\t", header=False),
    "bare.csv": lambda path: write_table(path, ",", header=False),
    "x.parquet": lambda path: write_parquet(path, SUMS),
}


def write_table(path: Path, delimiter: str, *, header: bool) -> None:
    lines = [["x", "y", "z"]] * header + [list(map(str, row.values())) for row in SUMS]
    path.write_text("".join(delimiter.join(line) + "\n" for line in lines))


def test_a_model_remembers_its_data_and_infer_predicts_as_eval_does(tmp_path, capsys, monkeypatch):
    for name, write in SUM_FILES.items():
        write(tmp_path / name)
    options = {"inputs": "{x} + {y}", "targets": "z", "prefix": "sum: ", "columns": ["x", "y", "z"]}
    lengths = {"max_input_length": 40, "max_target_length": 5}
    made = {"model": str(byte_model(tmp_path / "model")), "batch_size": 2, "optimizer": "adamw", "learning_rate": 1e-6}
    run = tmp_path / "run"
    bindings = ["network.T5Config.dropout_rate = 0.0"]
    printed = train(run, 1, bindings, data=str(tmp_path / "bare.tsv"), metric="none", **made, **options, **lengths)
    assert open_checkpoint(run).data == options | lengths
    example = shlex.split(next(line for line in printed.splitlines() if line.startswith("try it:")))[3]
    assert json.loads(example) == {"x": SUMS[0]["x"], "y": "0"}

    with fresh():
        result = commands.run(
            capsys, "eval", "--model", run, "--data", tmp_path / "x.tsv", "--output", tmp_path / "eval"
        )
    assert result.code == 0, result.err
    scored = [json.loads(x) for x in (tmp_path / "eval/inference_eval/pairs-000001.jsonl").read_text().splitlines()]
    predictions = [record["prediction"] for record in scored]
    assert [record["input"]["inputs_pretokenized"] for record in scored] == [
        f"sum: {row['x']} + {row['y']}" for row in SUMS
    ]

    assert len(set(predictions)) > 3

    loaded = file_inference.load(str(run))
    monkeypatch.setattr(file_inference, "load", lambda *args, **kwargs: loaded)
    for name in SUM_FILES:
        result = commands.run(capsys, "infer", "--model", run, "--input", tmp_path / name)
        records = [json.loads(line) for line in result.out.splitlines()]
        assert [record["prediction"] for record in records] == predictions, (name, result.err)
        assert [record["z"] for record in records] == [row["z"] for row in SUMS]
    result = commands.run(capsys, "infer", "--model", run, "--input", "-", text=f"{example}\n")
    assert json.loads(result.out)["prediction"] == predictions[0]
    options = ["--inputs", "x", "--prefix", "", "--mode", "score"]
    assert commands.run(capsys, "infer", "--model", run, "--input", tmp_path / "x.csv", *options).code == 0
    commands.run(capsys, "infer", "--model", run, "--input", "-", text="0 + 7\n").refused("x, y", ".jsonl")


def test_a_metric_of_the_users_own(tmp_path, monkeypatch):
    (tmp_path / "my_metrics.py").write_text("def half(targets, predictions): return {'half': len(targets) / 2}\n")
    write_jsonl(tmp_path / "x.jsonl", PAIRS)
    monkeypatch.chdir(tmp_path)
    for name in ("my_metrics:half", "my_metrics.py:half"):
        with fresh():
            task = data.file_task({"train": "x.jsonl"}, data.ByteVocabulary(), "q", "a", metric=name)
        assert task.metric_fns[0](["a"], ["a"]) == {"half": 0.5}
    for name, message in {"my_metrics:none": "no function 'none'", "nowhere_at_all:f": "nowhere_at_all"}.items():
        with fresh(), pytest.raises(UserError, match=message):
            data.file_task({"train": "x.jsonl"}, data.ByteVocabulary(), "q", "a", metric=name)


GOOD = b'{"inputs": "a", "targets": "b"}\n'
BAD = {
    "an empty file": ("x.jsonl", b"", r"x\.jsonl is empty"),
    "broken JSON": ("x.jsonl", GOOD + b'{"inputs": oops\n', r"x\.jsonl:2.*JSON.*--skip_bad_examples"),
    "a missing field": (
        "x.jsonl",
        GOOD + b'{"inputs": "a"}\n',
        r"x\.jsonl:2.*'targets'.*inputs",
    ),
    "a table without a header": ("x.tsv", b"Guten Tag\tGood day\nJa\tYes\n", r"no header.*--columns inputs,targets"),
    "fields of other names": ("x.jsonl", b'{"src": "a", "dst": "b"}\n', r"x\.jsonl.*'inputs'.*src, dst.*--inputs"),
    "a null": ("x.jsonl", b'{"inputs": null, "targets": "b"}\n', r"x\.jsonl:1.*'inputs'.*null"),
    "a list": ("x.jsonl", b'{"inputs": ["a"], "targets": "b"}\n', r"x\.jsonl:1.*'inputs'.*number"),
    "bytes that are not UTF-8": ("x.jsonl", GOOD + b'{"inputs": "\xff"}\n', r"x\.jsonl:2.*0xff.*UTF-8"),
    "a line with a field too many": ("x.tsv", b"inputs\ttargets\na\tb\tc\n", r"x\.tsv:2.*2.*3"),
    "text without pairs": ("x.txt", b"a\n", r"x\.txt.*\.jsonl"),
    "an unknown ending": ("x.xml", b"a\n", r"x\.xml.*\.parquet"),
    "one JSON document": ("x.json", b"[]\n", r"x\.json.*\.jsonl"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_gets_one_message(what, tmp_path):
    name, content, message = BAD[what]
    (tmp_path / name).write_bytes(content)
    run = {"data": str(tmp_path / name), "model_dir": str(tmp_path / "run"), "steps": 1, "size": "tiny"}
    with fresh(), pytest.raises(UserError, match=message):
        train_file(FileTraining(**run, family="byt5"))
    assert not (tmp_path / "run").exists()


OPTIONS = {
    "no steps": ({"steps": 0}, "--steps is 0"),
    "a wrong size": ({"size": "huge"}, "--size huge.*tiny, small, base"),
    "a wrong family": ({"family": "gpt"}, "--family gpt.*byt5, mt5"),
    "no vocabulary": ({"family": "t5_1_1"}, "t5_1_1.*--vocabulary"),
    "neither a model nor a size": ({"size": None}, "--model.* or --size"),
    "a metric that there is not": ({"metric": "nope"}, "'nope'.*exact_match"),
    "a validation file of another kind": ({"valid": "x.tsv"}, r"\.jsonl and \.tsv"),
    "a model_dir that is a file": ({"model_dir": "FILE"}, r"--model_dir .*train\.jsonl"),
    "an optimizer without a rate": ({"optimizer": "adamw"}, "--optimizer adamw needs --learning_rate"),
    "a negative learning rate": ({"learning_rate": -1.0}, "--learning_rate is -1.0"),
}


@pytest.mark.parametrize("what", OPTIONS)
def test_a_bad_option_gets_one_message(what, files, tmp_path):
    options, message = OPTIONS[what]
    options = {name: files["data"] if value == "FILE" else value for name, value in options.items()}
    run = {"data": files["data"], "inputs": "q", "targets": "a", "model_dir": str(tmp_path / "run"), "steps": 1}
    with fresh(), pytest.raises(UserError, match=message):
        train_file(FileTraining(**{**run, "size": "tiny", "family": "byt5", **options}))


def test_odd_examples_are_counted_in_one_warning_each(tmp_path, caplog):
    records = [
        {"inputs": "long enough", "targets": "x"},
        {"inputs": "a", "targets": ""},
        {"inputs": "", "targets": " "},
    ]
    path = write_jsonl(tmp_path / "x.jsonl", [*records, {"inputs": "no target"}])
    with fresh():
        task = data.file_task({"train": path}, data.ByteVocabulary())
        found = check_examples(task, "train", DataDescription(max_input_length=5), skip_bad_examples=True, count=10)
        assert found == (records[0], {"inputs": 12, "targets": 2})
        for expected in (
            "1 of 4 examples cannot be used",
            "2 of 4 examples have empty targets",
            "1 of 4 examples have empty inputs",
            "1 of 3 inputs are longer than --max_input_length 5",
        ):
            assert caplog.text.count(expected) == 1, expected
        with pytest.raises(UserError, match=r"x\.jsonl:4.*--skip_bad_examples"):
            check_examples(task, "train", DataDescription())
        (example,) = task.pipeline("train").outputs(0, 1)
        assert example["targets"].tolist() == [1], "an empty target is EOS alone"


# --- The command line -------------------------------------------------------------------------------------------------


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    file_options.add(parser, "data file", FileTraining)
    args = parser.parse_args(argv)
    args.gin_file, args.modules, args.gin_bindings = [], [], ["A = 'b c'"]
    return args


def test_the_command_can_be_typed_again():
    args = parsed(
        "--data", "my file.tsv", "--steps", "3", "--skip_bad_examples", "--model_dir", "run", "--size", "small"
    )
    expected = {"data": "my file.tsv", "steps": 3, "model_dir": "run", "skip_bad_examples": True, "size": "small"}
    assert file_options.parsed(args, FileTraining) == FileTraining(**expected)
    options = "--data 'my file.tsv' --size small --model_dir run --steps 3 --skip_bad_examples"
    command = file_options.command("train", passed_options(args, FileTraining), args.gin_bindings)
    assert command.startswith(f"t5x train {options} ")
    assert shlex.split(command)[-1] == "--gin_bindings=A = 'b c'"


def test_options_and_gin_files_are_not_mixed(files, run_here):
    done = run_here("train", "--data", files["data"], "--gin_file=x.gin")
    done.refused("--data", "--gin_file")
    with pytest.raises(UserError, match="--steps needs --data"):
        file_options.parsed(parsed("--steps", "3"), FileTraining)
    with pytest.raises(UserError, match="--data needs --model_dir, --steps"):
        file_options.parsed(parsed("--data", "x"), FileTraining)


def test_import_comes_before_the_gin_files(tmp_path, run_here):
    (tmp_path / "my_tasks.py").write_text("print('imported')\n")
    done = run_here("train", "--gin_file=nowhere.gin", "--import", tmp_path / "my_tasks.py")
    done.refused("nowhere.gin")
    assert done.out == "imported\n"
    run_here("data", "my_task", "--import", "no_such_tasks").refused("'no_such_tasks'")
