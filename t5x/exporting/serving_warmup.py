"""Warm-up requests of TensorFlow Serving: PredictionLog messages in a TFRecord file.

The messages are encoded here, because the package with their classes, tensorflow-serving-api, is needed for nothing
else. Field numbers are those of prediction_log.proto, predict.proto and model.proto in tensorflow_serving/apis.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any

WARMUP_FILE = os.path.join("assets.extra", "tf_serving_warmup_requests")


def write_warmup_requests(
    directory: str, requests: Sequence[Mapping[str, Any]], *, model_name: str, signature_name: str
) -> None:
    """Write requests that TensorFlow Serving runs when it loads a SavedModel, before it is ready.

    Args:
      directory: of the SavedModel.
      requests: {input: array or list of strings} each.
    """
    import tensorflow as tf

    os.makedirs(os.path.join(directory, os.path.dirname(WARMUP_FILE)), exist_ok=True)
    with tf.io.TFRecordWriter(os.path.join(directory, WARMUP_FILE)) as writer:
        for inputs in requests:
            tensors = {name: tf.make_tensor_proto(x).SerializeToString() for name, x in inputs.items()}
            writer.write(prediction_log(tensors, model_name, signature_name))


def prediction_log(tensors: Mapping[str, bytes], model_name: str, signature_name: str) -> bytes:
    """Return a PredictionLog with a PredictRequest.

    Args:
      tensors: {input: serialized TensorProto}.
    """
    model = _field(1, model_name.encode()) + _field(3, signature_name.encode())
    entries = [_field(1, name.encode()) + _field(2, tensor) for name, tensor in tensors.items()]
    request = _field(1, model) + b"".join(_field(2, entry) for entry in entries)
    return _field(6, _field(1, request))  # PredictionLog.predict_log.request


def _field(number: int, content: bytes) -> bytes:
    """Return a length-delimited field of a protocol buffer."""
    size, varint = len(content), bytearray()
    while size > 127:
        varint.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *varint, size]) + content
