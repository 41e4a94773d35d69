"""T5X's `t5x.eval`; see `t5x.runs.eval`."""

from t5x.runs.eval import *  # noqa: F403

if __name__ == "__main__":
    from t5x.cli.main import main_of

    main_of("eval")
