"""`t5x data` shows what training reads, and its statistics are right."""

import functools
import itertools
import re
import subprocess
import sys

import numpy as np
import pytest

from t5x import data
from t5x._runtime.errors import UserError
from t5x.cli.data_report import DataReport, joined_pieces, packed_rows, token_names
from t5x.cli.data_verb import parse_lengths
from t5x.cli.text_page import TextPage, width_of
from t5x.data import preprocessors
from t5x.data.lanes import Order, Stream
from t5x.data.pipeline import ConcatenateAndSplit
from tests.support.paths import REPO

BYTES = {name: data.Feature(data.ByteVocabulary()) for name in ("inputs", "targets")}
TOKENIZE = [preprocessors.tokenize, preprocessors.append_eos_after_trim]


def task(examples, steps=TOKENIZE, name="mine", features=BYTES) -> data.Task:
    return data.Task(name, data.FunctionDataSource(lambda split: examples, ["train"]), features, steps)


def lines_of(found, *, count: int = 1, lines: list[str] | None = None, **options) -> list[str]:
    lines = [] if lines is None else lines
    DataReport(TextPage(80, write=lines.append), found, **{"pack": True, **options}).write(count)
    return lines


def pairs(*lengths: tuple[int, int]) -> list[dict[str, str]]:
    """Examples of so many tokens, EOS included."""
    return [{"inputs": "a" * (i - 1), "targets": "b" * (t - 1)} for i, t in lengths]


def test_statistics_computed_by_hand():
    lines = lines_of(task(pairs(*[(4, 2)] * 9, (24, 6))), lengths={"inputs": 20, "targets": 8}, count=0)
    text = "\n".join(lines)
    assert "inputs: mean 6.0, median 4, 95 % 24, max 24" in text
    assert "truncated to 20: 1 example (10.0 %) lose 4 tokens (6.7 %)" in text
    assert "targets: mean 2.4, median 2, 95 % 6, max 6" in text and "truncated to 8: none is longer" in text
    alone = next(line for line in lines if "one example a row" in line)
    # inputs: 9 * 4 + 20 of 10 * 20; targets: 9 * 2 + 6 of 10 * 8
    assert alone.split()[4:] == ["72.0", "%", "70.0", "%", "10", "1.0"]
    rows = next(line for line in lines if line.startswith("  packed"))
    # Four short ones fill the targets of a row; the long one is alone: 3 or 4 rows, by where it comes.
    count = int(rows.split()[-2])
    assert count in (3, 4)
    assert rows.split()[1:3] == [f"{100 * (1 - 56 / (20 * count)):.1f}", "%"]


def test_packed_rows_are_those_of_training():
    rng = np.random.default_rng(0)
    found = task(pairs(*rng.integers(1, 12, (40, 2)).tolist()))
    lengths = {"inputs": 24, "targets": 16}
    converter = data.EncDecFeatureConverter(pack=True)
    pipeline = found.uncached_pipeline("train", lengths, seed=3)
    order = Order(40, 3, shuffle=True)
    examples = [pipeline.outputs(*order(position))[0] for position in range(40)]
    cfg = data.DatasetConfig(found, lengths, "train", 1, shuffle=True, seed=3, pack=True)
    with data.train_loader(cfg, feature_converter=converter) as loader:
        for row in itertools.islice(packed_rows(converter, examples, lengths), 8):
            expected = next(loader)
            np.testing.assert_array_equal(
                converter.convert_row(row, lengths)["encoder_segment_ids"], expected["encoder_segment_ids"][0]
            )


def test_joined_pieces_are_those_of_training():
    texts = [{"targets": "x" * (i % 7)} for i in range(30)]
    steps = [preprocessors.tokenize, ConcatenateAndSplit(10), functools.partial(noted)]
    pipeline = task(texts, steps, features={"targets": BYTES["targets"]}).uncached_pipeline("train", None, seed=5)
    stream = Stream(0, 1, Order(30, 5, shuffle=True), pipeline)
    for piece in itertools.islice(joined_pieces(pipeline), 20):
        shown = pipeline.piece_stages(piece.tokens, piece.place, piece.index)[-1][1][0]
        start = stream.position.cursor
        expected, index = stream.next()
        assert shown["seed"] == expected["seed"] and index == piece.index
        assert len(piece.tokens) == 10 and piece.num_sources - (stream.position.cursor - start) in (0, 1)
        np.testing.assert_array_equal(shown["targets"], expected["targets"])


def noted(example, seed):
    return example | {"seed": seed}


def test_span_corruption_is_shown_with_its_pieces():
    features = {name: data.Feature(data.ByteVocabulary(extra_ids=100)) for name in ("inputs", "targets")}
    rekey = functools.partial(preprocessors.rekey, key_map={"inputs": None, "targets": "text"})
    steps = [rekey, preprocessors.tokenize, preprocessors.span_corruption, preprocessors.append_eos_after_trim]
    lines = lines_of(task([{"text": "to be or not to be"}] * 50, steps, features=features))
    text = "\n".join(lines)
    assert "inputs=512,targets=114" in lines[0]
    assert "ConcatenateAndSplit: a piece of 568 tokens from 32 examples" in text
    assert "denoise_spans" in text and "inputs    512 tokens: the 511 before, then 1 (</s>)" in text


def test_only_what_changed_is_shown():
    def double(example):
        return [example, example]

    def keep(example):
        return example

    def drop(example):
        return None

    found = task([{"inputs": "one", "targets": "two", "id": 7}], [keep, double, *TOKENIZE, drop])
    lines = []
    with pytest.raises(UserError, match=r"drop"):
        lines_of(found, lines=lines)
    at = {name: lines.index(name) for name in lines if name and not name.startswith((" ", "-"))}
    assert lines[at["source"] + 1 : at["source"] + 4] == ["  inputs    one", "  targets   two", "  id        7"]
    assert "keep: changes nothing" in lines and "double: makes 2 examples of it; the first:" in lines
    assert lines[at["tokenize"] + 1 : at["tokenize"] + 5] == [
        "  inputs_pretokenized = inputs before",
        "  inputs    3 tokens",
        "            114 113 104",
        "            o n e",
    ]
    assert lines[at["append_eos_after_trim"] + 1] == "  inputs    4 tokens: the 3 before, then 1 (</s>)"
    assert lines[-1] == "drop: drops it"


def test_nothing_escapes_to_the_terminal_and_80_columns_are_enough():
    evil = "\x1b[31mred\x1b[0m \u202ereversed \x07 tab\t new\nline 日本語" * 9
    found = task([{"inputs": evil, "targets": "fine", evil: evil}], name="mine\x1b[2J")
    for line in lines_of(found):
        assert line.isprintable() and width_of(line) <= 80, line
    assert any("\\x1b[31mred" in line for line in lines_of(found))


def test_a_bad_example_is_shown_as_one_and_counted(tmp_path):
    (tmp_path / "x.jsonl").write_text(
        '{"inputs": "a", "targets": "b"}\n{"inputs": "a"}\n{"inputs": "a", "targets": ""}\n'
    )
    found = data.Task("mine", data.JsonLinesDataSource({"train": str(tmp_path / "x.jsonl")}), BYTES, TOKENIZE)
    text = "\n".join(lines_of(found, count=3))
    assert "cannot be used:" in text and "x.jsonl:2" in text
    assert "lengths of 2 examples" in text and "; 1 cannot be used" in text
    assert "1 example with an empty target" in text


@pytest.mark.usefixtures("registries")
def test_a_mixture_has_a_table_of_shares():
    for name, size in (("first", 30), ("second", 10)):
        source = data.FunctionDataSource(lambda split, size=size: pairs((3, 3)) * size, ["train"])
        data.TaskRegistry.add(name, source, BYTES, TOKENIZE)
    mixture = data.MixtureRegistry.add("both", [("first", 1.0), ("second", 3.0)])
    lines = lines_of(mixture, count=2)
    rows = [line.split() for line in lines if line.startswith(("  first", "  second"))]
    assert rows == [["first", "30", "1", "25.00", "%"], ["second", "10", "3", "75.00", "%"]]
    assert [line.split(":")[0] for line in lines if line.startswith(("-- first", "-- second"))] == [
        "-- first",
        "-- second",
    ]


def test_lengths_are_checked():
    with pytest.raises(UserError, match="inputs=512,targets=114"):
        parse_lengths("512,114")
    with pytest.raises(UserError, match=r"'input'.*inputs, targets"):
        lines_of(task(pairs((3, 3))), lengths={"input": 5})
    with pytest.raises(UserError, match=r"--lengths.*targets"):
        lines_of(task(pairs((3, 3))), lengths={"inputs": 5})
    with pytest.raises(UserError, match=r"'test'.*'train'"):
        lines_of(task(pairs((3, 3))), split="test")


def test_token_names_of_bytes():
    vocabulary = data.ByteVocabulary(extra_ids=2)
    assert token_names(vocabulary, [*vocabulary.encode("a é"), 1, 0, 260, 900]) == [
        "a", "▁", "\\xc3", "\\xa9", "</s>", "<pad>", "<260>", "<900: not in the vocabulary>",
    ]  # fmt: skip


@pytest.mark.parametrize("numbers", [[0, 1], [3, 3, 900], range(1000), [10**6, 10**6 + 5]])
def test_a_histogram_counts_every_number_once(numbers):
    lines = []
    TextPage(60, write=lines.append).histogram(np.asarray(numbers))
    assert sum(int(line.split()[-1].replace(",", "")) for line in lines) == len(numbers)
    assert len(lines) <= 13 and all(len(line) <= 60 for line in lines)
    first, last = (re.match(r" *(\d+)(?:-(\d+))?", line) for line in (lines[0], lines[-1]))
    assert int(first[1]) <= min(numbers) and int(last[2] or last[1]) >= max(numbers)


def test_the_command(tmp_path):
    (tmp_path / "x.tsv").write_text("en\tde\nHello\tHallo\n")
    arguments = ["data", "--data", str(tmp_path / "x.tsv")]
    arguments += ["--inputs", "en", "--targets", "de", "--vocabulary", "bytes"]
    script = (
        f"import sys; from t5x.cli import main as cli\ntry: cli.main({arguments!r})\n"
        "except SystemExit as e: assert e.code == 0, e.code\nassert 'jax' not in sys.modules, 'slow imports'"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "H e l l o" in done.stdout and "\x1b" not in done.stdout


MISUSED = {
    "no vocabulary": ("--data x.tsv", ["--vocabulary"]),
    "a task and a file": ("dates --data x.tsv", ["--data"]),
    "a field of a task": ("dates --inputs en", ["--inputs", "--data"]),
    "a negative number": ("dates -n -1", ["-n is -1"]),
}


@pytest.mark.parametrize("case", MISUSED)
def test_wrong_options(case, run_here):
    arguments, words = MISUSED[case]
    run_here("data", *arguments.split()).refused(*words)


NOTHING = {
    "dropped": ("def step(example):\n    return []\n", ["nothing_dropped", "step ("]),
    "bad": ("def step(example):\n    return {'inputs': [], 'targets': 3.5}\n", ["nothing_bad", "targets"]),
}


@pytest.mark.parametrize("case", NOTHING)
def test_no_usable_example_is_an_error(case, tmp_path, run_here):
    code, words = NOTHING[case]
    (tmp_path / f"nothing_{case}.py").write_text(
        "from t5x import data\n"
        f"{code}"
        "features = {name: data.Feature(data.ByteVocabulary()) for name in ('inputs', 'targets')}\n"
        "source = data.FunctionDataSource(lambda split: [{'inputs': 'a', 'targets': 'b'}] * 3, ['train'])\n"
        f"data.TaskRegistry.add('nothing_{case}', source, output_features=features, preprocessors=[step])\n"
    )
    try:
        run_here("data", f"nothing_{case}", "--import", tmp_path / f"nothing_{case}.py").refused(*words)
    finally:
        data.TaskRegistry.remove(f"nothing_{case}")
