"""T5X's `t5x.main`; see `t5x.cli.main`."""

from t5x.cli.main import RunMode as RunMode
from t5x.cli.main import run_mode_main as main

if __name__ == "__main__":
    import sys

    main(sys.argv)
