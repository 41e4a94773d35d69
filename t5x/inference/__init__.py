"""Batch inference: examples in, results out in the same order, through any number of interruptions.

| file | what |
|---|---|
| `engine.py` | a model on the devices: batches of similar lengths, results in the order of the examples |
| `buckets.py` | which examples are computed together, and at which lengths |
| `options.py` | what a user may ask of decoding, as arguments for the model |
| `chunks.py` | results on disk, chunk by chunk, so that a killed run goes on |
| `loaded.py` | `t5x.load`: a model for texts, in Python |
| `lines.py`, `files.py` | `t5x infer --model`: files of texts |
| `tasks.py`, `writing.py` | `t5x infer --gin_file`: tasks, and what is written of them |
"""
