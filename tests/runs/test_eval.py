"""Offline evaluation: what it scores, how it goes on, what it prints, and what it refuses."""

import dataclasses
import json
import math
import shutil
import threading
import time

import jax
import numpy as np
import pytest
import sacrebleu

import t5x
from t5x import configuration, data
from t5x._runtime.errors import TemporaryError, UserError
from t5x.checkpoints import CheckpointStore
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.checkpoints.model_description import sidecars
from t5x.cli import file_evaluation
from t5x.data.dataset_config import DatasetConfig
from t5x.models import EncoderDecoderModel
from t5x.network import Transformer
from t5x.optimizers.adafactor import Adafactor
from t5x.partitioning import PjitPartitioner
from t5x.runs import eval
from t5x.runs.eval import evaluate
from t5x.trainer import StateLayout, Trainer
from t5x.trainer.restore import RunState
from tests.support import tiny
from tests.support.commands import run

VOCABULARY = data.ByteVocabulary()
CONFIG = tiny.BYTES
NETWORK = ("vocab_size", "emb_dim", "num_heads", "head_dim", "mlp_dim", "num_encoder_layers", "num_decoder_layers")
LENGTHS = {"inputs": 8, "targets": 4}
PAIRS = [{"q": f"{i} + {i}", "a": 2 * i} for i in range(5)]


def make_model() -> EncoderDecoderModel:
    return EncoderDecoderModel(Transformer(CONFIG), VOCABULARY, VOCABULARY, Adafactor())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    """Checkpoints of steps 0, 1 and 2."""
    directory = tmp_path_factory.mktemp("run")
    model = make_model()
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes(LENGTHS))
    with CheckpointStore(directory) as store:
        for step in range(3):
            state = tiny.random_state(layout, seed=step, step=step)
            store.save(step, state.state_dict(), sidecars=sidecars(model, None) | RunState(0).sidecars())
    return directory


@pytest.fixture(autouse=True)
def fresh():
    """Registries and a configuration as a new process has them."""
    tasks = dict(data.TaskRegistry._entries)
    configuration.clear()
    yield
    configuration.clear()
    data.TaskRegistry._entries.clear()
    data.TaskRegistry._entries.update(tasks)


@pytest.fixture
def pairs_file(tmp_path) -> str:
    path = tmp_path / "test.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return str(path)


def sums(name: str = "sums", metric_fns=None, pairs=PAIRS) -> data.Task:
    examples = [{"inputs": pair["q"], "targets": str(pair["a"])} for pair in pairs]
    return data.Task(
        name,
        data.FunctionDataSource(lambda split: examples, splits=("test",)),
        {"inputs": data.Feature(VOCABULARY), "targets": data.Feature(VOCABULARY)},
        [data.preprocessors.tokenize, data.preprocessors.append_eos],
        metric_fns=[lambda targets, scores: {"score": np.mean(scores)}] if metric_fns is None else metric_fns,
    )


def score(model_dir, output_dir, task=None, mode="all", rules=None, **options):
    options = {"summarize_config_fn": None, "inference_evaluator_cls": WithJson} | options
    return evaluate(
        model=make_model(),
        dataset_cfg=DatasetConfig(task or sums(), LENGTHS, "test", 2, shuffle=False, seed=0),
        restore_checkpoint_cfg=RestoreCheckpointConfig(
            path=[str(path) for path in model_dir] if isinstance(model_dir, list) else str(model_dir),
            mode=mode,
            **(rules or {}),
        ),
        partitioner=PjitPartitioner(),
        output_dir=str(output_dir),
        **options,
    )


def WithJson(**arguments):
    return data.Evaluator(logger_cls=[data.JSONLogger], **arguments)


# --- From Python ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_modes_take_one_the_newest_or_all(model_dir, tmp_path):
    every = score(model_dir, tmp_path / "all")
    assert list(every) == [0, 1, 2]
    assert len({figures["sums"]["score"] for figures in every.values()}) == 3
    assert score(model_dir / "checkpoint_1", tmp_path / "one", mode="specific") == {1: every[1]}
    assert score(model_dir, tmp_path / "newest", mode="latest") == {2: every[2]}
    assert (tmp_path / "all" / "eval.sums.ckpt").read_text().split() == [
        str(model_dir / f"checkpoint_{step}") for step in range(3)
    ]
    assert not (tmp_path / "one" / "eval.sums.ckpt").exists()
    assert "decoder/logits_dense/kernel" in (tmp_path / "all" / "model-info.txt").read_text().replace(".", "/")


def test_a_restarted_evaluation_skips_finished_checkpoints(model_dir, tmp_path):
    class Killed(BaseException):
        pass

    seen = []

    def dying(**arguments):
        evaluator = WithJson(**arguments)
        compute = evaluator.evaluate

        def evaluate(*, step, **functions):
            seen.append(step)
            results = compute(step=step, **functions)
            if step == 1 and seen == [0, 1]:
                raise Killed  # its metrics are written, but nothing else knows of it
            return results

        evaluator.evaluate = evaluate
        return evaluator

    with pytest.raises(Killed):
        score(model_dir, tmp_path / "killed", inference_evaluator_cls=dying)
    results = score(model_dir, tmp_path / "killed", inference_evaluator_cls=dying)
    assert seen == [0, 1, 1, 2]
    assert results == score(model_dir, tmp_path / "undisturbed")
    files = [tmp_path / name / "inference_eval" / "sums-metrics.jsonl" for name in ("killed", "undisturbed")]
    assert files[0].read_text() == files[1].read_text()
    assert score(model_dir, tmp_path / "killed", inference_evaluator_cls=dying) == results
    assert seen == [0, 1, 1, 2]


def test_a_run_is_followed_until_a_step(model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(eval, "_POLL_SECONDS", 0.05)
    run, output = tmp_path / "run", tmp_path / "followed"
    done = output / "eval.sums.ckpt"

    def train() -> None:
        """Save a checkpoint once the one before was evaluated; keep only the newest."""
        for step in range(3):
            while step and f"checkpoint_{step - 1}" not in (done.read_text() if done.exists() else ""):
                time.sleep(0.05)
            shutil.copytree(model_dir / f"checkpoint_{step}", tmp_path / "saving")
            (tmp_path / "saving").rename(run / f"checkpoint_{step}")
            shutil.rmtree(run / f"checkpoint_{step - 1}", ignore_errors=True)

    run.mkdir()
    (run / "config.gin").touch()  # a run that has begun and saved nothing
    trainer = threading.Thread(target=train)
    trainer.start()
    followed = score(run, output, wait_until_step=2)
    trainer.join()
    assert followed == score(model_dir, tmp_path / "all")
    assert score(run, output, wait_until_step=2) == {2: followed[2]}  # started again: it is done
    with pytest.raises(UserError, match="'all'"):
        score(run, tmp_path / "newest", mode="latest", wait_until_step=2)


def test_a_checkpoint_that_disappears_while_it_is_read_may_be_tried_again(model_dir, tmp_path, monkeypatch):
    run = tmp_path / "run"
    shutil.copytree(model_dir / "checkpoint_1", run / "checkpoint_1")

    def restore(*arguments):
        shutil.rmtree(run / "checkpoint_1")
        raise FileNotFoundError("state/manifest.ocdbt")

    monkeypatch.setattr(eval, "restore_params", restore)
    with pytest.raises(TemporaryError, match="checkpoint_1 was deleted"):
        score(run, tmp_path / "output", wait_until_step=1)


def test_a_list_of_model_dirs_is_their_newest_checkpoints(model_dir, tmp_path):
    seen = []

    def noting(**arguments):
        evaluator = WithJson(**arguments)
        compute = evaluator.evaluate
        evaluator.evaluate = lambda *, step, **functions: (seen.append(step), compute(step=step, **functions))[1]
        return evaluator

    directories = [tmp_path / name for name in ("some-7", "others")]
    add = lambda to, step: shutil.copytree(model_dir / f"checkpoint_{step}", to / f"checkpoint_{step}")
    for step, directory in enumerate(directories):
        add(directory, step)
    run = lambda paths, mode="latest": score(paths, tmp_path / "out", mode=mode, inference_evaluator_cls=noting)
    first = run(directories)
    assert list(first) == seen == [0, 1]
    assert (tmp_path / "out" / "eval.sums.ckpt").read_text().split() == [
        str(directory / f"checkpoint_{step}") for step, directory in enumerate(directories)
    ]
    assert run(directories) == first and seen == [0, 1]
    add(directories[1], 2)
    assert list(run(directories)) == [0, 2] and seen == [0, 1, 2]
    assert list(run(directories, mode="all")) == seen == [0, 1, 2]


def test_two_checkpoints_of_a_step_raise_user_error_before_any_is_evaluated(model_dir, tmp_path):
    shutil.copytree(model_dir / "checkpoint_2", tmp_path / "other" / "checkpoint_2")
    with pytest.raises(UserError, match=r"other/checkpoint_2.* step 2.*EVAL_OUTPUT_DIR"):
        score([model_dir, tmp_path / "other"], tmp_path / "out")
    assert not (tmp_path / "out" / "inference_eval").exists()


def test_teacher_forced_metrics_are_those_of_the_model(model_dir, tmp_path):
    task = sums(metric_fns=[])
    results = score(model_dir, tmp_path, task, mode="latest", training_evaluator_cls=Trainer)
    (figures,) = results.values()
    measured = figures["training_eval/sums"]
    # Every example in one batch, which the evaluation has in three.
    converter = make_model().FEATURE_CONVERTER_CLS(pack=False)
    cfg = data.DatasetConfig(task, LENGTHS, "test", batch_size=len(PAIRS), shuffle=False, seed=0)
    (batch,) = data.eval_batches(cfg, feature_converter=converter)
    params = t5x.load(str(model_dir)).engine.params
    logits = np.asarray(jax.jit(make_model().compute_logits)(params, batch.batch))
    log_probabilities = logits - np.asarray(jax.nn.logsumexp(logits, axis=-1, keepdims=True))
    targets, weights = batch.batch["decoder_target_tokens"], batch.batch["decoder_loss_weights"]
    of_targets = np.take_along_axis(log_probabilities, targets[..., None], axis=-1)[..., 0]
    expected = -(of_targets * weights).sum() / weights.sum()
    assert measured["loss_per_nonpadding_target_token"] == pytest.approx(expected, rel=1e-5)
    assert measured["accuracy"] == pytest.approx(((logits.argmax(-1) == targets) * weights).sum() / weights.sum())
    (line,) = (tmp_path / "training_eval" / "sums" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 2, **measured}
    assert list((tmp_path / "training_eval" / "sums").glob("events.*"))


def test_a_mixture_is_measured_by_task_and_together(model_dir, tmp_path):
    first, second = sums("first", pairs=PAIRS[:2]), sums("second", pairs=PAIRS[2:])
    data.TaskRegistry._entries.update(first=first, second=second)
    mixture = data.Mixture("both", ["first", "second"], default_rate=1.0)
    (found,) = score(model_dir, tmp_path, mixture, mode="latest", training_evaluator_cls=Trainer).values()
    assert set(found) == {"first", "second", *(f"training_eval/{name}" for name in ("first", "second", "both"))}
    tokens = {name: found[f"training_eval/{name}"]["target_tokens"] for name in ("first", "second", "both")}
    assert tokens["both"] == tokens["first"] + tokens["second"]


@pytest.mark.slow
def test_other_parameters_are_used(model_dir, tmp_path):
    made, asked = [], []

    def initializer(**arguments):
        made.append(arguments["input_shapes"])
        return StateLayout(**arguments)

    def datasets(cfg, **arguments):
        asked.append(arguments["eval_steps"])
        (batches,) = t5x.trainer.datasets.get_training_eval_datasets(cfg, **arguments).values()
        return {"mine": batches}

    left_out = {"assignment_map": [("decoder/logits_dense/kernel", None)]}
    scores = []
    for seed in (None, 0, 1):
        teacher_forced = {"training_evaluator_cls": Trainer, "train_eval_get_dataset_fn": datasets}
        (found,) = score(
            model_dir, tmp_path / str(seed), mode="latest", rules=left_out, fallback_init_rng=seed,
            train_state_initializer_cls=initializer, **(teacher_forced if seed is None else {}),
        ).values()  # fmt: skip
        scores.append(found["sums"]["score"])
        assert ("training_eval/mine" in found) == (seed is None)
    assert scores[0] == scores[1] != scores[2]
    assert len(made) == 3 and asked == [None]


def test_missing_metrics_or_checkpoints_raise_user_error(model_dir, tmp_path):
    with pytest.raises(UserError, match="has no metrics"):
        score(model_dir, tmp_path, sums(metric_fns=[]))
    with pytest.raises(UserError, match="no checkpoint in"):
        score(tmp_path / "nowhere", tmp_path, mode="all")
    with pytest.raises(UserError, match="There is no checkpoint"):
        score(tmp_path / "nowhere", tmp_path, mode="specific")


# --- The table --------------------------------------------------------------------------------------------------------

RESULTS = {
    100: {"a": {"bleu": 12.345678, "loss": 1.5}, "b": {"f1": 3.0}},
    2000: {"a": {"bleu": 23.0, "loss": 2.5}, "b": {"f1": math.nan}},
}


def test_the_table_is_aligned_and_marks_the_best():
    assert file_evaluation.results_table(RESULTS) == (
        "step   a/bleu  a/loss  b/f1\n"
        " 100  12.346     1.5*     3\n"
        "2000      23*    2.5    nan\n"
    )  # fmt: skip
    assert "*" not in file_evaluation.results_table({100: RESULTS[100]})


def test_a_narrow_terminal_gets_columns_below_each_other():
    blocks = file_evaluation.results_table(RESULTS, width=16, bold=True).split("\n\n")
    assert [block.splitlines()[0].split() for block in blocks] == [["step", "a/bleu"], ["step", "a/loss"],
                                                                   ["step", "b/f1"]]  # fmt: skip
    assert "\033[1m23*\033[0m" in blocks[0]


# --- The command ------------------------------------------------------------------------------------------------------


def test_a_file_is_scored_with_a_model_directory_alone(model_dir, pairs_file, tmp_path, capsys):
    result = run(
        capsys, "eval", "--model", model_dir, "--data", pairs_file, "--inputs", "q", "--targets", "a",
        "--prefix", "sum ", "--metric", "bleu", "--metric", "chrf", "--metric", "accuracy", "--max_length", 4,
        "--output", tmp_path / "out",
    )  # fmt: skip
    assert result.code == 0, result.err
    lines = (tmp_path / "out" / "inference_eval" / "pairs-000002.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    expected = t5x.load(str(model_dir)).generate([f"sum {pair['q']}" for pair in PAIRS], max_length=4)
    assert [record["prediction"] for record in written] == [generation.text for generation in expected]
    assert [record["target"] for record in written] == [str(pair["a"]) for pair in PAIRS]
    predictions, references = [g.text for g in expected], [[str(pair["a"]) for pair in PAIRS]]
    bleu = sacrebleu.corpus_bleu(predictions, references, tokenize="intl").score
    chrf = sacrebleu.corpus_chrf(predictions, references).score
    right = sum(p == r for p, r in zip(predictions, references[0], strict=True))
    header, row = result.out.splitlines()
    assert header.split() == ["step", "pairs/bleu", "pairs/chrf", "pairs/accuracy"]
    assert row.split() == ["2", f"{bleu:.5g}", f"{chrf:.5g}", f"{100 * right / len(PAIRS):.5g}"]
    assert "bleu of pairs: nrefs:1|case:mixed|eff:no|tok:intl|smooth:exp|version:" in result.err
    assert "t5x eval --model" in (tmp_path / "out" / "command.txt").read_text()


@pytest.mark.slow
def test_beams_are_used_and_json_is_printed(model_dir, pairs_file, capsys):
    arguments = ["--model", model_dir, "--data", pairs_file, "--inputs", "q", "--targets", "a", "--max_length", 4]
    result = run(capsys, "eval", *arguments, "--metric", "chrf", "--beams", 3, "--json")
    generations = t5x.load(str(model_dir)).generate([pair["q"] for pair in PAIRS], max_length=4, beams=3)
    references = [[str(pair["a"]) for pair in PAIRS]]
    chrf = sacrebleu.corpus_chrf([generation.text for generation in generations], references).score
    (line,) = result.out.splitlines()
    assert json.loads(line) == {"step": 2, "task": "pairs", "metrics": {"chrf": pytest.approx(chrf)}}


def test_all_checkpoints_of_a_run_are_one_table(model_dir, pairs_file, tmp_path, capsys):
    arguments = [
        "--model", model_dir, "--all", "--data", pairs_file, "--inputs", "q", "--targets", "a", "--max_length", 4,
        "--output", tmp_path / "out", "--metric",
    ]  # fmt: skip
    first = run(capsys, "eval", *arguments, "chrf")
    assert [line.split()[0] for line in first.out.splitlines()] == ["step", "0", "1", "2"]
    data.TaskRegistry.remove("pairs")
    again = run(capsys, "eval", *arguments, "chrf")
    assert again.out == first.out and "3 evaluated before" in again.err and "evaluating" not in again.err
    run(capsys, "eval", *arguments, "bleu").refused("--metric chrf", "--output")


REFUSED = {
    "an unknown metric": (["--metric", "blue"], ["no metric 'blue'", "bleu", "squad"]),
    "a factory of metrics": (["--metric", "mean_multiclass_f1"], ["'mean_multiclass_f1'", "accuracy"]),
    "a metric of numbers": (["--metric", "pearson_corrcoef"], ["no metric 'pearson_corrcoef'"]),
    "figures of one name": (["--metric", "squad", "--metric", "trivia_qa"], ["squad and trivia_qa", "'em'"]),
    "a missing field": (["--inputs", "question"], ["no field 'question'", "q, a"]),
    "a missing checkpoint": (["--model", "nowhere"], ["There is no checkpoint", "nowhere"]),
    "an empty file": (["--data", "{tmp}/empty.jsonl"], ["empty.jsonl is empty"]),
    "a null target": (["--data", "{tmp}/null.jsonl"], ["null.jsonl:1", "'a'", "null", "--skip_bad_examples"]),
    "no beam": (["--beams", "0"], ["--beams is 0"]),
    "waiting for one checkpoint": (["--wait_until_step", "3"], ["--all"]),
    "gin files besides": (["--gin_file", "x.gin"], ["--gin_file"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_invocations_print_one_message(name, model_dir, pairs_file, tmp_path, capsys):
    arguments, words = REFUSED[name]
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "null.jsonl").write_text('{"q": "1", "a": null}\n')
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    plain = ["--model", model_dir, "--data", pairs_file, "--inputs", "q", "--targets", "a"]
    run(capsys, "eval", *plain, *arguments).refused(*words)


def test_incomplete_options_name_the_missing_one(pairs_file, capsys):
    run(capsys, "eval", "--data", pairs_file).refused("--model")


@pytest.mark.slow
def test_gin_files_with_teacher_forced_metrics(model_dir, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(data.TaskRegistry._entries, "sums", sums())
    network = "\n".join(
        f"network.T5Config.{name} = {value!r}" for name, value in dataclasses.asdict(CONFIG).items() if name in NETWORK
    )
    (tmp_path / "eval.gin").write_text(
        f"""
from __gin__ import dynamic_registration
import __main__ as eval_script
from t5x import trainer
from t5x import utils
from t5x.examples.t5 import network
include 't5x/examples/t5/byt5/base.gin'
include 't5x/configs/runs/eval.gin'
{network}
network.T5Config.dtype = 'float32'
DROPOUT_RATE = 0.0
MIXTURE_OR_TASK_NAME = 'sums'
TASK_FEATURE_LENGTHS = {LENGTHS}
CHECKPOINT_PATH = '{model_dir}'
EVAL_OUTPUT_DIR = '{tmp_path / "out"}'
utils.RestoreCheckpointConfig.mode = 'all'
utils.DatasetConfig.batch_size = 2
eval_script.evaluate.training_evaluator_cls = @trainer.Trainer
"""
    )
    result = run(capsys, "eval", f"--gin_file={tmp_path / 'eval.gin'}", "--json")
    assert result.code == 0, result.err
    records = [json.loads(line) for line in result.out.splitlines()]
    assert [(r["step"], r["task"]) for r in records] == [
        (step, task) for step in range(3) for task in ("sums", "training_eval/sums")
    ]
    expected = score(model_dir, tmp_path / "python", training_evaluator_cls=Trainer)
    assert records[2]["metrics"]["score"] == pytest.approx(expected[1]["sums"]["score"], rel=1e-5)
    assert "MIXTURE_OR_TASK_NAME = 'sums'" in (tmp_path / "out" / "config.gin").read_text()
