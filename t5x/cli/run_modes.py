"""T5X's program for all run modes: `python t5x/main.py --run_mode=train --gin_file=…`."""

import argparse
import enum
from collections.abc import Sequence
from typing import NoReturn

from t5x.cli.main import main_of


class RunMode(enum.Enum):
    """What `--run_mode` may be: the verb of the same name."""

    TRAIN = "train"
    EVAL = "eval"
    INFER = "infer"
    PRECOMPILE = "precompile"
    EXPORT = "export"


def main(argv: Sequence[str]) -> NoReturn:
    """Run the verb that `--run_mode` names with the other arguments, and exit.

    Args:
      argv: name of the program, then arguments.
    """
    parser = argparse.ArgumentParser(prog="main.py", usage="main.py --run_mode=MODE [options]", allow_abbrev=False)
    parser.add_argument(
        "--run_mode", required=True, choices=[mode.value for mode in RunMode],
        help="the verb to run; `t5x MODE --help` shows its options",
    )  # fmt: skip
    args, verb_argv = parser.parse_known_args(argv[1:])
    main_of(args.run_mode, verb_argv)
