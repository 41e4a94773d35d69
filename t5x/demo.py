"""`t5x demo`: a tiny T5 learns to write dates, with the same entry point and files as any other run."""

import logging
import shlex
from collections.abc import Sequence

from t5x import configuration, startup
from t5x.examples.demo.dates import Dates

log = logging.getLogger(__name__)

GIN_FILE = "t5x/examples/demo/dates.gin"
SHOWN = 8
OWN_WORDS = "the third of March '97"


def demo(model_dir: str, bindings: Sequence[str] = ()) -> float:
    """Train, resume or reuse the demo in `model_dir`, and print some of its answers.

    Args:
      bindings: additional gin bindings.

    Returns:
      The share of held-out dates with an exactly correct answer.
    """
    startup.enable_compilation_cache()
    import gin

    from t5x import checkpoints
    from t5x.inference.loaded import load
    from t5x.train import train

    # --- Train, with the ordinary entry point and an ordinary gin file ------------------------------------------------
    print(
        f"A tiny byte-level T5 learns dates, as {GIN_FILE} says; everything it writes goes to {model_dir}\n", flush=True
    )
    configuration.parse(
        gin_files=[GIN_FILE], bindings=[f"MODEL_DIR = {model_dir!r}", *bindings], entry_points={"train": train}
    )
    configuration.check(train)
    newest = checkpoints.CheckpointStore(model_dir).newest_step() or 0
    if newest > gin.query_parameter("%TRAIN_STEPS"):
        print(f"{model_dir} has been trained longer, to step {newest}; that model is used", flush=True)
    else:
        configuration.configured(train)()

    # --- Try it on dates that do not occur in the training data in any form -------------------------------------------
    held_out = Dates("test")
    examples = [{"inputs": held_out[i]["inputs"]} for i in range(len(held_out))]
    expected = [held_out[i]["targets"] for i in range(len(held_out))]
    made = load(model_dir).generate([e["inputs"] for e in examples], max_length=16, batch_size=len(examples))
    said = [generation.text for generation in made]
    right = sum(a == b for a, b in zip(said, expected, strict=True))

    width = max(len(e["inputs"]) for e in examples[:SHOWN])
    print(f"\n{'a date never seen in training':<{width}}  the model says  expected")
    for example, answer, truth in list(zip(examples, said, expected, strict=True))[:SHOWN]:
        print(f"{example['inputs']:<{width}}  {answer:<14}  {truth}  {'right' if answer == truth else 'WRONG'}")

    # --- Print the next steps -----------------------------------------------------------------------------------------
    where = shlex.quote(model_dir)
    print(
        f"""
watch it:      {startup.command("tensorboard")} --logdir {where}
resume it:     {startup.command("t5x")} train --gin_file={GIN_FILE} --gin.MODEL_DIR={where} --gin.TRAIN_STEPS=2000
your own date: echo {shlex.quote(OWN_WORDS)} | {startup.command("t5x")} infer --model {where} --input -

held-out exact match: {100 * right / len(said):.1f} % ({right}/{len(said)})""",
        flush=True,
    )
    return right / len(said)
