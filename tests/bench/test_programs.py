"""The programs in benchmarks/: what they make of results, of contenders that fail, and of wrong arguments."""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.support.paths import REPO
from tests.support.programs import environment

sys.path.append(str(REPO / "benchmarks"))
import peers
import peers_page
import rounds

ROW = {"size": "base", "batch": 64, "inputs": 512, "targets": 128, "device": "NVIDIA H200", "dtype": "bfloat16"}


def row(work: str, unit: str, **rates: float) -> dict:
    return {**ROW, "work": work, "unit": unit, "contenders": {name: {"rate": rate} for name, rate in rates.items()}}


def program(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, REPO / "benchmarks" / name, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)


def test_a_table_and_a_drawing_of_saved_results(tmp_path):
    page = tmp_path / "performance.md"
    page.write_text("before\n<!-- peers gpu -->\nold\n<!-- end -->\nafter\n<!-- peers cpu -->\n<!-- end -->\n")
    compiled = {"Hugging Face, compiled": 20_000.0}
    rows = [
        row("greedy", "tokens/s", t5x=50_000.0, **{"Hugging Face": 4_000.0}, **compiled),
        row("score", "sequences/s", t5x=3.5),
    ]
    peers_page.write([rows], page)
    text = page.read_text()
    assert "old" not in text
    assert text.startswith("before\n") and text.endswith("after\n<!-- peers cpu -->\n<!-- end -->\n")
    assert "| greedy, base, batch 64, 512 in, 128 out, bfloat16 | tokens/s | 50,000 | 4,000 | 20,000 | 2.50 |" in text
    assert "| score, base, batch 64, 512 in, bfloat16 | sequences/s | 3.5 | - | - | - |" in text
    drawing = ElementTree.parse(tmp_path / "performance-gpu.svg").getroot()
    bars = [float(bar.get("width")) for bar in drawing.iterfind(".//{*}rect") if bar.get("height") == "14"]
    assert bars == [380.0, pytest.approx(30.4), pytest.approx(152.0), 380.0]


def test_a_page_without_a_place_for_the_results(tmp_path):
    page = tmp_path / "performance.md"
    page.write_text("nothing here\n")
    with pytest.raises(SystemExit, match=re.escape("<!-- peers gpu -->")):
        peers_page.write([[row("score", "sequences/s", t5x=3.5)]], page)
    assert page.read_text() == "nothing here\n"


def test_a_peer_that_fails_is_skipped_and_t5x_ends_the_program(capsys):
    asked = []

    def fails():
        asked.append(1)
        raise rounds.Failed("no such package")

    taken = list(rounds.in_turns({"t5x": lambda: 1, "peer": fails}, rounds=3, may_fail={"peer"}))
    assert taken == [("t5x", 1)] * 3 and len(asked) == 1
    assert "peer failed and is skipped:\nno such package" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="t5x failed:\nno such package"):
        list(rounds.in_turns({"t5x": fails}, rounds=3))


def test_failing_and_missing_contenders_are_reported():
    with pytest.raises(rounds.Failed, match="out of luck"):
        rounds.run([sys.executable, "-c", "import sys; sys.exit('out of luck')"])
    with pytest.raises(rounds.Failed, match="/no/python: No such file"):
        rounds.run(["/no/python"])
    assert rounds.run([sys.executable, "-c", 'print(\'{"a": 1}\\nnoise\\n{"b": 2}\')']) == {"a": 1, "b": 2}


def test_processes_of_a_contender_end_with_the_program(tmp_path):
    started = tmp_path / "pid"
    child = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    between = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    code = f"import rounds, sys\nwith rounds.leaving_in_order(): rounds.run([sys.executable, '-c', {between!r}])"
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(REPO / "benchmarks"), env["PYTHONPATH"]])
    outer = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.PIPE, text=True)
    _until(lambda: started.exists() and started.read_text())
    outer.terminate()
    _, said = outer.communicate(timeout=60)
    assert outer.returncode == 128 + signal.SIGTERM and not said
    _until(lambda: not _runs(int(started.read_text())))


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("decoding.py", []),
        ("peers.py", ["--work", "score:small:1"]),
        ("reranking.py", ["--candidates", "c.json", "--vocabulary", "v"]),
        ("span_corruption.py", ["t.txt", "v.model"]),
        ("training.py", ["t.txt", "v.model"]),
    ],
)
def test_a_program_that_is_ended_ends_its_contender(tmp_path, name, arguments):
    started, python = tmp_path / "pid", tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho $$ > {started}.new && mv {started}.new {started} && exec sleep 600\n")
    python.chmod(0o755)
    path = REPO / "benchmarks" / name
    code = (
        "import contenders, runpy, sys; contenders.write_model = lambda *_: None; "
        f"sys.executable = {str(python)!r}; runpy.run_path({str(path)!r}, run_name='__main__')"
    )
    env = environment()
    env["PYTHONPATH"] = os.pathsep.join([str(REPO / "benchmarks"), env["PYTHONPATH"]])
    outer = subprocess.Popen([sys.executable, "-c", code, *arguments], env=env, stderr=subprocess.PIPE, text=True)
    _until(started.exists)
    child = int(started.read_text())
    try:
        outer.terminate()
        _, said = outer.communicate(timeout=60)
        assert outer.returncode == 128 + signal.SIGTERM and not said
        _until(lambda: not _runs(child))  # the kernel ends it a moment later
    finally:
        if _runs(child):
            os.kill(child, signal.SIGKILL)


def _until(holds) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether it does; one that has ended, and that nobody has asked for, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    "name, arguments, says",
    [
        ("peers.py", ["--work", "fly:base:8"], "--work fly:base:8: known are train, greedy"),
        ("peers.py", ["--work", "train:base"], "--work train:base: write train:SIZE:BATCH"),
        ("peers.py", ["--only", "("], "'(' is no regular expression"),
        ("peers.py", ["--rounds", "0"], "'0' is not a positive number"),
        ("peers.py", ["--render", "/no/results.json"], "--render /no/results.json"),
        ("training.py", ["t.txt", "v.model", "--steps", "2"], "--steps 2: the first 2 only warm up"),
        ("decoding.py", ["--rounds", "0"], "'0' is not a positive number"),
        ("decoding.py", ["--work", "greedy16,fly"], "--work: fly is not one of greedy16, greedy1"),
        ("decoding.py", ["--only", "ctranslate2"], "--only ctranslate2 needs --ctranslate2 PYTHON"),
        ("decoding.py", ["--only", "theirs"], "invalid choice: 'theirs'"),
        ("reranking.py", ["--candidates", "c", "--vocabulary", "v", "--rounds", "0"], "'0' is not a positive number"),
        ("reranking.py", ["--candidates", "c", "--vocabulary", "v", "--pairs", "0"], "'0' is not a positive number"),
        ("span_corruption.py", ["t.txt", "v.model", "--rounds", "0"], "'0' is not a positive number"),
    ],
)
def test_wrong_arguments_end_with_one_line(name, arguments, says):
    ended = program(name, *arguments)
    assert ended.returncode and not ended.stdout
    assert says in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", None])
def test_ctranslate2_is_beside_float32_alone(tmp_path, monkeypatch, capsys, dtype):
    monkeypatch.setattr(peers.contenders, "write_model", lambda *_: None)
    args = argparse.Namespace(
        inputs=8, targets=8, steps=1, threads=1, dtype=dtype, optimizer="adamw", compile=False, ctranslate2="python"
    )
    calls = peers.contenders_of("greedy", "small", 1, args, str(tmp_path))
    assert list(calls) == ["t5x", "Hugging Face", *([] if dtype == "bfloat16" else ["CTranslate2"])]
    said = capsys.readouterr().err
    assert said == ("CTranslate2 is skipped: it computes in float32, not in bfloat16\n" if dtype == "bfloat16" else "")


def test_a_peer_that_computed_in_another_dtype_is_skipped(capsys):
    found = {"t5x": {"dtype": "bfloat16"}, "Hugging Face": {"dtype": "bfloat16"}, "CTranslate2": {"dtype": "float32"}}
    assert list(peers.of_our_dtype(found)) == ["t5x", "Hugging Face"]
    assert capsys.readouterr().err == "CTranslate2 is skipped: it computed in float32, t5x in bfloat16\n"
    batches = {"t5x": {}, "seqio": {}}
    assert peers.of_our_dtype(batches) == batches
