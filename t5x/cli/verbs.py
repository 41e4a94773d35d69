"""The verbs of the `t5x` command by name, so that nothing is imported before it is called.

A verb is a module: `define(parser)` adds its arguments, `run(args)` runs it. Modules of verbs import JAX only in `run`,
after the arguments have been checked.
"""

import importlib
from types import ModuleType

# {verb: (its module, what `t5x --help` prints about it)}
VERBS = {
    "demo": ("t5x.examples.demo.demo_verb", "train a tiny T5 on this machine in a few minutes and try it"),
    "train": ("t5x.cli.train_verb", "pretrain or fine-tune, from gin files or a data file"),
    "data": ("t5x.cli.data_verb", "show the examples of a task or a file after preprocessing, and their lengths"),
    "check": ("t5x.cli.check_verb", "report what is wrong with gin files, and run nothing"),
    "eval": ("t5x.cli.eval_verb", "score one or all checkpoints of a run with a task's metrics"),
    "infer": ("t5x.cli.infer_verb", "write a model's predictions or scores for a file or a task"),
    "answer": ("t5x.apps.answering.answer_verb", "answer questions about passages and locate the answers in them"),
    "rerank": ("t5x.apps.ranking.rerank_verb", "order passages by relevance"),
    "rank-eval": (
        "t5x.apps.ranking.rank_eval_verb",
        "score rankings with judgments: MRR, nDCG, MAP, significance tests",
    ),
    "serve": ("t5x.apps.serving.serve_verb", "serve models over HTTP, with a page to try them"),
    "inspect": ("t5x.cli.inspect_verb", "describe a checkpoint of any format"),
    "convert": ("t5x.cli.convert_verb", "convert a checkpoint to t5x's, T5X's or Hugging Face's format"),
    "export": (
        "t5x.apps.exporting.export_verb",
        "export a model to TensorFlow, StableHLO, transformers, CTranslate2 or ONNX",
    ),
    "cache": ("t5x.cli.cache_verb", "write a task's tokenized examples once, for training to read"),
    "precompile": ("t5x.cli.precompile_verb", "compile a training step and write its HLO"),
    "plan": ("t5x.apps.planning.plan_verb", "estimate memory, time and cost of training on devices that are not here"),
    "doctor": ("t5x.apps.doctor.doctor_verb", "check whether this machine is ready, with a fix for each problem"),
    "launch": ("t5x.apps.launching.launch_verb", "start a command on several processes, machines or a cluster"),
    "completion": ("t5x.cli.completion_verb", "print the completion of verbs and options for bash, zsh or fish"),
}
# Programs under t5x/scripts/ that run like a verb, but are not one.
SCRIPTS = {"convert-tf-checkpoint": "t5x.scripts.convert_tf_checkpoint"}
# {name in gin files: the function that a verb configures and calls}
GIN_ENTRY_POINTS = {
    "train": "t5x.runs.train:train",
    "evaluate": "t5x.runs.eval:evaluate",
    "infer": "t5x.runs.infer:infer",
    "precompile": "t5x.runs.precompile:precompile",
    "save": "t5x.apps.exporting.t5x_api:save",
}


def import_verb(verb: str) -> ModuleType:
    """Import the module of a verb, or of a script that runs like one."""
    return importlib.import_module(SCRIPTS.get(verb) or VERBS[verb][0])
