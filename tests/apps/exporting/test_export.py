"""Exports, compared with the model and run by other programs."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import t5x
from t5x._runtime.errors import UserError
from t5x.apps.exporting import checking, external, saved_model
from t5x.apps.exporting.exporter import export, new_destination
from t5x.apps.exporting.programs import Exportable, dequantize, quantize
from t5x.data.vocabularies import ByteVocabulary
from t5x.files import locks
from t5x.inference.generation import Decoding
from tests.checkpoints.formats import huggingface_models
from tests.support.paths import SHARED
from tests.support.programs import reference_python, run_reference

HERE = Path(__file__).parent
TEXTS = ["Good morning.", "What is the capital of France?", "one two three four five six seven eight nine ten"]
LENGTHS = {"max_input_length": 20, "max_length": 6}
BEAMS = Decoding(beams=3)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny T5 1.1 of random values with the real vocabulary of T5."""
    if not SHARED.is_dir():
        pytest.skip("the folder ../shared/data is not there")
    path = tmp_path_factory.mktemp("models") / "tiny"
    huggingface_models.model("T5 1.1", vocab_size=32128, num_layers=1, num_decoder_layers=1).save_pretrained(path)
    shutil.copy(SHARED / "t5_vocab" / "spiece.model", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"decoder_start_token_id": 0}))
    return path


@pytest.fixture(scope="module")
def model(directory):
    return t5x.load(str(directory), dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("beams", [1, 3])
def test_programs_for_any_number_of_rows_compute_what_the_model_does(model, beams):
    exportable = Exportable(model, Decoding(beams=beams), **LENGTHS)
    programs = exportable.programs()
    lowered = {}

    def run(name, *ids):
        if name not in lowered:
            lowered[name] = exportable.export(programs[name], ["cpu"])
        return lowered[name].call(exportable.arrays, *ids)

    report = checking.compare_ids(exportable, run)  # in batches of one and three; raises if they differ
    assert report.count("4 of 4 outputs equal") == (1 if beams == 1 else 2)
    ids = checking.padded([model.input_ids(text, 20)[0] for text in TEXTS], 20)
    paths = [str(HERE).encode(), os.path.dirname(t5x.__file__).encode()]
    assert not any(path in lowered["predict"].mlir_module_serialized for path in paths)
    assert run("encode", ids)["encoded"].shape == (3, 20, 12)
    with pytest.raises(checking.WrongExport, match="score"):
        checking.compare_ids(exportable, lambda name, *ids: _moved(run(name, *ids)))


def _moved(outputs):
    """Outputs with other scores."""
    return {name: x + 0.01 if name == "score" else x for name, x in outputs.items()}


def lines_of(done):
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def as_lines(calls):
    return "".join(json.dumps(call) + "\n" for call in calls)


def exported(*arguments):
    """Run programs/export_both.py, where TensorFlow is installed; return the lines that it prints."""
    return lines_of(run_reference(HERE / "programs" / "export_both.py", *arguments))


@pytest.mark.slow
def test_tensorflow_alone_and_jax_alone_return_what_the_model_does(tmp_path, directory, model):
    lines = exported(directory, tmp_path)
    assert sum("checked against the original" in line for line in lines) == 2
    predicted = model.generate(TEXTS, beams=3, **LENGTHS)
    greedy = model.generate(TEXTS, **LENGTHS)
    pairs = [(text, "a b") for text in TEXTS]
    ranked = model.rank_pairs([("a b", text) for text in TEXTS], max_length=20)
    scored = model.score(pairs, max_input_length=20)

    calls = [
        ["predict", {"text_batch": TEXTS}],
        ["greedy", {"text_batch": TEXTS[:1]}],
        ["score", {"text_batch": TEXTS, "targets": ["a b"] * 3}],
        ["rank", {"query": ["a b"] * 3, "document": TEXTS}],
    ]
    program = [HERE / "programs" / "run_saved_model.py", tmp_path / "saved" / "1", "text"]
    found = [json.loads(line) for line in lines_of(run_reference(*program, input=as_lines(calls)))]
    assert found[0]["text"] == [each.text for each in predicted]
    assert found[1]["text"] == [greedy[0].text]
    np.testing.assert_allclose(found[0]["score"], [each.score for each in predicted], atol=1e-4)
    np.testing.assert_allclose(found[2]["score"], scored, atol=1e-4)
    np.testing.assert_allclose(found[3]["score"], [each.score for each in ranked], atol=1e-4)

    ids = checking.padded([model.input_ids(text, 20)[0] for text in TEXTS], 20).tolist()
    program = [HERE / "programs" / "run_stablehlo.py", tmp_path / "hlo"]
    done = run_reference(*program, input=as_lines([["predict", {"input_ids": ids}]]))
    found = json.loads(lines_of(done)[0])
    assert [model.decode([int(i) for i in row]) for row in found["output_ids"]] == [each.text for each in predicted]
    np.testing.assert_allclose(found["score"], [each.score for each in predicted], atol=1e-4)


@pytest.mark.slow
def test_tensorflow_without_its_text_package_runs_token_ids(tmp_path, directory, model):
    python = reference_python()
    exported(directory, tmp_path, "ids")
    texts = [" ".join(TEXTS[i % 3].split()[: 1 + i // 3]) for i in range(17)]
    inputs = [model.input_ids(text, 20)[0] for text in texts]
    targets = [model.target_ids(text[:8], 6)[0] for text in reversed(texts)]
    labels = [model.target_ids(word)[0][0] for word in ("true", "false")]
    options = {"max_input_length": 20, "batch_size": 17}
    beams = {"greedy": 1, "predict": 3}
    made = {name: model.generate(texts, max_length=6, beams=n, **options) for name, n in beams.items()}
    numbers = {
        "score": model.scores(inputs, targets, **options), "rank": model.label_logits(inputs, labels, **options),
        **{name: [each.score for each in found] for name, found in made.items()},
    }  # fmt: skip
    calls = []
    for rows in (1, 3, 17):
        ids = {"input_ids": checking.padded(inputs[:rows], 20).tolist()}
        target_ids = checking.padded(targets[:rows], 6).tolist()
        calls += [["greedy", ids], ["predict", ids], ["score", ids | {"target_ids": target_ids}]]
        calls += [["rank", ids | {"label_ids": [labels] * rows}]]
    command = [python, HERE / "programs" / "run_saved_model.py", tmp_path / "saved" / "1"]  # without seqio's imports
    done = subprocess.run(command, input=as_lines(calls), capture_output=True, text=True, timeout=900)
    for (name, given), line in zip(calls, lines_of(done), strict=True):
        rows, found = len(given["input_ids"]), json.loads(line)
        np.testing.assert_allclose(found["logits" if name == "rank" else "score"], numbers[name][:rows], atol=1e-4)
        if name in made:
            expected = checking.padded([each.tokens for each in made[name][:rows]], 6)
            assert found["output_ids"] == expected.tolist()


@pytest.mark.slow
def test_transformers_reads_an_export_and_a_wrong_one_is_not_kept(tmp_path, directory, monkeypatch, capsys):
    export(str(directory), str(tmp_path / "good"), "hf", max_length=4)
    assert "4 of 4 outputs equal; score within" in capsys.readouterr().out
    assert t5x.load(str(tmp_path / "good"), dtype="float32").generate("a", max_length=4).text is not None

    def damaged(source, destination, **options):
        original(source, destination, **options)
        path = Path(destination) / "model.safetensors"
        content = bytearray(path.read_bytes())
        content[-4000:] = np.ones(1000, np.float32).tobytes()
        path.write_bytes(content)
        (Path(destination) / "t5x_checksums.json").unlink(missing_ok=True)

    original = external.convert
    monkeypatch.setattr(external, "convert", damaged)
    with pytest.raises(checking.WrongExport):
        export(str(directory), str(tmp_path / "bad"), "hf", max_length=4)
    assert sorted(os.listdir(tmp_path)) == ["good"]


@pytest.mark.slow
def test_int8_rounds_to_half_a_step_per_channel_and_keeps_wo(model):
    arrays = Exportable(model, BEAMS, **LENGTHS).arrays
    found = quantize(arrays)
    back = dequantize(found, np.float32)
    assert back.keys() == arrays.keys()
    kernel = "encoder/layers_0/mlp/wi_0/kernel"
    assert found[kernel].dtype == np.int8 and found["token_embedder/embedding"].dtype == np.int8
    assert found["encoder/layers_0/mlp/wo/kernel"].dtype == np.float32
    steps = np.abs(arrays[kernel]).max(axis=0) / 127
    assert steps.shape == (20,) and (np.abs(back[kernel] - arrays[kernel]) <= steps / 2 * 1.0001).all()


@pytest.mark.parametrize(
    ("format", "options", "words"),
    [
        ("tflite", {}, "one of savedmodel, stablehlo"),
        ("hf", {"int8": True}, "--int8 is for"),
        ("stablehlo", {"decoding": Decoding(temperature=1.0)}, "greedily or with beams"),
        ("stablehlo", {"max_length": 0}, "max_length is 0"),
    ],
)
def test_a_wrong_option_is_refused(tmp_path, directory, format, options, words):
    with pytest.raises(UserError, match=words):
        export(str(directory), str(tmp_path / "made"), format, **options)
    assert not os.listdir(tmp_path)


def test_a_destination_that_cannot_be_written_is_refused(tmp_path, directory):
    (tmp_path / "file").write_text("mine")
    for destination, words in (
        (tmp_path / "file", "exists already"), (tmp_path / "file" / "in", "cannot be created"),
        ("gs://bucket/model", "remote"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=words):
            export(str(directory), str(destination), "hf")
    assert (tmp_path / "file").read_text() == "mine"


def test_temporaries_of_killed_exports_are_removed_but_not_of_running_ones(tmp_path):
    left, used = (tmp_path / f"made.tmp-{pid}-00000000-0123abcd" for pid in (1, 2))
    for directory in (left, used, tmp_path / "made.tmp-mine"):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"half")
    with locks.locked(used), new_destination(str(tmp_path / "made")) as directory:
        Path(directory, "file").write_text("whole")
    assert sorted(os.listdir(tmp_path)) == ["made", "made.tmp-2-00000000-0123abcd", "made.tmp-mine"]


@pytest.mark.parametrize("name", ["model.safetensors", "spiece.model", "config.json"])
def test_a_model_with_links_out_of_its_directory_is_refused(tmp_path, directory, name):
    model = tmp_path / "model"
    shutil.copytree(directory, model)
    (model / name).unlink()
    (model / name).symlink_to(directory / name)
    with pytest.raises(UserError, match=f"{name} is a symbolic link"):
        export(str(model), str(tmp_path / "made"), "hf")
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(("format", "package"), [("ctranslate2", "ctranslate2"), ("onnx", "optimum-onnx")])
def test_a_missing_package_is_named(tmp_path, directory, monkeypatch, format, package):
    for name in ("ctranslate2", "optimum", "optimum.onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=f"pip install {package}"):
        export(str(directory), str(tmp_path / "made"), format)
    assert not os.listdir(tmp_path)


def test_a_vocabulary_that_tensorflow_cannot_run_is_refused():
    with pytest.raises(UserError, match="--token_ids"):
        saved_model.check_vocabulary(ByteVocabulary())
