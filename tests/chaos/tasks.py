"""Registers the mixture `chaos`, for a run that is killed, and `chaos_held_out`, which it is evaluated on."""

from t5x import data
from tests.data.programs import mixed_batches

VOCABULARY = mixed_batches.VOCABULARY

mixed_batches.register("chaos", prefix="chaos_")


def overlap(targets: list[str], predictions: list[str]) -> dict[str, float]:
    shared = [len(set(target) & set(found)) for target, found in zip(targets, predictions, strict=True)]
    return {"overlap": sum(shared) / len(shared)}


data.TaskRegistry.add(
    "chaos_held_out",
    data.FunctionDataSource(lambda split: mixed_batches.numbers(12, 1, 3, 4), splits=("validation",)),
    output_features={name: data.Feature(VOCABULARY) for name in ("inputs", "targets")},
    preprocessors=[data.preprocessors.tokenize, data.preprocessors.append_eos_after_trim],
    metric_fns=[overlap],
)
