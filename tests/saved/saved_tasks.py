"""A user's own tasks: the packed mixture `saved`, its validation set, and a preprocessor of theirs."""

from t5x import data

_FEATURES = {name: data.Feature(data.ByteVocabulary(extra_ids=100)) for name in ("inputs", "targets")}


def sums(split):
    """Sums in digits; those of the validation split occur in no other."""
    first = {"train": 0, "validation": 100}[split]
    return [{"inputs": f"{n} + {n % 7}", "targets": str(n + n % 7)} for n in range(first, first + 24)]


def documents(split):
    return [{"targets": " ".join(str(n * k) for k in range(1, 9))} for n in range(1, 18)]


def drop_sevens(example):
    return None if example["targets"].endswith("7") else example


def overlap(targets, predictions):
    shared = [len(set(target) & set(text)) for target, text in zip(targets, predictions, strict=True)]
    return {"overlap": sum(shared) / len(shared)}


data.TaskRegistry.add(
    "saved_sums",
    data.FunctionDataSource(sums, splits=("train", "validation")),
    output_features=_FEATURES,
    preprocessors=[drop_sevens, data.preprocessors.tokenize, data.preprocessors.append_eos],
    metric_fns=[overlap],
)
data.TaskRegistry.add(
    "saved_documents",
    data.FunctionDataSource(documents, splits=("train",)),
    output_features=_FEATURES,
    preprocessors=[
        data.preprocessors.tokenize,
        data.preprocessors.span_corruption,
        data.preprocessors.append_eos_after_trim,
    ],
)
data.MixtureRegistry.add("saved", [("saved_sums", 2.0), ("saved_documents", 1.0)])
