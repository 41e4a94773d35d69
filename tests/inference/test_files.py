"""`t5x infer --model`: files in, files out, whatever the batches, and through interruptions."""

import io
import json
import os
import sys
import types

import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.cli import file_inference
from t5x.cli.file_options import FileInference
from t5x.inference.output import Chunks
from tests.inference.models import byte_model, texts
from tests.support import commands
from tests.support.programs import run_python

LENGTHS = {"max_target_length": 6, "max_input_length": 24}
COUNT = 37


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with `model` and `in.txt`."""
    directory = tmp_path_factory.mktemp("files")
    byte_model(directory / "model")
    (directory / "in.txt").write_text("".join(f"{text}\n" for text in texts(COUNT)))
    return directory


@pytest.fixture(autouse=True, scope="module")
def one_model(place):
    """The model is loaded and compiled once for all tests here."""
    loaded = file_inference.load(str(place / "model"))
    kept, file_inference.load = file_inference.load, lambda *args, **kwargs: loaded
    yield loaded
    file_inference.load = kept


def infer_file(model, path, output="-", **options):
    file_inference.infer_file(FileInference(model=model, input=path, output=output, **options))


def infer(place, output, **options):
    infer_file(str(place / "model"), str(place / "in.txt"), str(output), **LENGTHS | options)
    return read(output)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(place, one_model):
    return infer(place, place / "expected.jsonl", batch_size=8, checkpoint_period=2)


def test_results_are_in_the_order_of_the_input(place, expected):
    assert [line["inputs"] for line in expected] == texts(COUNT)
    assert len({line["prediction"] for line in expected}) > 8
    assert all(line["score"] < 0 for line in expected)
    assert not [name for name in os.listdir(place) if name.startswith("tmp-")]


HOW = {"greedy": {}, "a beam": {"beams": 3, "num_return": 2}, "sampling": {"temperature": 1.3, "top_k": 20, "seed": 5}}


@pytest.mark.parametrize("how", list(HOW))
@pytest.mark.slow
def test_neither_batches_nor_chunks_nor_shards_change_what_is_predicted(how, place, tmp_path):
    one = infer(place, tmp_path / "one.jsonl", batch_size=8, output_ids=True, **HOW[how])
    shards = [
        infer_file(
            str(place / "model"), str(place / "in.txt"), str(tmp_path / "many.jsonl"), batch_size=16,
            checkpoint_period=1, num_shards=2, shard_id=shard, output_ids=True, **LENGTHS, **HOW[how],
        )
        for shard in (1, 0)
    ]  # fmt: skip
    many = [line for i in range(len(shards)) for line in read(tmp_path / f"many.jsonl-{i:05}-of-00002")]
    for a, b in zip(one, many, strict=True):
        np.testing.assert_allclose(a.pop("score"), b.pop("score"), rtol=1e-5)
        assert a == b
    if how == "sampling":
        other = infer(place, tmp_path / "other.jsonl", batch_size=8, **HOW[how] | {"seed": 6})
        assert sum(a["prediction"] != b["prediction"] for a, b in zip(one, other, strict=True)) > COUNT // 2


@pytest.mark.slow
def test_scores_are_those_that_greedy_decoding_had(place, expected, tmp_path):
    # The tokens of a prediction are not always those that its text has: only of those the score can be compared.
    ended = infer(place, tmp_path / "ids.jsonl", batch_size=8, output_ids=True)
    encode = file_inference.load().model.output_vocabulary.encode
    ended = [line for line in ended if line["prediction_tokens"] == [*encode(line["prediction"]), 1]]
    assert len(ended) >= 3
    (tmp_path / "pairs.jsonl").write_text(
        "".join(json.dumps({"inputs": li["inputs"], "targets": li["prediction"]}) + "\n" for li in ended)
    )
    pairs, scored = str(tmp_path / "pairs.jsonl"), str(tmp_path / "scores.jsonl")
    infer_file(str(place / "model"), pairs, scored, mode="score", max_input_length=LENGTHS["max_input_length"])
    scores = [line["score"] for line in read(tmp_path / "scores.jsonl")]
    np.testing.assert_allclose(scores, [line["score"] for line in ended], rtol=1e-5)


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_an_interrupted_run_resumes_with_the_same_output(finished, place, expected, tmp_path, monkeypatch):
    compute, calls = file_inference._FileInference.compute, []

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) > finished:
            raise KeyboardInterrupt
        return compute(*args, **kwargs)

    options = {"batch_size": 8, "checkpoint_period": 2}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(file_inference._FileInference, "compute", interrupted)
        infer(place, tmp_path / "out.jsonl", **options)
    assert not (tmp_path / "out.jsonl").exists()
    if finished:
        with pytest.raises(UserError, match="max_length was 6, is 7"):
            infer(place, tmp_path / "out.jsonl", **options, max_target_length=7)
    calls.clear()
    with monkeypatch.context() as patch:
        patch.setattr(file_inference._FileInference, "compute", lambda *args: (calls.append(1), compute(*args))[1])
        infer(place, tmp_path / "out.jsonl", **options)
    assert len(calls) == 3 - finished
    assert (tmp_path / "out.jsonl").read_bytes() == (place / "expected.jsonl").read_bytes()
    assert os.listdir(tmp_path) == ["out.jsonl"]


@pytest.fixture
def half_done(place, tmp_path, monkeypatch):
    """A function that runs over the lines it is given, and `calls`: how many lines each of its chunks had.

    It has been killed before, when two chunks of the three of `texts(20)` were finished.
    """
    calls = []
    write, compute = Chunks.write, file_inference._FileInference.compute

    def run(lines, **options):
        (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in lines))
        arguments = [str(place / "model"), str(tmp_path / "in.txt"), str(tmp_path / "out.jsonl")]
        infer_file(*arguments, **{"batch_size": 8, "checkpoint_period": 1} | LENGTHS | options)
        return [line["inputs"] for line in read(tmp_path / "out.jsonl")]

    def second(chunks, *args):
        write(chunks, *args)
        if len(chunks.finished) == 2:
            raise KeyboardInterrupt

    def counted(self, chunk, progress):
        calls.append(len(chunk.lines))
        return compute(self, chunk, progress)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Chunks, "write", second)
        run(texts(20))
    monkeypatch.setattr(file_inference._FileInference, "compute", counted)
    return types.SimpleNamespace(run=run, calls=calls)


CHANGED = {
    "other lines": (["new", *texts(20)[1:]], "lines 1 to 8 ", [8, 8, 4]),
    "other lines behind": ([*texts(20)[:10], "new", *texts(20)[11:]], "lines 9 to 16 ", [8, 4]),
    "fewer lines": (texts(20)[:8], "it ends before the lines", []),
}


@pytest.mark.parametrize("case", CHANGED)
def test_a_changed_input_raises_user_error_or_is_recomputed(case, half_done, caplog):
    lines, message, computed = CHANGED[case]
    with pytest.raises(UserError, match=f"in.txt has changed: {message}.*--overwrite"):
        half_done.run(lines)
    assert half_done.run(lines, overwrite=True) == lines
    assert half_done.calls == computed
    (said,) = [record.getMessage() for record in caplog.records if "discarding" in record.getMessage()]
    assert message in said


def test_overwriting_resumes_its_own_chunks_and_discards_others(half_done, caplog):
    assert half_done.run(texts(20), overwrite=True) == texts(20)
    assert half_done.calls == [4]
    assert half_done.run(texts(20), overwrite=True) == texts(20)
    assert half_done.calls == [4, 8, 8, 4]
    assert "discarding" not in caplog.text


def test_overwriting_after_a_run_with_other_options_discards_its_chunks(half_done, caplog):
    assert half_done.run(texts(20), overwrite=True, output_ids=True) == texts(20)
    assert half_done.calls == [8, 8, 4]
    assert "discarding" in caplog.text and "output_ids was False, is True" in caplog.text


def test_other_weights_at_the_same_path_are_another_model(place, half_done):
    weights = place / "model" / "model.safetensors"
    times = weights.stat()
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns + 1_000_000_000))
    try:
        with pytest.raises(UserError, match="weights was '"):
            half_done.run(texts(20))
    finally:
        os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert half_done.run(texts(20)) == texts(20) and half_done.calls == [4]


def test_a_run_does_not_resume_in_another_dtype(half_done, monkeypatch):
    from t5x.inference import loaded

    monkeypatch.setattr(file_inference, "load", loaded.load)
    with pytest.raises(UserError, match="dtype was 'float32', is 'bfloat16'"):
        half_done.run(texts(20), dtype="bfloat16")


def test_a_run_that_was_killed_after_its_last_rename_is_finished(place, expected, tmp_path, monkeypatch):
    options = {"batch_size": 8, "checkpoint_period": 2}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Chunks, "remove", lambda chunks: (_ for _ in ()).throw(KeyboardInterrupt))
        infer(place, tmp_path / "out.jsonl", **options)
    assert infer(place, tmp_path / "out.jsonl", **options) == expected
    assert os.listdir(tmp_path) == ["out.jsonl"]
    with pytest.raises(UserError, match="exists already"):
        infer(place, tmp_path / "out.jsonl", **options)


def interrupt(*_):
    raise KeyboardInterrupt


def test_a_run_that_was_killed_after_its_last_rename_is_whole(half_done, tmp_path, monkeypatch):
    lines = texts(20)[:16]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Chunks, "remove", interrupt)
        half_done.run(lines)
    with pytest.raises(UserError, match=r"in\.txt has changed: it continues"):
        half_done.run(texts(20))
    assert half_done.calls == []
    unlink = os.unlink
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "unlink", lambda path: interrupt() if path.endswith("job.json") else unlink(path))
        half_done.run(lines)
    assert [path.name for path in (tmp_path / "tmp-out.jsonl").iterdir()] == ["job.json"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "rmdir", interrupt)
        assert half_done.run(lines) == lines
    assert half_done.calls == []
    with pytest.raises(UserError, match="exists already"):
        half_done.run(lines)
    assert not (tmp_path / "tmp-out.jsonl").exists()


@pytest.mark.slow
def test_long_lines_are_cut_and_counted_or_refused(place, tmp_path, caplog):
    (tmp_path / "in.txt").write_text("short\n" + "x" * 100_000 + "\n" + "y" * 23 + "\n")
    run = lambda **options: infer_file(
        str(place / "model"), str(tmp_path / "in.txt"), str(tmp_path / "out.jsonl"), **LENGTHS | options
    )
    run()
    assert "1 input(s) were longer than 24 tokens and were truncated" in caplog.text
    long = read(tmp_path / "out.jsonl")[1]
    assert len(long["inputs"]) == 100_000
    (tmp_path / "cut.txt").write_text("x" * 23 + "\n")
    infer_file(str(place / "model"), str(tmp_path / "cut.txt"), str(tmp_path / "cut.jsonl"), **LENGTHS)
    assert read(tmp_path / "cut.jsonl")[0]["prediction"] == long["prediction"]
    with pytest.raises(UserError, match=r"in.txt:2: 'inputs' has 100001 tokens, more than 24"):
        run(long="error", overwrite=True)


def test_a_target_that_is_cut_is_scored_without_an_end_and_counted(place, one_model, tmp_path, caplog):
    pairs = [("abc", "ab"), ("abc", "abcdefgh" * 4)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"inputs": i, "targets": t}) + "\n" for i, t in pairs))
    arguments = [str(place / "model"), str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")]
    infer_file(*arguments, mode="score", max_input_length=24)
    scores = [line["score"] for line in read(tmp_path / "out.jsonl")]
    encode = one_model.model.output_vocabulary.encode
    targets = [[*encode("ab"), 1], encode(pairs[1][1])[:24]]
    logits = one_model.logits([[*encode("abc"), 1]] * 2, targets)
    logits = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    expected = [sum(row[at, token] for at, token in enumerate(ids)) for row, ids in zip(logits, targets, strict=True)]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and warnings[0].startswith("1 target(s) were longer than 24 tokens and were truncated")
    with pytest.raises(UserError, match=r"in.jsonl:2: 'targets' has 33 tokens, more than 24"):
        infer_file(*arguments, mode="score", max_input_length=24, long="error", overwrite=True)


@pytest.mark.slow
def test_choices_are_all_that_comes_out(place, tmp_path):
    short = [text for text in texts(COUNT) if len(text) < 8]
    (tmp_path / "in.txt").write_text("".join(f"{text}\n" for text in short))
    (tmp_path / "choices.txt").write_text("yes\nno\nnever\n")
    options = LENGTHS | {"choices": str(tmp_path / "choices.txt")}
    infer_file(str(place / "model"), str(tmp_path / "in.txt"), str(tmp_path / "out.jsonl"), **options)
    found = read(tmp_path / "out.jsonl")
    assert len(found) == len(short) and {line["prediction"] for line in found} <= {"yes", "no", "never"}


def test_standard_input_to_standard_output(place, expected, monkeypatch, capfdbinary):
    lines = io.BytesIO("".join(f"{text}\n" for text in texts(COUNT)[:3]).encode())
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=lines))
    infer_file(str(place / "model"), "-", **LENGTHS)
    sys.stdout.flush()
    found = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [line["prediction"] for line in found] == [line["prediction"] for line in expected[:3]]


def test_an_empty_file_gives_an_empty_file(place, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n")
    infer_file(str(place / "model"), str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    assert (tmp_path / "out.jsonl").read_bytes() == b""


REFUSED = {
    "a shard that is not there": (["--num_shards=2", "--shard_id=2"], "--shard_id is 2", "0 to 1"),
    "a shard without their number": (["--shard_id=1"], "--shard_id is 1"),
    "a stream in shards": (["--input=-", "--num_shards=2", "--shard_id=0"], "needs --input to be a file"),
    "decoding in order to score": (["--mode=score", "--beams=2"], "--beams", "--mode score"),
    "a length in order to score": (["--mode=score", "--max_length=8"], "--max_length", "--mode score"),
    "a seed in order to score": (["--mode=score", "--seed=0"], "--seed", "--mode score"),
    "more results than beams": (["--beams=2", "--num_return=3"], "num_return is 3"),
    "beams and samples": (["--beams=2", "--temperature=1"], "beams and sampling"),
    "a negative temperature": (["--temperature=-1"], "temperature is -1"),
    "no number as a length penalty": (["--beams=2", "--length_penalty=nan"], "length_penalty is nan"),
    "more beams than tokens": (["--beams=100000"], "beams is 100000"),
    "more samples than memory": (["--temperature=1", "--num_return=1000000000000"], "1000000000000", "--num_return"),
    "longer outputs than memory": (["--max_length=1000000000000"], "1000000000000", "--max_length"),
    "no choices": (["--choices=nowhere.txt"], "--choices nowhere.txt: "),
    "a module that is not there": (["--import=nowhere_at_all"], "nowhere_at_all"),
    "an output that is there": (["--output={place}/expected.jsonl"], "exists already", "--overwrite"),
    "an output without a directory": (["--output={place}/none/out.jsonl"], "{place}/none"),
    "gin": (["--gin.BATCH_SIZE=3"], "--gin.…", "--model"),
    "a directory for data": (["--tfds_data_dir=x"], "--tfds_data_dir"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_options_raise_user_error(case, place, expected, capsys):
    arguments, *words = REFUSED[case]
    given = [f"--model={place}/model", f"--input={place}/in.txt", *(a.format(place=place) for a in arguments)]
    commands.run(capsys, "infer", *given).refused(*(word.format(place=place) for word in words))


def test_a_model_without_a_vocabulary_takes_one(tmp_path, capsys, monkeypatch):
    from t5x.inference import loaded

    monkeypatch.setattr(file_inference, "load", loaded.load)
    byte_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    (tmp_path / "in.txt").write_text("a\n")
    given = [f"--model={tmp_path}/model", f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.jsonl"]
    commands.run(capsys, "infer", *given).refused("has no vocabulary", "--vocabulary")
    done = commands.run(capsys, "infer", *given, "--vocabulary=bytes", "--max_length=4", "--output_ids")
    assert done.code == 0, done.err
    assert set(read(tmp_path / "out.jsonl")[0]) == {"inputs", "prediction", "score", "prediction_tokens"}


def test_nan_scores_are_counted(tmp_path, capsys, monkeypatch):
    from safetensors.numpy import load_file, save_file

    from t5x.inference import loaded

    monkeypatch.setattr(file_inference, "load", loaded.load)
    weights = byte_model(tmp_path / "model") / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {"shared.weight": np.full_like(tensors["shared.weight"], np.nan)}, weights)
    (tmp_path / "in.txt").write_text("a\nb\n")
    given = [f"--model={tmp_path}/model", f"--input={tmp_path}/in.txt", f"--output={tmp_path}/out.jsonl"]
    done = commands.run(capsys, "infer", *given, "--max_length=4")
    assert done.code == 0 and "2 result(s) are meaningless" in done.err


def test_a_disk_that_is_full_keeps_what_was_finished(place, expected, tmp_path):
    program = (
        "import resource, signal, sys\n"
        "from t5x.cli import main as cli\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from t5x.inference import output\n"
        "merge = output.merge\n"
        "def limited(*args):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "    return merge(*args)\n"
        "output.merge = limited\n"
        "sys.exit(cli.run_verb('infer', sys.argv[1:]))\n"
    )
    arguments = [
        f"--model={place}/model", f"--input={place}/in.txt", f"--output={tmp_path}/out.jsonl", "--batch_size=8",
        "--checkpoint_period=2", "--max_length=6", "--max_input_length=24",
    ]  # fmt: skip
    done = run_python("-c", program, *arguments)
    assert done.returncode == 2 and "out.jsonl cannot be written: File too large" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert len(list((tmp_path / "tmp-out.jsonl").glob("*.COMPLETED"))) == 3
    infer(place, tmp_path / "out.jsonl", batch_size=8, checkpoint_period=2)
    assert (tmp_path / "out.jsonl").read_bytes() == (place / "expected.jsonl").read_bytes()
