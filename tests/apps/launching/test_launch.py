"""`t5x launch`: commands that would fail in every process are refused before anything starts."""

import pytest

from tests.support import commands

DATES = "t5x/examples/demo/dates.gin"

WRONG = {
    "no engine": ("", "ENGINE", "local"),
    "an unknown engine": ("cloud -- train", "cloud", "local"),
    "no command": ("local", "-- train"),
    "an unknown verb": ("local -- tran", "tran"),
    "a verb of one process": ("local -- plan", "t5x plan", "one process"),
    "an unknown option of the verb": (f"local -- train --gin_file={DATES} --dryrun", "--dry_run"),
    "the place of a process": (f"local -- train --gin_file={DATES} --process_index=1", "--process_index"),
    "no processes": (f"local --nocheck --processes 0 -- train --gin_file={DATES}", "--processes"),
    "a variable without a value": (f"local --nocheck --env A -- train --gin_file={DATES}", "NAME=VALUE"),
    "a secret": (f"local --nocheck --env HF_TOKEN=abc -- train --gin_file={DATES}", "HF_TOKEN"),
    "a gin file that is not there": ("local -- --run_mode=train --gin_file=none.gin", "none.gin", "--nocheck"),
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_launches_start_nothing(line, capsys, tmp_path):
    words, *expected = WRONG[line]
    options = words.split()
    if "local" in options:
        options[1:1] = ["--save_to", str(tmp_path / "saved")]
    commands.run(capsys, "launch", *options).refused(*expected)
    assert not list(tmp_path.iterdir())


def test_a_dry_run_saves_what_would_run(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    result = commands.run(
        capsys, "launch", "local", "--processes", 2, "--cpu_devices", 4, "--dry_run", "--nocheck",
        "--env", "TOKENIZERS_PARALLELISM=false", "--save_to", tmp_path, "--", "--gin_file=a b.gin", "--run_mode=train",
    )  # fmt: skip
    saved = (tmp_path / "commands.sh").read_text()
    assert result.code == 0 and saved in result.out
    assert saved.count("train") == 2 and "'--gin_file=a b.gin'" in saved and "--process_index=1" in saved
    assert "TOKENIZERS_PARALLELISM=false" in saved and "a secret" not in saved
