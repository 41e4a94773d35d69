"""Command lines as T5X's users write them: absl's flags, JAX's flags, `t5x check` and `--run_mode`."""

import logging
import sys

import jax
import numpy as np
import pytest

from t5x.cli.main import run_mode_main
from t5x.cli.parser import parser_of
from tests.support import programs

DATES = "--gin_file=t5x/examples/demo/dates.gin"
LOGGING = ["--alsologtostderr", "--logtostderr", "--stderrthreshold=info", "--log_dir=/tmp", "--noshowprefixforinfo"]


@pytest.mark.parametrize("verb", ["train", "eval", "infer", "precompile", "check"])
def test_flags_of_t5x_programs_are_accepted(verb):
    flags = ["--coordinator_address=a:1", "--process_count=2", "--process_index=1", "--initialization_timeout=9"]
    data = ["--tfds_data_dir=/data", "--seqio_additional_cache_dirs=/a,/b", "--gin_search_paths=/c"]
    args = parser_of(verb).parse_args([*LOGGING, *flags, *data, "--verbosity=-1"])
    assert (args.process_count, args.process_index, args.verbosity) == (2, 1, logging.WARNING)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--multiprocess_gpu", True),
        ("--multiprocess_gpu=True", True),
        ("--multiprocess_gpu=False", False),
        ("--nomultiprocess_gpu", False),
        ("--multiprocess_gpu=0", False),
    ],
)
def test_flags_are_written_as_in_absl(flag, value):
    assert parser_of("train").parse_args([flag, DATES]).multiprocess_gpu is value


@pytest.mark.parametrize("flag", ["--multiprocess_gpu=maybe", "--verbosity=loud", "--fdl_config=a", "--jax_colour=red"])
def test_wrong_flags_are_refused(run_here, flag):
    run_here("train", DATES, flag).refused(flag.partition("=")[0])


def test_flags_of_jax_are_set(run_here):
    names = ("jax_log_compiles", "jax_cpu_collectives_implementation", "jax_persistent_cache_min_entry_size_bytes")
    before = {name: jax.config.values[name] for name in names}
    flags = ("--jax_log_compiles", f"--{names[1]}=mpi", f"--{names[2]}=7")
    try:
        assert run_here("train", DATES, *programs.SMALL, *flags, "--gin.MODEL_DIR=x", "--dry_run").code == 0
        assert [jax.config.values[name] for name in names] == [True, "mpi", 7]
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


# --- t5x check --------------------------------------------------------------------------------------------------------


def test_check_reports_all_errors_at_once(run_here):
    wrong = ("--gin.train.eval_perod=3", "--gin.utils.DatasetCfg.seed=1")
    result = run_here("check", "t5x/examples/demo/dates.gin", *wrong)
    result.refused("eval_perod", "eval_period", "DatasetCfg", "2 problems")


def test_check_lists_required_values(run_here):
    run_here("check", "t5x/configs/runs/finetune.gin", "t5x/examples/t5/t5_1_1/small.gin").refused(
        "MODEL_DIR", "MIXTURE_OR_TASK_NAME", "TASK_FEATURE_LENGTHS", "TRAIN_STEPS", "INITIAL_CHECKPOINT_PATH"
    )


@pytest.mark.parametrize("strict", [False, True])
def test_mistakes_that_t5x_accepts_are_warnings(run_here, tmp_path, strict):
    """An argument without effect, and an undefined macro that nothing reads."""
    (tmp_path / "unread.gin").write_text("UNREAD = %NEVER_DEFINED\n")
    arguments = [
        "t5x/examples/demo/dates.gin", tmp_path / "unread.gin", "--gin.MODEL_DIR='run'", "--gin.INIT_CHECKPOINT='a'",
    ]  # fmt: skip
    result = run_here("check", *arguments, *["--strict"] * strict)
    for words in ("INIT_CHECKPOINT", "NEVER_DEFINED"):
        assert words in result.err
    assert result.code == (2 if strict else 0)
    assert ("error: " in result.err) is strict


def test_check_accepts_a_part_for_other_files(run_here):
    assert run_here("check", "--dry_run", "t5x/examples/t5/t5_1_1/base.gin").code == 0
    run_here("check", "t5x/examples/t5/t5_1_1/bse.gin").refused("bse.gin", "base.gin")


# --- main.py ----------------------------------------------------------------------------------------------------------


def run_mode(mode, arguments):
    run_mode_main(["main.py", f"--run_mode={mode}", "--alsologtostderr", *arguments])


@pytest.mark.parametrize(
    ("mode", "arguments"),
    [
        ("train", [DATES, *programs.SMALL, "--gin.MODEL_DIR=x"]),
        ("eval", ["--gin_file=t5x/examples/demo/dates_eval.gin", "--gin.CHECKPOINT_PATH=x", "--gin.EVAL_OUTPUT_DIR=y"]),
    ],
)
def test_main_runs_the_mode(run_here, monkeypatch, mode, arguments):
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = run_here(mode, *arguments, "--dry_run", program=run_mode)
    assert result.code == 0, result.err
    assert f"{mode}_script" in result.out


def test_main_needs_a_mode(capsys):
    with pytest.raises(SystemExit) as ended:
        run_mode_main(["main.py", DATES])
    assert ended.value.code == 2
    assert "--run_mode" in capsys.readouterr().err


def test_precompile_writes_the_program_of_a_step_without_the_data(run_here, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = run_here("precompile", *programs.precompile(tmp_path), program=run_mode)
    assert result.code == 0, result.err
    for when in ("pre", "post"):
        assert (tmp_path / f"lowered_hlo_{when}_optimization").read_text().startswith("HloModule")
    assert np.load(tmp_path / "assignment").shape == (1, 1)
    assert len(list(tmp_path.iterdir())) == 3
