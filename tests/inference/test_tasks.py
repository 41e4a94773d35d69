"""`t5x infer` over tasks: T5X's names, fields and modes, shards, and going on."""

import copy
import hashlib
import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from t5x import configuration, data, decoding, models
from t5x._runtime.errors import UserError
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.data.dataset_config import DatasetConfig
from t5x.files.digests import masked_crc32c
from t5x.inference.loaded import open_model
from t5x.inference.output import Chunks
from t5x.inference.task_inference import TaskExamples
from t5x.partitioning import PjitPartitioner
from t5x.runs import infer
from tests.inference.models import byte_model, texts
from tests.support import commands
from tests.support.marks import mark_slow

COUNT = 20
FEATURES = {name: data.Feature(data.ByteVocabulary(extra_ids=125)) for name in ("inputs", "targets")}
STEPS = [data.preprocessors.tokenize, data.preprocessors.append_eos_after_trim]


def _task(name, examples, split="test", steps=()):
    source = data.FunctionDataSource(lambda split: examples, splits=(split,))
    data.TaskRegistry.add(name, source, output_features=FEATURES, preprocessors=[*steps, *STEPS])


def twice_or_not(example):
    """Every third is left out, the others become two."""
    return [] if len(example["inputs"]) % 3 == 0 else [example, {**example, "inputs": example["inputs"] + "!"}]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    examples = [{"inputs": text, "targets": "ab"[: i % 3], "id": i} for i, text in enumerate(texts(COUNT))]
    names = {"infer_one": examples, "infer_two": examples[:3]}
    for name, of_task in names.items():
        _task(name, of_task)
    _task("infer_other_split", examples, split="train")
    _task("infer_uneven", examples, steps=[twice_or_not])
    data.MixtureRegistry.add("infer_mixed", [*names, "infer_other_split"], default_rate=1.0)
    yield byte_model(tmp_path_factory.mktemp("tasks") / "model")
    data.MixtureRegistry.remove("infer_mixed")
    for name in (*names, "infer_other_split", "infer_uneven"):
        data.TaskRegistry.remove(name)


class QuickModel(models.EncoderDecoderModel):
    """Predictions that depend on the input and on a weight, but compile at once, unlike a decoding loop."""

    def predict_batch_with_aux(self, params, batch, rng=None, **options):
        total = batch["encoder_input_tokens"].sum(1)
        letters = ord("a") + 3 + total[:, None] * jnp.arange(1, 6) % 7
        scores = total * params["token_embedder"]["embedding"][5, 0]
        return jnp.pad(letters, ((0, 0), (0, 1)), constant_values=1), {"scores": scores}


@pytest.fixture(scope="module")
def real_model(place):
    return open_model(str(place))[1]


@pytest.fixture(scope="module")
def model(real_model):
    """For tests of files, whatever the predictions are."""
    return QuickModel(real_model.module, real_model.input_vocabulary, real_model.output_vocabulary, None)


def run(place, model, output, task="infer_one", **options):
    batch_size = options.pop("batch_size", 4)
    paths = infer.infer(
        model=model,
        dataset_cfg=DatasetConfig(task, {"inputs": 24, "targets": 6}, "test", batch_size, shuffle=False, seed=0),
        restore_checkpoint_cfg=RestoreCheckpointConfig(path=str(place)),
        partitioner=PjitPartitioner(),
        output_dir=str(output),
        summarize_config_fn=None,
        **{"checkpoint_period": 2} | options,
    )
    return [Path(path) for path in paths]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def expected(place, model, tmp_path_factory):
    (path,) = run(place, model, tmp_path_factory.mktemp("out"))
    return path


def test_names_and_fields(place, model, expected):
    assert expected.name == "infer_one-predict.jsonl-00000-of-00001"
    assert sorted(os.listdir(expected.parent)) == [expected.name, f"{expected.name}.COMPLETED", "model-info.txt"]
    lines = read(expected)
    assert [line["inputs"]["inputs_pretokenized"] for line in lines] == texts(COUNT)
    assert set(lines[0]) == {"inputs", "prediction", "score"}
    assert set(lines[0]["inputs"]) == {"inputs_pretokenized", "targets_pretokenized"}
    assert "Total number of parameters" in (expected.parent / "model-info.txt").read_text()


def test_a_mixture_task_by_task_and_what_is_complete_stays(place, model, expected, tmp_path, monkeypatch):
    one, two = run(place, model, tmp_path, "infer_mixed")
    assert one.read_bytes() == expected.read_bytes() and len(read(two)) == 3
    monkeypatch.setattr(infer.Engine, "run", None)
    assert run(place, model, tmp_path, "infer_mixed") == [one, two]
    with pytest.raises(UserError, match=r"batch_size differ"):
        run(place, model, tmp_path, "infer_mixed", batch_size=2)


@pytest.mark.parametrize("content", mark_slow(["", "{", "[]"], slow=["{", "[]"]))
def test_a_damaged_completed_file_is_reported(content, place, model, tmp_path):
    (path,) = run(place, model, tmp_path, "infer_two")
    Path(f"{path}.COMPLETED").write_text(content)
    with pytest.raises(UserError, match=r"\.COMPLETED is damaged. Remove it"):
        run(place, model, tmp_path, "infer_two")


@pytest.mark.parametrize("keep_position", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_interrupted_run_resumes(keep_position, place, model, expected, tmp_path, monkeypatch):
    options = {"checkpoint_ds_iter": keep_position}
    with pytest.raises(KeyboardInterrupt):
        run(place, model, tmp_path, write_fn=ends_after(1), **options)
    directory = tmp_path / "tmp-infer_one-predict.jsonl-00000-of-00001"
    name = "infer_one-predict.jsonl-00000-of-00001-chunk00000"
    assert {name, f"{name}.COMPLETED"} <= set(os.listdir(directory))
    (path,) = run(place, model, tmp_path, **options)
    assert path.read_bytes() == expected.read_bytes() and not directory.exists()


def ends_after(count):
    """A write_fn that is killed when it has written so many chunks."""
    written = []

    def write(path, *args, **kwargs):
        if len(written) == count:
            raise KeyboardInterrupt
        written.append(path)
        infer.write_inferences_to_file(path, *args, **kwargs)

    return write


@pytest.mark.slow
def test_a_killed_run_of_another_mode_does_not_interfere(place, model, expected, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(place, model, tmp_path, mode="score", write_fn=ends_after(1))
    (path,) = run(place, model, tmp_path)
    assert path.read_bytes() == expected.read_bytes()


def test_a_run_that_was_killed_before_it_removed_its_chunks_is_cleaned_up(place, model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Chunks, "remove", lambda chunks: (_ for _ in ()).throw(KeyboardInterrupt))
        run(place, model, tmp_path, "infer_two")
    (path,) = run(place, model, tmp_path, "infer_two")
    assert sorted(os.listdir(tmp_path)) == [path.name, f"{path.name}.COMPLETED", "model-info.txt"]


def test_a_third_party_directory_is_refused_and_left_alone(place, model, tmp_path):
    theirs = tmp_path / "tmp-infer_two-predict.jsonl-00000-of-00001" / "note.txt"
    theirs.parent.mkdir()
    theirs.write_text("mine")
    with pytest.raises(UserError, match=f"{theirs.parent} exists"):
        run(place, model, tmp_path, "infer_two")
    assert theirs.read_text() == "mine" and os.listdir(theirs.parent) == ["note.txt"]
    theirs.unlink()
    (path,) = run(place, model, tmp_path, "infer_two")
    theirs.parent.mkdir()
    theirs.write_text("mine")
    assert run(place, model, tmp_path, "infer_two") == [path] and theirs.read_text() == "mine"


def flip(path):
    """Change a byte of a file, but neither its size nor its time of modification."""
    times, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_an_output_that_has_changed_is_refused_before_anything_is_computed(place, model, tmp_path, monkeypatch):
    one, two = run(place, model, tmp_path, "infer_mixed")
    one.unlink()
    expected = two.read_bytes()
    flip(two)
    with monkeypatch.context() as patch, pytest.raises(UserError, match=f"{two} has changed since it was written"):
        patch.setattr(infer.Engine, "run", None)
        run(place, model, tmp_path, "infer_mixed")
    two.unlink()
    assert run(place, model, tmp_path, "infer_mixed") == [one, two] and two.read_bytes() == expected


@pytest.mark.parametrize("changed", ["weights", "data"])
def test_replaced_weights_or_data_are_another_job(changed, place, model, tmp_path):
    shutil.copytree(place, tmp_path / "model")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"inputs": t, "targets": t}) + "\n" for t in texts(12)))

    def infer_file(**options):
        source = data.JsonLinesDataSource({"test": str(tmp_path / "in.jsonl")})
        return run(tmp_path / "model", model, tmp_path, data.Task("infer_file", source, FEATURES, STEPS), **options)

    with pytest.raises(KeyboardInterrupt):
        infer_file(write_fn=ends_after(1))
    path = tmp_path / {"weights": "model/model.safetensors", "data": "in.jsonl"}[changed]
    times = path.stat()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1_000_000_000))
    with pytest.raises(UserError, match=f"{changed} was '"):
        infer_file()
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert len(read(*infer_file())) == 12
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns + 1_000_000_000))
    with pytest.raises(UserError, match=f"{changed} differ"):
        infer_file()


def test_shards_one_after_the_other_are_the_whole(place, model, tmp_path):
    (whole,) = run(place, model, tmp_path, "infer_uneven")
    parts = [
        run(place, model, tmp_path, "infer_uneven", num_shards=3, shard_id=i, checkpoint_period=1)[0] for i in (2, 0, 1)
    ]
    assert sorted(parts)[1].name == "infer_uneven-predict.jsonl-00001-of-00003"
    lines = [line for part in sorted(parts) for line in read(part)]
    without = lambda lines: [(line["inputs"], line["prediction"]) for line in lines]
    assert without(lines) == without(read(whole))
    np.testing.assert_allclose([li["score"] for li in lines], [li["score"] for li in read(whole)], rtol=1e-5)
    made = [out for text in texts(COUNT) for out in ([] if len(text) % 3 == 0 else [text, text + "!"])]
    assert [line["inputs"]["inputs_pretokenized"] for line in lines] == made


def test_scores_with_and_without_intermediates(place, real_model, tmp_path, monkeypatch):
    model = real_model
    (path,) = run(place, model, tmp_path / "plain", mode="score")
    plain = read(path)
    assert path.name == "infer_one-score.jsonl-00000-of-00001" and set(plain[0]) == {"inputs", "score"}
    score_batch = models.EncoderDecoderModel.score_batch
    monkeypatch.setattr(
        models.EncoderDecoderModel, "score_batch",
        lambda self, params, batch: score_batch(self, params, batch, return_intermediates=True),
    )  # fmt: skip
    got = []
    (path,) = run(
        place, model, tmp_path / "aux", mode="score", keep_aux_as_numpy=True, checkpoint_period=5,
        write_fn=lambda *args, **kwargs: (got.append(args[1]), infer.write_inferences_to_file(*args, **kwargs)),
    )  # fmt: skip
    for line, with_aux in zip(plain, read(path), strict=True):
        (token_scores,) = with_aux["aux"]["decoder"]["token_scores"]
        assert len(token_scores) == 6  # TASK_FEATURE_LENGTHS, whatever the batch
        np.testing.assert_allclose([sum(token_scores), with_aux["score"]], line["score"], rtol=1e-5)
    assert got[0][1]["decoder"]["target_tokens"][0].shape == (COUNT, 6)


@pytest.mark.slow
def test_predictions_with_aux_and_what_of_the_inputs_is_written(place, real_model, tmp_path):
    model = real_model
    (expected,) = run(place, model, tmp_path / "plain")

    def write(*args, **kwargs):
        infer.write_inferences_to_file(*args, **kwargs, output_ids=True, input_fields_to_include=["targets"])

    (path,) = run(place, model, tmp_path, mode="predict_with_aux", write_fn=write, file_extension="json")
    assert path.name == "infer_one-predict_with_aux.json-00000-of-00001"
    vocabulary = FEATURES["targets"].vocabulary
    for line, plain in zip(read(path), read(expected), strict=True):
        assert set(line) == {"inputs", "prediction", "prediction_tokens", "aux"}
        assert set(line["inputs"]) == {"targets"} and line["inputs"]["targets"][-1] == 1
        assert line["prediction"] == plain["prediction"] == vocabulary.decode(line["prediction_tokens"])
        assert line["aux"]["scores"] == pytest.approx(plain["score"])


def test_chunks_may_stay_and_be_merged_by_a_function_of_the_users_own(place, model, tmp_path):
    (path,) = run(place, model, tmp_path / "kept", "infer_two", merge_chunked_results=False, checkpoint_period=1)
    assert not path.exists() and Path(f"{path}.COMPLETED").exists()
    assert (tmp_path / "kept" / f"tmp-{path.name}" / f"{path.name}-chunk00000").exists()
    asked = []

    def merge(output_dir, output_fname, tmp_dir, step):
        asked.append((output_dir, output_fname, sorted(os.listdir(tmp_dir)), step))

    run(place, model, tmp_path / "own", "infer_two", merge_fn=merge)
    ((directory, name, files, _),) = asked
    assert directory == str(tmp_path / "own") and name == path.name and f"{name}-chunk00000" in files


def test_a_chunk_that_stayed_and_has_changed_is_computed_again(place, model, tmp_path, caplog, monkeypatch):
    options = {"merge_chunked_results": False, "checkpoint_period": 1}
    (path,) = run(place, model, tmp_path, **options)
    chunks = [tmp_path / f"tmp-{path.name}" / f"{path.name}-chunk{i:05}" for i in range(5)]
    expected = [chunk.read_bytes() for chunk in chunks]
    flip(chunks[3])
    run(place, model, tmp_path, **options)
    assert [chunk.read_bytes() for chunk in chunks] == expected
    assert [r.getMessage().split()[0] for r in caplog.records if "has changed" in r.message] == [str(chunks[3])]
    monkeypatch.setattr(infer.Engine, "run", None)
    run(place, model, tmp_path, **options)


def test_the_output_is_its_chunks_each_once_and_in_order(place, model, expected, tmp_path):
    chunks = []

    def merge(output_dir, output_fname, tmp_dir, step):
        names = sorted(name for name in os.listdir(tmp_dir) if name[-5:].isdigit())
        chunks.extend(Path(tmp_dir, name).read_bytes() for name in names)
        infer.merge_chunks_to_file(output_dir, output_fname, tmp_dir, step)

    (path,) = run(place, model, tmp_path, merge_fn=merge, checkpoint_period=1)
    assert len({*chunks}) == len(chunks) == 5
    assert path.read_bytes() == b"".join(chunks)
    assert [line["inputs"] for line in read(path)] == [line["inputs"] for line in read(expected)]


@pytest.mark.slow
def test_more_chunks_than_five_digits_count_are_merged_in_their_order(tmp_path):
    said = {0: b"first ", 10_001: b"second ", 99_999: b"third ", 100_001: b"last"}
    for number in range(100_002):
        with open(f"{tmp_path}/out-chunk{number:05}", "wb", buffering=0) as file:
            file.write(said.get(number, b""))
    infer.merge_chunks_to_file(str(tmp_path), "out", str(tmp_path))
    assert (tmp_path / "out").read_bytes() == b"first second third last"
    for number in range(100_002):
        os.unlink(f"{tmp_path}/out-chunk{number:05}")


REFUSED = {
    "a mode": ({"mode": "dream"}, "infer.mode is 'dream'"),
    "a shard": ({"shard_id": 2, "num_shards": 2}, "infer.shard_id is 2: it must be 0 to 1"),
    "a period": ({"checkpoint_period": 0}, "infer.checkpoint_period is 0"),
    "a feature": ({"output_vocab_feature_name": "summary"}, "output_vocab_feature_name is 'summary'"),
    "a split": ({"task": "infer_other_split"}, "has no split 'test'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_arguments_raise_user_error(case, place, model, tmp_path):
    options, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        run(place, model, tmp_path, **options)


def tf_records(path, texts_of_records):
    """Writes TFRecord files of tf.train.Example by their description, with a feature `inputs`."""

    def field(number, content):
        size = len(content)
        head = bytes([number << 3 | 2]) + (bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7]))
        return head + content

    def record(text):
        entry = field(1, b"inputs") + field(2, field(1, field(1, text.encode())))
        example = field(1, field(1, entry))
        length = len(example).to_bytes(8, "little")
        crc = lambda data: masked_crc32c(data).to_bytes(4, "little")
        return length + crc(length) + example + crc(example)

    path.write_bytes(b"".join(map(record, texts_of_records)))
    return path


@pytest.mark.slow
def test_tfrecord_files_by_gin(place, real_model, tmp_path, capsys):
    file = tf_records(tmp_path / "in.tfrecord", texts(COUNT))
    sizes = {"emb_dim": 16, "num_heads": 3, "head_dim": 2, "mlp_dim": 6, "num_encoder_layers": 1} | {
        "num_decoder_layers": 1, "mlp_activations": "('relu',)", "logits_via_embedding": True,
    }  # fmt: skip
    arguments = [
        "--gin_file=t5x/examples/demo/model.gin", "--gin_file=t5x/configs/runs/infer_from_tfexample_file.gin",
        *(f"--gin.network.T5Config.{name}={value}" for name, value in sizes.items()),
        "--gin.MODEL=@models.EncoderDecoderModel()", "--gin.seqio.ByteVocabulary.extra_ids=125",
        f"--gin.TF_EXAMPLE_FILE_PATHS=['{file}']", "--gin.TF_EXAMPLE_FILE_TYPE=tfrecord",
        "--gin.FEATURE_LENGTHS={'inputs': 24, 'targets': 6}", f"--gin.CHECKPOINT_PATH={place}",
        f"--gin.INFER_OUTPUT_DIR={tmp_path / 'out'}", "--gin.utils.DatasetConfig.batch_size=4",
        "--gin.infer_script.write_inferences_to_file.output_ids=True",
        "--gin.models.EncoderDecoderModel.predict_batch_with_aux.num_decodes=1",
    ]  # fmt: skip
    try:
        for shard in (0, 1):
            configuration.clear()
            done = commands.run(capsys, "infer", *arguments, "--num_shards=2", f"--shard_id={shard}")
            assert done.code == 0, done.err
        configuration.clear()
        commands.run(capsys, "infer", *arguments, "--num_shards=2", "--shard_id=5").refused("infer.shard_id is 5")
        for name, value in (
            ("models.EncoderDecoderModel.default_decoder_params", {"num_decodes": 10**12}),
            ("FEATURE_LENGTHS", {"inputs": 24, "targets": 10**12}),
        ):
            configuration.clear()
            out = f"--gin.INFER_OUTPUT_DIR={tmp_path / name}"
            commands.run(capsys, "infer", *arguments, out, f"--gin.{name}={value}").refused(str(10**12), "memory")
    finally:
        configuration.clear()
    paths = sorted((tmp_path / "out").glob("infer_??????????-predict.jsonl-*-of-00002"))
    lines = [line for path in paths for line in read(path)]
    assert [line["inputs"]["inputs_pretokenized"] for line in lines] == texts(COUNT)
    model = copy.copy(real_model)
    model.decode_fn = decoding.beam_search  # the default of gin files
    (expected,) = run(place, model, tmp_path / "python")
    same = [i for i, text in enumerate(texts(COUNT)) if len(text) < 24]  # what is cut keeps its EOS only here
    for i in same:
        assert lines[i]["prediction"] == read(expected)[i]["prediction"]
        assert lines[i]["score"] == pytest.approx(read(expected)[i]["score"], rel=1e-5)
    assert all("prediction_tokens" in line for line in lines)
    assert (tmp_path / "out" / "config.gin").exists()


def test_a_task_of_tfrecord_files_has_its_name_of_them(tmp_path):
    file = tf_records(tmp_path / "in.tfrecord", ["a"])
    name = infer.create_task_from_tfexample_file([str(file)], "tfrecord", "inputs", None, FEATURES)
    assert name == "infer_" + hashlib.md5(f"{file}:inputs:".encode()).hexdigest()[:10]
    assert name == infer.create_task_from_tfexample_file([str(file)], "tfrecord", "inputs", None, FEATURES)
    with pytest.raises(UserError, match="must be 'tfrecord'"):
        infer.create_task_from_tfexample_file([str(file)], "sstable", "inputs", None, FEATURES)


def test_the_position_counts_examples_that_became_several(place, model, tmp_path):
    cfg = DatasetConfig("infer_uneven", {"inputs": 24, "targets": 6}, "test", 4, shuffle=False, seed=0)
    examples = TaskExamples(cfg.mixture_or_task(), cfg, cfg.task_feature_lengths)
    whole = list(examples.read())
    for i, placed in enumerate(whole):
        rest = [p.example["inputs_pretokenized"] for p in examples.read(placed.after)]
        assert rest == [p.example["inputs_pretokenized"] for p in whole[i + 1 :]]
    assert len({placed.index for placed in whole}) == len(whole)
