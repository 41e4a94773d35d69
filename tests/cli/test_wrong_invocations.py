"""Wrong command lines: one line that names the mistake and how to fix it."""

import json
import os
import subprocess
import sys

import pytest

from t5x.cli.parser import parser_of
from t5x.cli.verbs import VERBS
from tests.cli.test_file_training import fresh
from tests.inference.models import byte_model
from tests.support import commands
from tests.support.programs import environment

# The arguments, and words of the fix that the message must contain.
WRONG = {
    "a misspelt option": ("infer --model {m} --inptu x.tsv", "--input"),
    "hyphens in an option": ("train --model-dir x", "--model_dir"),
    "an unknown option": ("eval --xyzzy 3", "--help"),
    "a number that is none": ("infer --model {m} --input - --beams two", "--beams", "two"),
    "no value": ("train --steps", "--steps", "--help"),
    "one argument too many": ("inspect {m} another", "another"),
    "no argument": ("inspect", "PATH"),
    "a choice that there is not": ("convert {m} x --to torch", "hf"),
    "an unknown help page": ("infer --help sampling", "decoding"),
    "a bare train": ("train", "--data train.tsv", "--gin_file="),
    "a bare eval": ("eval", "--model", "--gin_file="),
    "a bare infer": ("infer", "--model", "--gin_file="),
    "no data": ("train --model {m} --steps 3 --model_dir run", "--data"),
    "no steps": ("train --data x.tsv --model {m}", "--model_dir", "--steps"),
    "neither a model nor a size": ("train --data x.tsv --model_dir run --steps 1", "--model", "--size"),
    "an optimizer that there is not": ("train --data x.tsv --optimizer adamx", "adamw"),
    "an optimizer without a rate": (
        "train --data x.tsv --model {m} --model_dir run --steps 1 --optimizer lion",
        "--learning_rate",
    ),
    "a metric that there is not": ("eval --model {m} --data x.tsv --inputs q --targets a --metric blue", "bleu"),
    "a metric of no module": ("eval --model {m} --data x.tsv --inputs q --targets a --metric nope:f", "nope"),
    "no input": ("infer --model {m}", "--input"),
    "an input that is not there": ("infer --model {m} --input x.tvs", "x.tsv"),
    "a field that is not there": ("infer --model {m} --input x.tsv", "q, a", "--inputs"),
    "a table without a header": ("infer --model {m} --input bare.tsv", "--columns"),
    "too few columns": ("infer --model {m} --input x.tsv --columns q --inputs q", "x.tsv:1", "2"),
    "a template that is none": ("infer --model {m} --input x.tsv --inputs {{q!r}}", "question: {{question}}"),
    "text where fields are needed": ("infer --model {m} --input x.txt --inputs {{q}}{{a}}", "q, a", ".jsonl"),
    "gin beside a model": ("infer --model {m} --input - --gin.BATCH_SIZE=3", "--gin"),
    "gin options beside a model": (
        "eval --model {m} --data x.tsv --dry_run --tfds_data_dir d",
        "--dry_run, --tfds_data_dir",
        "CHECKPOINT_PATH",
    ),
    "gin where there is none": ("inspect {m} --gin.BATCH_SIZE=3", "--gin.NAME=VALUE"),
    "a gin file beside it": ("train --gin_file=conf/mne.gin", "conf/mine.gin"),
    "a model that is not there": ("infer --model {m}x --input x.txt", "{m}"),
    "a public task": ("data super_glue_boolq_v102", "t5.data.tasks", "docs/seqio.md"),
    "a task that is not there": ("data my_task", "--import"),
    "a module that needs seqio": ("data my_task --import uses_seqio.py", "from t5x import data as seqio"),
    "a file of no kind": ("train --data x.doc --model {m} --model_dir run --steps 1", ".jsonl", ".tsv"),
    "pairs with other columns": ("rerank --model {m} --labels a,b --input pairs.tsv", "query and text"),
    "a server without a model": ("serve", "DIR"),
    "two models of one name": ("serve {m} x/model", "NAME=DIR"),
    "a server for all without a token": ("serve {m} --host 0.0.0.0", "--token_file", "--without_token"),
    "a token file that is not there": ("serve {m} --token_file none.txt", "none.txt"),
    "a token that is too short": ("serve {m} --token_file x.txt", "openssl rand"),
    "a certificate without a key": ("serve {m} --tls_cert x.txt", "--tls_key"),
    "a warm-up of nothing": ("serve {m} --warm_up bake", "generate"),
    "no port": ("serve {m} --port 70000", "65535"),
    "a model to serve that is not there": ("serve {m}x", "{m}"),
    "a length of nothing": ("infer --model {m} --input x.txt --max_input_length 0", "--max_input_length is 0"),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("wrong")
    byte_model(directory / "model")
    files = {
        "x.tsv": "q\ta\nhow?\tso\n", "bare.tsv": "How is it?\tSo it is.\nWhy?\tSo.\n", "x.txt": "how?\n", "x.doc": "",
        "pairs.tsv": "question\tpassage\nhow?\tso\n", "uses_seqio.py": "import seqio\n", "conf/mine.gin": "A = 1\n",
    }  # fmt: skip
    (directory / "conf").mkdir()
    for name, content in files.items():
        (directory / name).write_text(content)
    return directory


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_invocation_is_one_message_with_the_fix(case, directory, capsys, monkeypatch):
    monkeypatch.chdir(directory)
    arguments, *words = WRONG[case]
    verb, *arguments = arguments.format(m=directory / "model").split()
    with fresh():
        result = commands.run(capsys, verb, *arguments)
    result.refused(*(word.format(m=directory / "model") for word in words))
    message = result.err[result.err.index("error: ") :]
    assert not result.out and (message.count("\n") == 1 or case.startswith(("a bare", "a gin file"))), message


def test_an_unknown_verb():
    command = [sys.executable, "-m", "t5x", "infr"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 2 and "t5x infer" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS)
def test_help_pages_are_short_and_have_an_example(verb, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = parser_of(verb)
    for topic in ("", *parser.topics):
        page = parser.format_page(topic)
        assert page.count("\n") < 50, f"{verb} --help {topic}"
        assert topic or f"t5x {verb}" in page.partition("examples:")[2]
    if "processes" in parser.topics:
        assert "--process_index" not in parser.format_page("").partition("examples:")[0]
        assert "--process_index" in parser.format_page("processes")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_verbs_and_options(shell, capsys):
    script = commands.run(capsys, "completion", shell).out
    assert all(name in script for name in ("rank-eval", "max_input_length", "missing_as_zero"))
    if shell == "bash":
        ask = 'COMP_WORDS=(t5x infer --max_t); COMP_CWORD=2; _t5x; echo "${COMPREPLY[@]}"'
        done = subprocess.run(["bash", "-c", f"{script}\n{ask}"], capture_output=True, text=True)
        assert done.stdout == "--max_target_length\n", done.stderr


def test_a_reader_that_stops_reading_ends_it_quietly(directory):
    (directory / "many.trec").write_text("".join(f"{i} Q0 d 1 1.0 x\n" for i in range(9)))
    (directory / "qrels").write_text("".join(f"{i} 0 d 1\n" for i in range(9)))
    program = f"{sys.executable} -m t5x"
    for command in ("--help", "rerank --help", "rank-eval --qrels qrels many.trec", "inspect model --json"):
        shell = f"set -o pipefail; {program} {command} | head -c 1"
        done = subprocess.run(
            ["bash", "-c", shell], cwd=directory, env=environment(), capture_output=True, text=True, timeout=120
        )
        assert done.stderr == "" and done.returncode in (0, 1), (command, done.stderr)


def test_rank_eval_prints_json(directory, capsys):
    (directory / "qrels.txt").write_text("1 0 a 1\n2 0 c 1\n")
    for name, ranks in {"one.trec": (1, 1), "two.trec": (2, 1)}.items():
        lines = [f"{q} Q0 {doc} {rank} {-rank}.0 x\n" for q, doc, rank in zip("12", "ac", ranks, strict=True)]
        (directory / name).write_text("".join(lines) + "1 Q0 b 1 -1.5 x\n")
    result = commands.run(
        capsys, "rank-eval", "--json", "--measures=mrr@10", f"--qrels={directory / 'qrels.txt'}",
        directory / "one.trec", directory / "two.trec",
    )  # fmt: skip
    found = json.loads(result.out)
    assert found["runs"] == {"one.trec": {"mrr@10": 1.0}, "two.trec": {"mrr@10": 0.75}}
    (difference,) = found["differences"]
    assert difference["run"] == "two.trec" and difference["difference"] == -0.25


@pytest.mark.parametrize("entry", ["", "."])
def test_the_working_directory_on_the_path_does_not_shadow_packages(entry, tmp_path):
    (tmp_path / "numpy.py").write_text("raise SystemExit('the numpy.py of the working directory was imported')\n")
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([entry, env["PYTHONPATH"]])
    program = f"import sys; sys.argv = ['t5x']; from t5x.cli import main as cli; cli.main({['inspect', 'nowhere']!r})"
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "nowhere" in done.stderr, done.stderr
