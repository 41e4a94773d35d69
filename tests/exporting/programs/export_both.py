"""Exports a model as a SavedModel and as StableHLO: `export_both.py MODEL DIR`."""

import sys

from t5x.exporting.exporter import export
from t5x.inference.options import Decoding

options = {"max_input_length": 20, "max_length": 6, "decoding": Decoding(beams=3)}
export(sys.argv[1], f"{sys.argv[2]}/saved/1", "savedmodel", warmup=["a"], **options)
export(sys.argv[1], f"{sys.argv[2]}/hlo", "stablehlo", platforms=["cpu"], **options)
