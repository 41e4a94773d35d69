"""Batch inference: results in the order of the examples, even if the run is interrupted and resumed.

| file | contents |
|---|---|
| `engine.py` | a model on the devices: batches and their padded lengths, results in the order of the examples |
| `jobs.py` | the loop of `infer`, `answer` and `rerank`: compute, write and resume chunks |
| `output.py` | the output of a job, and its chunks on disk |
| `generation.py` | decoding options of users; generated outputs: ended at stop strings, streamed in pieces |
| `loaded.py` | `t5x.load`: a model for strings, in Python |
| `input_lines.py` | the examples of a file |
| `task_inference.py` | `t5x infer --gin_file`: tasks and their output files |
| `t5x_api.py` | T5X's `get_infer_fn` |
"""
