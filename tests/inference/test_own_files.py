"""Inference touches no file but its own, and believes no file of its own that has changed."""

import json
import os
import shutil
from pathlib import Path

import pytest

from t5x.inference.output import _FORMAT, JOB_FILE, Chunks, FileOutput
from tests.files.disk import contents
from tests.inference.conftest import VERBS
from tests.support import commands


def interrupt(*_):
    raise KeyboardInterrupt


def flip(path: Path) -> None:
    """Change a byte of a file, but neither its size nor its time of modification."""
    times, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.fixture
def killed(run_verb, tmp_path, monkeypatch):
    """`killed(verb)` runs to `tmp_path/out`, is killed when so many chunks are written, and returns their directory."""
    write = FileOutput.write

    def kill(verb: str, after: int = 2) -> Path:
        def kills(self, *args):
            if len(self._chunks.finished) == after:
                interrupt()
            write(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(FileOutput, "write", kills)
            assert run_verb(verb, tmp_path / "out").code == 130
        return tmp_path / "tmp-out"

    return kill


# --- Files of others --------------------------------------------------------------------------------------------------


def a_note(directory: Path) -> None:
    directory.mkdir()
    (directory / "note.txt").write_text("mine")


def chunks_of_others(directory: Path) -> None:
    directory.mkdir()
    for name in ("out-chunk00000", "out-chunk00000.COMPLETED", "job.json"):
        (directory / name).write_text("{}")


def a_link(directory: Path) -> None:
    a_note(directory.parent / "elsewhere")
    directory.symlink_to(directory.parent / "elsewhere")


def a_link_to_chunks(directory: Path) -> None:
    (elsewhere := directory.parent / "elsewhere").mkdir()
    (elsewhere / JOB_FILE).write_text(json.dumps({"format": _FORMAT, "output": "out"}))
    directory.symlink_to(elsewhere)


def a_file(directory: Path) -> None:
    directory.write_text("mine")


@pytest.mark.parametrize("more", [[], ["--overwrite"]])
@pytest.mark.parametrize("make", [a_note, chunks_of_others, a_link, a_link_to_chunks, a_file])
def test_a_third_party_directory_is_refused_and_left_alone(make, more, run_verb, tmp_path):
    make(tmp_path / "tmp-out")
    before = contents(tmp_path)
    run_verb("infer", tmp_path / "out", *more).refused(str(tmp_path / "tmp-out"), "another output")
    assert contents(tmp_path) == before and (tmp_path / "tmp-out").is_symlink() == (make in (a_link, a_link_to_chunks))


@pytest.mark.parametrize("verb", VERBS)
def test_temporaries_replace_no_file_and_follow_no_link(verb, run_verb, tmp_path):
    (tmp_path / "theirs").write_text("mine")
    (tmp_path / "out.tmp").symlink_to(tmp_path / "theirs")
    (tmp_path / "tmp-out").mkdir()  # empty: there is nothing to lose in it
    assert run_verb(verb, tmp_path / "out").code == 0
    assert sorted(os.listdir(tmp_path)) == ["out", "out.tmp", "theirs"]
    assert (tmp_path / "out.tmp").is_symlink() and (tmp_path / "theirs").read_text() == "mine"


def test_a_link_in_the_place_of_a_chunk_is_not_followed(killed, run_verb, tmp_path):
    directory = killed("infer")
    (tmp_path / "theirs").write_text("mine")
    (directory / "out-chunk00002").symlink_to(tmp_path / "theirs")
    assert run_verb("infer", tmp_path / "out").code == 0
    assert contents(tmp_path) == {"out": (tmp_path / "out").read_bytes(), "theirs": b"mine"}


def test_third_party_files_in_the_directory_stay(killed, run_verb, tmp_path):
    directory = killed("infer")
    (directory / "out-chunk-notes.txt").write_text("mine")
    done = run_verb("infer", tmp_path / "out")
    assert done.code == 0 and "out-chunk-notes.txt" in done.err
    assert {name for name in contents(tmp_path) if "chunk" in name} == {"tmp-out/out-chunk-notes.txt"}
    (tmp_path / "out").unlink()
    assert run_verb("infer", tmp_path / "out").code == 0  # the directory is still known as ours


# --- An output that is an input ---------------------------------------------------------------------------------------

SAME = {
    "itself": lambda source, link: source,
    "a relative path": lambda source, link: Path(os.path.relpath(source)),
    "a symbolic link": lambda source, link: link.symlink_to(source) or link,
    "a hard link": lambda source, link: link.hardlink_to(source) or link,
    "a linked directory": lambda source, link: link.symlink_to(source.parent) or link / source.name,
}


@pytest.mark.parametrize("how", SAME)
@pytest.mark.parametrize("verb", VERBS)
def test_an_output_that_is_the_input_is_refused(verb, how, verb_inputs, run_verb, tmp_path):
    name = VERBS[verb][1]
    source = Path(shutil.copy(verb_inputs / name, tmp_path / name))
    before = source.read_bytes()
    output = SAME[how](source, tmp_path / "link")
    run_verb(verb, output, f"--input={source}", "--overwrite").refused(f"--output {output}", f"--input {source}")
    assert source.read_bytes() == before and not [name for name in os.listdir(tmp_path) if name.startswith("tmp-")]


def test_no_file_that_is_read_or_made_besides_is_an_output(verb_inputs, tmp_path, capsys):
    for name in ("run", "collection", "topics", "qrels"):
        (tmp_path / name).write_text("1\n")
    given = [f"--{name}={tmp_path / name}" for name in ("run", "collection", "topics", "qrels")]
    for name in ("run", "collection", "topics", "qrels"):
        done = commands.run(capsys, "rerank", "--model=m", *given, f"--output={tmp_path / name}", "--overwrite")
        done.refused("--output", f"--{name} {tmp_path / name}")
    questions = verb_inputs / "questions.jsonl"
    given = [f"--input={questions}", f"--output={tmp_path / 'out'}", f"--squad_predictions={questions}"]
    commands.run(capsys, "answer", "--model=m", *given, "--overwrite").refused("--squad_predictions", "--input")


# --- Files of ours that have changed ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_a_chunk_that_has_changed_is_computed_again(verb, killed, run_verb, tmp_path):
    assert run_verb(verb, tmp_path / "expected").code == 0
    directory = killed(verb)
    flip(directory / "out-chunk00001")
    done = run_verb(verb, tmp_path / "out")
    assert done.code == 0 and done.err.count("out-chunk00001 has changed since it was written") == 1
    assert "resuming after 1 finished chunk(s)" in done.err
    assert contents(tmp_path) == {name: (tmp_path / "expected").read_bytes() for name in ("expected", "out")}


def test_a_chunk_that_changes_before_it_is_merged_is_not_merged(run_verb, tmp_path, monkeypatch):
    assert run_verb("infer", tmp_path / "expected").code == 0
    finish = FileOutput.finish

    def changes_one(self, *args):
        flip(tmp_path / "tmp-out" / "out-chunk00001")
        finish(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(FileOutput, "finish", changes_one)
        damaged = run_verb("infer", tmp_path / "out")
    damaged.refused("out-chunk00001 has changed since it was written", "same command again")
    assert not (tmp_path / "out").exists()
    assert run_verb("infer", tmp_path / "out").code == 0
    assert (tmp_path / "out").read_bytes() == (tmp_path / "expected").read_bytes()


@pytest.mark.parametrize("verb", VERBS)
def test_an_output_that_has_changed_is_not_declared_done(verb, run_verb, tmp_path, monkeypatch):
    assert run_verb(verb, tmp_path / "expected").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(Chunks, "remove", interrupt)
        assert run_verb(verb, tmp_path / "out").code == 130
    flip(tmp_path / "out")
    before = contents(tmp_path)
    for _ in range(2):
        run_verb(verb, tmp_path / "out").refused(f"{tmp_path / 'out'} has changed since it was written", "--overwrite")
    assert contents(tmp_path) == before
    assert run_verb(verb, tmp_path / "out", "--overwrite").code == 0
    assert contents(tmp_path) == {name: (tmp_path / "expected").read_bytes() for name in ("expected", "out")}


# --- The whole and its chunks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_the_output_is_its_chunks_each_once_and_in_order(verb, run_verb, tmp_path, monkeypatch):
    chunks, remove = [], Chunks.remove

    def look(self):
        names = sorted(name for name in os.listdir(self.directory) if name[-5:].isdigit())
        chunks.extend(Path(self.directory, name).read_bytes() for name in names)
        remove(self)

    monkeypatch.setattr(Chunks, "remove", look)
    assert run_verb(verb, tmp_path / "out").code == 0
    assert len({*chunks}) == len(chunks) == 3 and all(chunk.count(b"\n") == 2 for chunk in chunks)
    assert (tmp_path / "out").read_bytes() == b"".join(chunks)
