"""The verbs of the `t5x` command, one module each: `define(parser)` adds arguments, `run(args)` runs it.

Nothing here imports JAX before the arguments have been checked.
"""

VERBS = {
    "demo": "train a tiny T5 on this machine in a few minutes and try it",
    "train": "pretrain or fine-tune, from gin files or a data file",
    "data": "show the examples of a task or a file after preprocessing, and their lengths",
    "check": "report what is wrong with gin files, and run nothing",
    "eval": "score one or all checkpoints of a run with a task's metrics",
    "infer": "write a model's predictions or scores for a file or a task",
    "answer": "answer questions about passages and locate the answers in them",
    "rerank": "order passages by relevance",
    "rank-eval": "score rankings with judgments: MRR, nDCG, MAP, significance tests",
    "serve": "serve models over HTTP, with a page to try them",
    "inspect": "describe a checkpoint of any format",
    "convert": "convert a checkpoint to t5x's, T5X's or Hugging Face's format",
    "export": "export a model to TensorFlow, StableHLO, transformers, CTranslate2 or ONNX",
    "cache": "write a task's tokenized examples once, for training to read",
    "precompile": "compile a training step and write its HLO",
    "plan": "estimate memory, time and cost of training on devices that are not here",
    "doctor": "check whether this machine is ready, with a fix for each problem",
    "launch": "start a command on several processes, machines or a cluster",
    "completion": "print the completion of verbs and options for bash, zsh or fish",
}
