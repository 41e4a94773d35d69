"""The commands and programs in docs/tpu.md and docs/launching.md: executed if they can be, parsed otherwise."""

import contextlib
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from t5x import configuration
from t5x.cli.parser import parser_of
from tests.apps.launching.real_gcloud import parse_commands
from tests.support import commands
from tests.support.paths import REPO
from tests.support.programs import t5x

PAGES = {name: (REPO / f"docs/{name}.md").read_text() for name in ("tpu", "launching")}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)


def command_lines(program: str) -> list[list[str]]:
    """Return the commands in `sh` blocks that start with this program, as words."""
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line, comments=True) for line in lines if line.startswith(program + " ")]


def test_python_prints_what_the_comments_say():
    code = "\n".join(blocks("tpu", "python"))
    expected = re.findall(r"^\s*(?:print|total)\(.*\)  # (.*)$", code, re.MULTILINE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/tpu.md", "exec"), {"__name__": "docs"})
    assert printed.getvalue().splitlines() == expected and len(expected) > 10


@pytest.mark.slow
def test_the_real_gcloud_parses_every_command(tmp_path: Path):
    found = command_lines("gcloud")
    assert len(found) > 15
    parse_commands(found, tmp_path)


def test_launches_of_the_docs_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("my_run.gin", "my_tasks.py"):
        (tmp_path / name).write_text("")
    found = command_lines("t5x launch")
    assert {words[2] for words in found} == {"tpu_vm", "vertex"}
    for _, _, engine, *options in found:
        # The gin files of the examples do not exist.
        result = commands.run(capsys, "launch", engine, "--dry_run", "--nocheck", *options)
        assert result.code == 0, result.err
    assert len(list((tmp_path / "runs/launch").iterdir())) >= 2


def test_other_commands_of_t5x_have_these_options():
    for words in command_lines("t5x"):
        if words[1] != "launch":
            others, _ = configuration.split_gin_args(words[2:])
            parser_of(words[1]).parse_args(others)


@pytest.mark.slow  # a plan compiles a model
def test_other_commands_of_t5x_run(tmp_path: Path):
    found = [words[1:] for words in command_lines("t5x") if words[1] != "launch" and "gs://" not in " ".join(words)]
    assert {words[0] for words in found} == {"doctor", "plan"}
    for words in found:
        done = t5x(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr


def test_shell_blocks_are_shell():
    for page in PAGES:
        for block in blocks(page, "sh"):
            subprocess.run(["bash", "-n"], input=block, text=True, check=True)


def test_links_of_both_pages_lead_somewhere():
    for page, text in PAGES.items():
        for target, anchor in re.findall(r"\]\(([\w./-]*\.md)?(#[\w-]+)?\)", text):
            path = REPO / "docs" / (target or f"{page}.md")
            assert path.exists(), target
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = ["#" + re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert not anchor or anchor in anchors, anchor
