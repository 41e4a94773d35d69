"""T5X's program that writes a SavedModel; see `t5x.apps.exporting.t5x_api`."""

from t5x.apps.exporting.t5x_api import save  # noqa: F401

if __name__ == "__main__":
    from t5x.cli.main import main_of

    main_of("export")
