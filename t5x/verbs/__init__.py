"""The verbs of the `t5x` command by name, so that nothing is imported before it is called.

A verb is a module: `define(parser)` adds its arguments, `run(args)` runs it. Modules of verbs import JAX only in `run`,
after the arguments have been checked.
"""

import importlib
from types import ModuleType

# {verb: (its module, what `t5x --help` prints about it)}
VERBS = {
    "demo": ("t5x.verbs.demo", "train a tiny T5 on this machine in a few minutes and try it"),
    "train": ("t5x.verbs.train", "pretrain or fine-tune, from gin files or a data file"),
    "data": ("t5x.verbs.data", "show the examples of a task or a file after preprocessing, and their lengths"),
    "check": ("t5x.verbs.check", "report what is wrong with gin files, and run nothing"),
    "eval": ("t5x.verbs.eval", "score one or all checkpoints of a run with a task's metrics"),
    "infer": ("t5x.verbs.infer", "write a model's predictions or scores for a file or a task"),
    "answer": ("t5x.verbs.answer", "answer questions about passages and locate the answers in them"),
    "rerank": ("t5x.verbs.rerank", "order passages by relevance"),
    "rank-eval": ("t5x.verbs.rank_eval", "score rankings with judgments: MRR, nDCG, MAP, significance tests"),
    "serve": ("t5x.verbs.serve", "serve models over HTTP, with a page to try them"),
    "inspect": ("t5x.verbs.inspect", "describe a checkpoint of any format"),
    "convert": ("t5x.verbs.convert", "convert a checkpoint to t5x's, T5X's or Hugging Face's format"),
    "export": ("t5x.verbs.export", "export a model to TensorFlow, StableHLO, transformers, CTranslate2 or ONNX"),
    "cache": ("t5x.verbs.cache", "write a task's tokenized examples once, for training to read"),
    "precompile": ("t5x.verbs.precompile", "compile a training step and write its HLO"),
    "plan": ("t5x.verbs.plan", "estimate memory, time and cost of training on devices that are not here"),
    "doctor": ("t5x.verbs.doctor", "check whether this machine is ready, with a fix for each problem"),
    "launch": ("t5x.verbs.launch", "start a command on several processes, machines or a cluster"),
    "completion": ("t5x.verbs.completion", "print the completion of verbs and options for bash, zsh or fish"),
}
# Programs under t5x/scripts/ that run like a verb, but are not one.
SCRIPTS = {"convert-tf-checkpoint": "t5x.verbs.convert_tf_checkpoint"}
# {name in gin files: the function that a verb configures and calls}
GIN_ENTRY_POINTS = {
    "train": "t5x.train:train",
    "evaluate": "t5x.eval:evaluate",
    "infer": "t5x.infer:infer",
    "precompile": "t5x.precompile:precompile",
    "save": "t5x.export_lib:save",
}


def import_verb(verb: str) -> ModuleType:
    """Import the module of a verb, or of a script that runs like one."""
    return importlib.import_module(SCRIPTS.get(verb) or VERBS[verb][0])
