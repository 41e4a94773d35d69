"""What the real seqio makes of given examples and texts. Run with an interpreter that has seqio:

    python seqio_reference.py JOBS.json RESULTS.npz

JOBS is {"converters": {name: {"class", "arguments", "lengths", "examples"}}, "vocabularies": {name: {"class",
"arguments", "texts", "ids"}}}. RESULTS has an array [rows, length] at converters/<name>/<feature>, the encoded texts
one after the other at vocabularies/<name>/ids with their lengths at …/lengths, the decoded ids and texts as JSON in
bytes at …/decoded, and its special ids and size at …/properties.
"""

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import seqio
import tensorflow as tf


def rows(job):
    signature = {feature: tf.TensorSpec((None,), tf.int32) for feature in job["examples"][0]}
    dataset = tf.data.Dataset.from_generator(lambda: iter(job["examples"]), output_signature=signature)
    converter = getattr(seqio, job["class"])(**job["arguments"])
    made = list(converter(dataset, job["lengths"]).as_numpy_iterator())
    return {feature: np.stack([row[feature] for row in made]) for feature in made[0]}


def tokens(job):
    vocabulary = getattr(seqio, job["class"])(**job["arguments"])
    encoded = [vocabulary.encode(text) for text in job["texts"]]
    decoded = [vocabulary.decode(ids) for ids in [*encoded, *job["ids"]]]
    return {
        "ids": np.array([i for ids in encoded for i in ids], np.int64),
        "lengths": np.array([len(ids) for ids in encoded], np.int64),
        "decoded": np.frombuffer(json.dumps(decoded).encode(), np.uint8),
        "properties": np.array([vocabulary.pad_id, vocabulary.eos_id, vocabulary.unk_id, vocabulary.vocab_size]),
    }


def main(jobs_file, results_file):
    with open(jobs_file) as file:
        jobs = json.load(file)
    results = {}
    for kind, function in (("converters", rows), ("vocabularies", tokens)):
        for name, job in jobs[kind].items():
            results |= {f"{kind}/{name}/{key}": value for key, value in function(job).items()}
    np.savez(results_file, **results)


if __name__ == "__main__":
    main(*sys.argv[1:])
