"""T5X's `t5x.train`; see `t5x.runs.train`."""

from t5x.runs.train import *  # noqa: F403

if __name__ == "__main__":
    from t5x.cli.main import main_of

    main_of("train")
