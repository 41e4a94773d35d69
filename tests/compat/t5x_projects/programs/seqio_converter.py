"""Converts examples with a FeatureConverter of the real seqio: by seqio itself, and row by row as training does.

And the other way round: seqio's functions with vocabularies, converters and examples of this package.

python seqio_converter.py JOBS.json RESULTS.json
"""

import json
import pickle
import sys

import numpy as np
import seqio
import t5.data.preprocessors
import tensorflow as tf

from t5x.data import ByteVocabulary, EncDecFeatureConverter
from t5x.data.seqio_bridge import SeqioTask
from t5x.data.seqio_converters import make_converter
from t5x.interactive_model import get_dataset_from_natural_text_examples


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


def texts_as_dataset():
    """Return the batch that projects make of texts with seqio's preprocessors, and the texts of its tokens."""
    vocabulary = ByteVocabulary()
    features = {name: seqio.Feature(vocabulary, add_eos=True) for name in ("inputs", "targets")}
    lengths = {"inputs": 5, "targets": 4}
    dataset = get_dataset_from_natural_text_examples(
        [{"input": b"a-b", "target": b"c"}, {"input": "abcdefg", "target": "\N{LATIN SMALL LETTER U WITH DIAERESIS}"}],
        preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
        task_feature_lengths=lengths, features=features,
    )  # fmt: skip
    (batch,) = EncDecFeatureConverter(pack=False)(dataset, lengths).batch(2).as_numpy_iterator()
    texts = vocabulary.decode_tf(batch["decoder_target_tokens"]).numpy()
    return {name: values.tolist() for name, values in batch.items()} | {"texts": [text.decode() for text in texts]}


def denoising_task_of_targets():
    """Return the features of a task that lists only its targets, as pre-training projects write it."""
    source = seqio.FunctionDataSource(lambda split, shuffle_files, seed=None: None, splits=["train"])
    steps = [seqio.preprocessors.tokenize, t5.data.preprocessors.span_corruption]
    features = {"targets": seqio.Feature(seqio.ByteVocabulary())}
    return SeqioTask(seqio.Task("denoising", source, features, steps)).output_features


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
        "of_text": texts_as_dataset(),
        "of_targets": list(denoising_task_of_targets()),
    }
    with open(results, "w") as file:
        json.dump(found, file)


main(*sys.argv[1:])
