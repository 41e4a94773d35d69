"""Exports and a server of a real Flan-T5 small, compared with transformers."""

import gzip
import json
import shutil
import subprocess
import sys

import pytest

import t5x
from t5x.apps.exporting.checking import INT8_WEIGHTS_LIMIT, Sample
from t5x.apps.exporting.exporter import export
from t5x.apps.exporting.programs import Exportable
from t5x.inference.generation import Decoding
from tests.apps.serving.servers import serving
from tests.checkpoints.formats import huggingface_models
from tests.support.paths import SHARED
from tests.support.programs import environment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not SHARED.is_dir(), reason="the folder ../shared/data is not there"),
]
MAX_LENGTH = 24


@pytest.fixture(scope="module")
def inputs():
    with gzip.open(SHARED / "multi30k_ende" / "val.en.gz", "rt") as file:
        return [line.strip() for line in file][:100]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "flan"
    huggingface_models.real_directory(path, SHARED)
    shutil.copy(SHARED / "t5_vocab" / "spiece.model", path)
    return path


def generated(directory, inputs, **options):
    """What transformers generates in float32: (strings, scores of beams)."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    network = transformers.T5ForConditionalGeneration.from_pretrained(directory, dtype=torch.float32).eval()
    model = t5x.load(str(directory), dtype="float32")
    rows = [model.input_ids(text)[0] for text in inputs]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    made = network.generate(
        ids, attention_mask=(ids > 0).long(), max_new_tokens=MAX_LENGTH, do_sample=False, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=1, return_dict_in_generate=True, output_scores=True, **options,
    )  # fmt: skip
    texts = [model.decode([i for i in row if i > 0]) for row in made.sequences.tolist()]
    return texts, made.sequences_scores.tolist() if options.get("num_beams", 1) > 1 else None


def test_transformers_generates_from_an_export_what_t5x_infer_does(directory, inputs, tmp_path):
    export(str(directory), str(tmp_path / "exported"), "hf", max_length=4)
    (tmp_path / "inputs.txt").write_text("\n".join(inputs) + "\n")
    command = [
        sys.executable, "-m", "t5x", "infer", "--model", directory, "--input", tmp_path / "inputs.txt", "--output",
        tmp_path / "made.jsonl", "--dtype", "float32", "--max_target_length", MAX_LENGTH,
    ]  # fmt: skip
    subprocess.run(list(map(str, command)), check=True, env=environment())
    made = [json.loads(line)["prediction"] for line in (tmp_path / "made.jsonl").read_text().splitlines()]
    assert made == generated(tmp_path / "exported", inputs)[0]
    assert len(set(made)) > 60  # they are not all the same


def test_served_beams_are_those_of_transformers(directory, inputs, tmp_path):
    inputs = inputs[:24]
    with serving(directory, tmp_path, "--dtype=float32") as server:
        fields = {"max_new_tokens": MAX_LENGTH, "num_beams": 4, "num_return_sequences": 4}
        response = server.post("/v1/completions", prompt=inputs, **fields)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    texts, scores = generated(directory, inputs, num_beams=4, num_return_sequences=4)
    assert [choice["text"] for choice in choices] == texts
    assert [choice["score"] for choice in choices] == pytest.approx(scores, abs=1e-4)


def test_int8_weights_cost_little(directory, inputs):
    model = t5x.load(str(directory), dtype="float32")
    sample = Sample(inputs[:50])
    before = sample.loss(model)
    Exportable(model, Decoding(), 64, MAX_LENGTH).quantize()
    rise = sample.loss(model) - before
    assert rise < INT8_WEIGHTS_LIMIT / 2
    assert rise > -0.01
