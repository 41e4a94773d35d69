"""Batch inference: results in the order of the examples, even if the run is interrupted and resumed.

| file | contents |
|---|---|
| `engine.py` | a model on the devices: batches of similar lengths, results in the order of the examples |
| `buckets.py` | groups examples into batches and chooses padded lengths |
| `options.py` | decoding options of users, as arguments for the model |
| `chunks.py` | results on disk in chunks, so that a killed run can resume |
| `loaded.py` | `t5x.load`: a model for strings, in Python |
| `lines.py`, `files.py` | `t5x infer --model`: plain files |
| `tasks.py`, `writing.py` | `t5x infer --gin_file`: tasks and their output files |
"""
