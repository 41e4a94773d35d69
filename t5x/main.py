"""T5X's `t5x.main`; see `t5x.cli.run_modes`."""

from t5x.cli.run_modes import *  # noqa: F403

if __name__ == "__main__":
    import sys

    main(sys.argv)  # noqa: F405
