"""Exports a SavedModel and StableHLO, or a SavedModel of token ids: `export_both.py MODEL DIR [ids]`."""

import sys

from t5x.apps.exporting.exporter import export
from t5x.inference.generation import Decoding

options = {"max_input_length": 20, "max_length": 6, "decoding": Decoding(beams=3)}
if sys.argv[3:] == ["ids"]:
    export(sys.argv[1], f"{sys.argv[2]}/saved/1", "savedmodel", token_ids=True, **options)
else:
    export(sys.argv[1], f"{sys.argv[2]}/saved/1", "savedmodel", warmup=["a"], **options)
    export(sys.argv[1], f"{sys.argv[2]}/hlo", "stablehlo", platforms=["cpu"], **options)
