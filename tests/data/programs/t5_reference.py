"""What the preprocessors of the real t5 and seqio make of given examples. Run with an interpreter that has both:

    python t5_reference.py JOBS.json RESULTS.json

JOBS is {"maps": {name: {"function", "arguments", "examples"}}, "lengths": [[inputs length, density, span], …],
"objectives": {name: {"function", "arguments", "documents"}}, "sequence_length": {…}, "vocabulary": [model, extra ids],
"masks": {"counts": [density, span, lengths], "statistics": [length, density, span, number]},
"corrupt": [[tokens, mask], …], "prefixes": [[density, lengths, number], …]}.
"""

import json
import os
import sys
import types

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import seqio
import tensorflow as tf

_T5 = os.path.join(os.path.dirname(os.path.dirname(seqio.__file__)), "t5")
for _name, _path in (("t5", _T5), ("t5.data", os.path.join(_T5, "data"))):  # their own imports need much more
    sys.modules[_name] = types.ModuleType(_name)
    sys.modules[_name].__path__ = [_path]

import t5.data.preprocessors as t5  # noqa: E402


def signature(value):
    if isinstance(value, dict):
        return {key: signature(one) for key, one in value.items()}
    shape = ()
    if isinstance(value, list):
        shape, value = (None,), value[0]
    return tf.TensorSpec(shape, {str: tf.string, int: tf.int32, float: tf.float32}[type(value)])


def plain(value):
    if isinstance(value, dict):
        return {key: plain(one) for key, one in value.items()}
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, list):
        return [plain(one) for one in value]
    return value.decode() if isinstance(value, bytes) else getattr(value, "item", lambda: value)()


def dataset(examples):
    return tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=signature(examples[0]))


def features(jobs):
    file, extra_ids = jobs["vocabulary"]
    vocabulary = seqio.SentencePieceVocabulary(file, extra_ids)
    return {name: seqio.Feature(vocabulary) for name in ("inputs", "targets")}


def mapped(job, jobs):
    function = getattr(t5, job["function"], None) or getattr(seqio.preprocessors, job["function"])
    arguments = dict(job["arguments"])
    if job.get("features"):
        arguments |= {"output_features": features(jobs)}
    return [plain(one) for one in function(dataset(job["examples"]), **arguments).as_numpy_iterator()]


def objective(job, jobs):
    with seqio.utils.map_seed_manager(7):
        made = getattr(t5, job["function"])(
            dataset([{"targets": document} for document in job["documents"]]),
            sequence_length=jobs["sequence_length"],
            output_features=features(jobs),
            **job["arguments"],
        )
    return [plain(one) for one in made.as_numpy_iterator()]


def seeds(number):
    return tf.stack([tf.stack([number, 1]), tf.stack([number, 2])])


def over(numbers, function):
    return list(tf.data.Dataset.from_tensor_slices(np.array(numbers, np.int32)).map(function).as_numpy_iterator())


def span_lengths(mask):
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return (edges[1::2] - edges[::2]).tolist()


def masks(job):
    density, span, lengths = job["counts"]
    counts = over(lengths, lambda n: t5.random_spans_noise_mask(n, density, seeds(n), mean_noise_span_length=span))
    length, density, span, number = job["statistics"]
    many = over(range(number), lambda i: t5.random_spans_noise_mask(length, density, seeds(i), span))
    return {
        "counts": [[int(mask.sum()), len(span_lengths(mask))] for mask in counts],
        "span_lengths": [one for mask in many for one in span_lengths(mask)],
        "by_position": np.mean(many, axis=0).tolist(),
    }


def corrupted(tokens, mask, jobs):
    vocabulary = features(jobs)["inputs"].vocabulary
    both = (t5.noise_span_to_unique_sentinel, t5.nonnoise_span_to_unique_sentinel)
    return [plain(function(tf.constant(tokens), tf.constant(mask), vocabulary, None).numpy()) for function in both]


def prefixes(density, lengths, number):
    def seen(length):
        masks = over(range(number), lambda i: t5.random_prefix_noise_mask(length, density, seeds(i)))
        return sorted({int(mask.sum()) for mask in masks})

    return [seen(length) for length in lengths]


def main(jobs_file, results_file):
    with open(jobs_file) as file:
        jobs = json.load(file)
    results = {
        "maps": {name: mapped(job, jobs) for name, job in jobs["maps"].items()},
        "lengths": [t5.random_spans_helper(*job, 1, 1) for job in jobs["lengths"]],
        "objectives": {name: objective(job, jobs) for name, job in jobs["objectives"].items()},
        "masks": masks(jobs["masks"]),
        "corrupt": [corrupted(tokens, mask, jobs) for tokens, mask in jobs["corrupt"]],
        "prefixes": [prefixes(*job) for job in jobs["prefixes"]],
    }
    with open(results_file, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
