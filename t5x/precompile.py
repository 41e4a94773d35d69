"""T5X's `t5x.precompile`; see `t5x.runs.precompile`."""

from t5x.runs.precompile import *  # noqa: F403

if __name__ == "__main__":
    from t5x.cli.main import main_of

    main_of("precompile")
