"""Converts examples with a FeatureConverter of the real seqio: by seqio itself, and row by row as training does.

python seqio_converter.py JOBS.json RESULTS.json
"""

import json
import pickle
import sys

import numpy as np
import seqio
import tensorflow as tf

from t5x.data.seqio_converters import make_converter


class VectorConverter(seqio.FeatureConverter):
    """Vectors for the encoder, tokens for the decoder."""

    TASK_FEATURES = {  # noqa: RUF012
        "inputs": seqio.FeatureConverter.FeatureSpec(dtype=tf.float32, rank=2),
        "targets": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32),
    }
    MODEL_FEATURES = {  # noqa: RUF012
        "encoder_inputs": seqio.FeatureConverter.FeatureSpec(dtype=tf.float32, rank=2),
        "decoder_target_tokens": seqio.FeatureConverter.FeatureSpec(dtype=tf.int32),
    }
    PACKING_FEATURE_DTYPES = {}  # noqa: RUF012

    def _convert_features(self, ds, task_feature_lengths):
        def convert(features):
            inputs = features["inputs"]
            length = task_feature_lengths["inputs"]
            inputs = tf.pad(inputs[:length], [[0, tf.maximum(0, length - tf.shape(inputs)[0])], [0, 0]])
            padded = tf.pad(features["targets"], [[0, task_feature_lengths["targets"] - tf.size(features["targets"])]])
            return {"encoder_inputs": tf.ensure_shape(inputs, [length, 3]), "decoder_target_tokens": padded}

        return ds.map(convert, num_parallel_calls=tf.data.AUTOTUNE)

    def get_model_feature_lengths(self, task_feature_lengths):
        lengths = task_feature_lengths
        return {"encoder_inputs": lengths["inputs"], "decoder_target_tokens": lengths["targets"]}


def main(_, results):
    rng = np.random.default_rng(0)
    lengths = {"inputs": 5, "targets": 4}
    vectors = [
        {"inputs": rng.normal(size=(n, 3)).astype(np.float32), "targets": np.arange(1, n, dtype=np.int32)}
        for n in (2, 5, 3)
    ]
    mine = make_converter(VectorConverter, pack=False)
    mine = pickle.loads(pickle.dumps(mine))  # as for worker processes
    rows = [mine.convert_row([example], lengths) for example in vectors]
    same = all(
        np.array_equal(row["encoder_inputs"][: len(x["inputs"])], x["inputs"])
        and row["decoder_target_tokens"].tolist() == [*x["targets"], *[0] * (4 - len(x["targets"]))]
        for row, x in zip(rows, vectors, strict=True)
    )
    empty = mine.convert_row([], lengths)
    tokens = [{"inputs": np.array(a, np.int32), "targets": np.array(b, np.int32)}
              for a, b in (([7, 8, 5, 1], [3, 9, 1]), ([8, 4, 9, 3, 1], [4, 1]))]  # fmt: skip
    packed = make_converter(seqio.EncDecFeatureConverter, pack=True)
    packed_lengths = {"inputs": 10, "targets": 7}
    row = packed.convert_row(tokens, packed_lengths)
    found = {
        "same": same,
        "dtype": str(rows[0]["encoder_inputs"].dtype),
        "shape": list(rows[0]["encoder_inputs"].shape),
        "empty": not any(x.any() for x in empty.values()),
        "packed": {name: values.tolist() for name, values in row.items()},
    }
    with open(results, "w") as file:
        json.dump(found, file)


main(*sys.argv[1:])
