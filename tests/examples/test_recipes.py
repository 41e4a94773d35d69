"""The recipes: their tasks read the published files, and their gin files are whole."""

import gzip
import json

import pytest

from t5x import configuration, data
from t5x._runtime.errors import UserError
from t5x.data.evaluator import Evaluator
from t5x.data.feature_converters import EncDecFeatureConverter
from t5x.examples.recipes import tasks
from tests.apps.answering import squad_files
from tests.support.commands import run

LENGTHS = {"inputs": 96, "targets": 32}
VOCABULARY = data.ByteVocabulary()


@pytest.fixture(autouse=True)
def tasks_before():
    """The names of the tasks there were: no others stay."""
    before = data.TaskRegistry.names()
    yield before
    forget(before)


def forget(but):
    """Tasks, but for some, and what gin files have said."""
    configuration.clear()
    for name in {*data.TaskRegistry.names()} - {*but}:
        data.TaskRegistry.remove(name)


def texts(task, split="validation"):
    pipeline = task.pipeline(split, LENGTHS, 0)
    made = [example for index in range(len(pipeline)) for example in pipeline.outputs(0, index)]
    return [(example["inputs_pretokenized"], example["targets_pretokenized"]) for example in made]


def write_sst2(directory):
    for name in ("train", "dev", "test"):
        (directory / f"{name}.tsv").write_text("1\ta stirring film\n0\tno yuks , not much of anything .\n")


def write_mrpc(directory):
    """As published: a byte order mark, names of columns, carriage returns, quotes that are never closed."""
    rows = [
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
        '1\t7\t8\tHe said "so.\tSo he said.',
        "0\t9\t10\tIt rains.\tNo.",
    ]
    for name in ("train", "val", "test"):
        (directory / f"msr-para-{name}.tsv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(rows).encode() + b"\r\n")


def write_aeslc(directory):
    content = json.dumps({"id": "a-1", "body": "Hi,\nsee you at 9.", "subject": "Meeting at 9", "ann0": "x"}) + "\n"
    for name in ("train", "dev", "test"):
        (directory / f"{name}.jsonl.gz").write_bytes(gzip.compress(content.encode()))


def write_multi30k(directory):
    for stem in ("train", "val", "test_2016_flickr"):
        (directory / f"{stem}.en").write_text("A dog runs.\nTwo men.\n")
        (directory / f"{stem}.de.gz").write_bytes(gzip.compress("Ein Hund läuft.\nZwei Männer.\n".encode()))


TASKS = {
    "sst2": (
        write_sst2,
        [
            ("sst2 sentence: a stirring film", "positive"),
            ("sst2 sentence: no yuks , not much of anything .", "negative"),
        ],
        {"accuracy"},
    ),
    "mrpc": (
        write_mrpc,
        [
            ('mrpc sentence1: He said "so. sentence2: So he said.', "equivalent"),
            ("mrpc sentence1: It rains. sentence2: No.", "not_equivalent"),
        ],
        {"accuracy", "f1"},
    ),
    "aeslc": (
        write_aeslc,
        [("summarize: Hi,\nsee you at 9.", "Meeting at 9")],
        {"rouge1", "rouge2", "rougeLsum"},
    ),
    "multi30k": (
        write_multi30k,
        [
            ("translate English to German: A dog runs.", "Ein Hund läuft."),
            ("translate English to German: Two men.", "Zwei Männer."),
        ],
        {"bleu"},
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_reads_the_published_files_and_is_scored(name, tmp_path):
    write, expected, names = TASKS[name]
    write(tmp_path)
    task = getattr(tasks, name)(str(tmp_path), VOCABULARY)
    assert getattr(tasks, name)(str(tmp_path), VOCABULARY) is task
    assert task.splits == ("train", "validation", "test")
    for split in task.splits:
        assert texts(task, split) == expected
    evaluator = Evaluator(task, EncDecFeatureConverter(), sequence_length=LENGTHS, batch_size=2)
    right = evaluator.evaluate(step=0, predict_fn=lambda batch: batch["decoder_target_tokens"])[name]
    assert names <= right.keys() and right[min(names)] == pytest.approx(100)
    wrong = evaluator.evaluate(step=0, predict_fn=lambda batch: 0 * batch["decoder_target_tokens"] + 99)[name]
    assert wrong[min(names)] == pytest.approx(0)


def test_multi30k_the_other_way_round(tmp_path):
    write_multi30k(tmp_path)
    task = tasks.multi30k(str(tmp_path), VOCABULARY, source="de", target="en")
    assert texts(task)[0] == ("translate German to English: Ein Hund läuft.", "A dog runs.")
    assert task.source.location("validation", 1).count(":2") == 2
    before = task.source.fingerprint("validation")
    (tmp_path / "val.en").write_text("A dog runs.\n")
    short = tasks.ParallelLinesDataSource(
        {code: {"validation": str(tmp_path / f"val.{code}")} for code in ("en", "de")}
    )
    assert short.fingerprint("validation")["en"] != before["en"]
    with pytest.raises(UserError, match=r"'validation'.*1 in en, 2 in de"):
        short.num_examples("validation")


def test_a_file_that_is_there_twice_is_refused(tmp_path):
    write_aeslc(tmp_path)
    content = gzip.decompress((tmp_path / "dev.jsonl.gz").read_bytes())
    (tmp_path / "dev.jsonl.orig").write_bytes(content)
    task = tasks.aeslc(str(tmp_path), VOCABULARY)
    assert len(texts(task)) == 1
    (tmp_path / "train.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"'train'.*train\.jsonl, .*train\.jsonl\.gz"):
        texts(task, "train")
    (tmp_path / "test.jsonl.gz").unlink()
    with pytest.raises(UserError, match=r"There is no file test\.jsonl in"):
        texts(task, "test")


@pytest.mark.parametrize("recipe", [*TASKS, "nq_open", "squad"])
def test_a_recipe_is_a_whole_configuration(recipe, capsys):
    files = ["--gin.DATA_DIR=there"] if recipe in TASKS else ["--gin.TRAIN_FILE=a", "--gin.VALIDATION_FILE=b"]
    said = run(
        capsys, "train", f"--gin_file=t5x/examples/recipes/{recipe}.gin", "--gin.MODEL_DIR=run", *files,
        "--gin.INITIAL_CHECKPOINT_PATH=flan", "--dry_run",
    )  # fmt: skip
    assert said.code == 0, said.err
    task = {"nq_open": "answering.closed_book_task", "squad": "answering.squad_task"}.get(recipe, f"tasks.{recipe}")
    assert f"MIXTURE_OR_TASK_NAME = @{task}()" in said.out and "DROPOUT_RATE = 0.1" in said.out


@pytest.mark.slow  # apps/answering tests each of its steps
def test_squad_from_training_to_answers(capsys, tmp_path, tasks_before):
    """Training, evaluation, predictions by gin, and answers, with a tiny model over bytes, on SQuAD 2.0's format."""
    path = squad_files.write(tmp_path / "dev-v2.0.json", squad_files.version_2())
    sizes = ("emb_dim=8", "num_heads=2", "head_dim=4", "mlp_dim=8", "num_encoder_layers=1", "num_decoder_layers=1")
    common = [
        f"--gin.VALIDATION_FILE={path}", "--gin.NO_ANSWER=unanswerable", "--gin.VOCABULARY=@seqio.ByteVocabulary()",
        "--gin.TASK_FEATURE_LENGTHS={'inputs': 96, 'targets': 16}",
        *(f"--gin.network.T5Config.{size}" for size in (*sizes, "vocab_size=384", "dtype=float32")),
    ]  # fmt: skip
    model = tmp_path / "model"

    def by_gin(verb, recipe, *arguments):
        said = run(capsys, verb, f"--gin_file=t5x/examples/recipes/{recipe}.gin", *common, *arguments)
        assert said.code == 0, said.err
        forget(tasks_before)
        return said.out

    by_gin(
        "train", "squad", f"--gin.MODEL_DIR={model}", f"--gin.TRAIN_FILE={path}", "--gin.TRAIN_STEPS_RELATIVE=2",
        "--gin.INITIAL_CHECKPOINT_PATH=None", "--gin.BATCH_SIZE=4", "--gin.EVAL_PERIOD=2", "--gin.DROPOUT_RATE=0.0",
    )  # fmt: skip
    in_training = lines_of(model / "inference_eval/squad-metrics.jsonl")[-1]
    assert in_training["step"] == 2 and {"em", "f1", "HasAns_f1", "NoAns_f1"} <= in_training.keys()

    where = (f"--gin.CHECKPOINT_PATH={model}", f"--gin.EVAL_OUTPUT_DIR={tmp_path / 'evaluated'}")
    by_gin("eval", "squad_eval", *where)
    assert lines_of(next((tmp_path / "evaluated").rglob("squad-metrics.jsonl")))[-1] == in_training

    where = (f"--gin.CHECKPOINT_PATH={model}", f"--gin.INFER_OUTPUT_DIR={tmp_path / 'predicted'}")
    by_gin("infer", "squad_infer", *where)
    by_task = lines_of(tmp_path / "predicted/squad-predict.jsonl-00000-of-00001")

    output = tmp_path / "answers.jsonl"
    said = run(
        capsys, "answer", "--model", model, "--input", path, "--output", output, "--no_answer", "unanswerable",
        "--max_input_length", 96, "--max_length", 16, "--stride", 16,
    )  # fmt: skip
    assert said.code == 0, said.err
    answers = lines_of(output)
    assert [a["id"] for a in answers] == [p["inputs"]["id"] for p in by_task] == ["q0", "q1", "q2", "q3"]
    fits = [i for i, a in enumerate(answers) if len(f"question: {a['question']} context: {a['context']}") < 96]
    assert fits and all(answers[i]["answer"] == by_task[i]["prediction"] for i in fits)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
