"""A user's module that registers tasks in the real seqio: functions and text files, with tf.data preprocessors."""

import functools
import os

import seqio
import tensorflow as tf

FEATURES = {name: seqio.Feature(seqio.ByteVocabulary()) for name in ("inputs", "targets")}
ENDS = [seqio.preprocessors.tokenize, seqio.CacheDatasetPlaceholder(), seqio.preprocessors.append_eos_after_trim]


def questions(split, shuffle_files):
    numbers = range(40) if split == "train" else range(100, 111)
    made = [{"question": f"Wie viel ist {i}? äöü", "answer": f"{i}", "others": [f"{i}", f"#{i}"]} for i in numbers]
    signature = {
        "question": tf.TensorSpec((), tf.string),
        "answer": tf.TensorSpec((), tf.string),
        "others": tf.TensorSpec((None,), tf.string),
    }
    return tf.data.Dataset.from_generator(lambda: iter(made), output_signature=signature)


def any_of_them(text, example=None, is_target=False):
    return [other.decode("utf-8") for other in example["others"]] if is_target else text


def found(targets, predictions):
    right = sum(prediction in target for target, prediction in zip(targets, predictions, strict=True))
    return {"found": seqio.metrics.Scalar(100 * right / len(targets)), "note": seqio.metrics.Text("not a number")}


def mean_score(targets, scores):
    return {"mean_score": sum(scores) / len(targets)}


def unreadable(split, shuffle_files, seed=None):
    raise AssertionError("the source was read though there is a cache")


@seqio.map_over_dataset
def first_letters(line):
    return {"inputs": line, "targets": tf.strings.substr(line, 0, 4)}


@seqio.map_over_dataset(num_seeds=1)
def noisy(example, seed):
    where = tf.random.stateless_uniform((), seed, 0, tf.size(example["inputs"]), tf.int32)
    return example | {"inputs": tf.concat([example["inputs"][:where], [258], example["inputs"][where:]], 0)}


@seqio.map_over_dataset
def half(example, sequence_length):
    return example | {"inputs": example["inputs"][: sequence_length["inputs"] // 2]}


rekey = functools.partial(
    seqio.preprocessors.rekey, key_map={"inputs": "question", "targets": "answer", "others": "others"}
)
seqio.TaskRegistry.add(
    "questions",
    source=seqio.FunctionDataSource(questions, splits=("train", "validation")),
    preprocessors=[rekey, *ENDS],
    postprocess_fn=any_of_them,
    metric_fns=[found, mean_score],
    output_features=FEATURES,
)
seqio.TaskRegistry.add(
    "lines",
    source=seqio.TextLineDataSource({"train": os.environ["LINES"]}),
    preprocessors=[first_letters, *ENDS, noisy],
    output_features=FEATURES,
)
seqio.TaskRegistry.add(
    "only_cached",
    source=seqio.FunctionDataSource(unreadable, splits=("train", "validation")),
    preprocessors=ENDS,
    output_features=FEATURES,
)
seqio.TaskRegistry.add(
    "endless",
    source=seqio.FunctionDataSource(
        lambda split, shuffle_files, seed=None: questions(split, False).repeat(), splits=("train",)
    ),
    preprocessors=[rekey, *ENDS],
    output_features=FEATURES,
)
seqio.TaskRegistry.add(
    "needs_lengths",
    source=seqio.FunctionDataSource(questions, splits=("train",)),
    preprocessors=[rekey, seqio.preprocessors.tokenize, half],
    output_features=FEATURES,
)
seqio.MixtureRegistry.add("inner", [("lines", 2.0), ("questions", 1.0)])
seqio.MixtureRegistry.add("both", [("inner", 1.0), ("questions", 3.0)])
