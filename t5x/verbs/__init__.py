"""The verbs of the `t5x` command, a module each: `define(parser)` adds its arguments, `run(args)` does it.

Nothing here imports JAX before it is known that there is something to run.
"""

VERBS = (
    "demo", "train", "data", "eval", "infer", "answer", "rerank", "rank-eval", "inspect", "convert", "cache", "bench",
)  # fmt: skip
