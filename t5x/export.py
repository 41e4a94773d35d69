"""T5X's program that writes a SavedModel: `python t5x/export.py --gin_file=…`. The library is `export_lib`."""

# ruff: noqa: F401

from t5x.export_lib import save

if __name__ == "__main__":
    from t5x import cli

    cli.main_of("export")
