"""The verbs of the `t5x` command, one module each: `define(parser)` adds arguments, `run(args)` runs it.

Nothing here imports JAX before the arguments have been checked.
"""

VERBS = (
    "demo", "train", "data", "check", "eval", "infer", "answer", "rerank", "rank-eval", "serve", "inspect", "convert",
    "export", "cache", "precompile", "bench", "plan", "doctor", "launch",
    "completion",
)  # fmt: skip
