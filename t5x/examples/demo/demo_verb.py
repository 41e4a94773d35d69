"""`t5x demo`: a tiny T5 learns to write dates, with the same entry point and files as any other run."""

import argparse
import os
import shlex

from t5x._runtime.signals import work_begins
from t5x.cli.parser import VerbParser

GIN_FILE = "t5x/examples/demo/dates.gin"


def define(parser: VerbParser) -> None:
    parser.set_help(
        "Train a tiny byte-level T5 on this machine to convert dates to ISO format, and show what it learned.",
        "t5x demo",
    )
    parser.add_argument("--model_dir", default=os.path.join("runs", "demo"), metavar="DIR", help="default: runs/demo")
    parser.set_defaults(gin_bindings=[])


def run(args: argparse.Namespace) -> None:
    """Train, resume or reuse the demo in --model_dir, and print some of its answers."""
    from t5x import configuration
    from t5x._runtime import startup
    from t5x.partitioning import multiprocess

    multiprocess.enable_compilation_cache()
    import gin

    from t5x import checkpoints
    from t5x.examples.demo.dates import Dates
    from t5x.inference.loaded import load
    from t5x.runs.train import train

    work_begins()
    # --- Train, with the ordinary entry point and an ordinary gin file ------------------------------------------------
    model_dir = args.model_dir
    print(f"A tiny byte-level T5 learns dates ({GIN_FILE}). Its files are in {model_dir}\n", flush=True)
    configuration.parse(
        gin_files=[GIN_FILE], bindings=[f"MODEL_DIR = {model_dir!r}", *args.gin_bindings], entry_points={"train": train}
    )
    configuration.check(train)
    newest = checkpoints.CheckpointStore(model_dir).newest_step() or 0
    if newest > gin.query_parameter("%TRAIN_STEPS"):
        print(f"{model_dir} has already been trained to step {newest}; using that model", flush=True)
    else:
        configuration.configured(train)()

    # --- Try it on dates that do not occur in the training data in any form -------------------------------------------
    held_out = list(Dates("test"))
    generated = load(model_dir).generate(
        [example["inputs"] for example in held_out], max_length=16, batch_size=len(held_out)
    )
    answers = [generation.text for generation in generated]
    right = sum(answer == example["targets"] for answer, example in zip(answers, held_out, strict=True))
    width = max(len(example["inputs"]) for example in held_out[:8])
    print(f"\n{'a date never seen in training':<{width}}  the model says  expected")
    for example, answer in list(zip(held_out, answers, strict=True))[:8]:
        verdict = "right" if answer == example["targets"] else "WRONG"
        print(f"{example['inputs']:<{width}}  {answer:<14}  {example['targets']}  {verdict}")

    # --- Print the next steps -----------------------------------------------------------------------------------------
    t5x, where = startup.command("t5x"), shlex.quote(model_dir)
    own_date = shlex.quote("the third of March '97")
    print(
        f"""
watch it:      {startup.command("tensorboard")} --logdir {where}
resume it:     {t5x} train --gin_file={GIN_FILE} --gin.MODEL_DIR={where} --gin.TRAIN_STEPS=2000
your own date: echo {own_date} | {t5x} infer --model {where} --input -

held-out exact match: {100 * right / len(held_out):.1f} % ({right}/{len(held_out)})""",
        flush=True,
    )
