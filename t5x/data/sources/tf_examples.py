"""Parser of tf.train.Example messages according to a feature description; TensorFlow is not needed.

Example { Features features = 1 }
Features { map<string, Feature> feature = 1 }
Feature { oneof kind { BytesList bytes_list = 1, FloatList float_list = 2, Int64List int64_list = 3 } }
BytesList, FloatList, Int64List { repeated … value = 1 }
"""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from t5x._runtime.errors import UserError
from t5x.data.sources.base import MalformedRecord

_LISTS = {"text": "bytes_list", "bytes": "bytes_list", "float": "float_list", "int": "int64_list"}
_STORED = {"bytes_list": "bytes", "float_list": "floats", "int64_list": "ints"}
_PYTHON_TYPES = {str: "text", bytes: "bytes", float: "float", int: "int"}
_DTYPE_KINDS = {"i": "int", "u": "int", "b": "int", "f": "float", "S": "bytes", "U": "text", "O": "text"}


class ExampleParser:
    """Parses the bytes of a tf.train.Example to an example.

    Args:
      feature_description: {name: description}; other features are ignored. A description is one of
        "text", "bytes", "int", "float" (or str, bytes, int, float): one value;
        ["text"], ["bytes"], ["int"], ["float"]: any number: a list, or an array [n] of int64 or float32;
        a numpy dtype: an array [n] of it;
        a tf.io.FixedLenFeature or VarLenFeature, whose strings are text.
        None returns all features as stored: arrays [n] of int64 or float32, bytes, or a list of bytes unless there is
        exactly one.
    """

    def __init__(self, feature_description: Mapping[str, Any] | None = None):
        described = (feature_description or {}).items()
        self._features = {name: _Feature(name, description) for name, description in described}

    def __call__(self, content: bytes) -> dict[str, Any]:
        from google.protobuf.message import DecodeError

        try:
            features = _message_class().FromString(content).features.feature
        except DecodeError as error:
            raise MalformedRecord("it is not a tf.train.Example (its protocol buffer cannot be parsed).") from error
        if not self._features:
            return {name: _as_stored(features[name]) for name in sorted(features)}
        return {name: feature(features) for name, feature in self._features.items()}


class _Feature:
    """A described feature."""

    def __init__(self, name: str, description: Any):
        self._name = name
        self._dtype: np.dtype | None = None
        self._shape: tuple[int, ...] | None = None
        self._default: Any = None
        self._many = isinstance(description, list | tuple) and len(description) == 1
        if self._many:
            description = description[0]
        try:
            if isinstance(description, str) and description in _LISTS:
                self._kind = description
            elif isinstance(description, type) and description in _PYTHON_TYPES:
                self._kind = _PYTHON_TYPES[description]
            else:
                self._take_dtype(description)
        except (TypeError, KeyError) as error:
            raise UserError(
                f"feature_description: {name!r} is {description!r}. Describe it as 'text', 'bytes', 'int' or 'float' "
                "for one value, ['int'] (and so on) for any number, or a numpy dtype for an array."
            ) from error

    def _take_dtype(self, description: Any) -> None:
        """Read a numpy dtype, or a TensorFlow dtype or feature, recognized by its attributes."""
        is_plain = isinstance(description, np.dtype | type | str)
        dtype = description if is_plain else getattr(description, "dtype", description)
        dtype = np.dtype(getattr(dtype, "as_numpy_dtype", dtype))
        if description is None or (is_plain and dtype.kind == "O"):  # numpy reads None as float64, any class as object
            raise TypeError
        shape = None if is_plain else getattr(description, "shape", None)
        self._kind = _DTYPE_KINDS[dtype.kind]
        self._dtype = dtype if self._kind in ("int", "float") else None
        self._default = None if is_plain else getattr(description, "default_value", None)
        self._many = shape is None or len(shape) > 0
        self._shape = tuple(shape) if shape else None

    def __call__(self, features: Mapping[str, Any]) -> Any:
        if self._name not in features:  # indexing a protobuf map would add it
            if self._default is not None:
                return self._default
            known = ", ".join(sorted(features)) or "none"
            raise MalformedRecord(f"there is no feature {self._name!r} (features: {known}).")
        feature = features[self._name]
        stored = feature.WhichOneof("kind") or _LISTS[self._kind]
        if stored != _LISTS[self._kind]:
            contents = f"contains {_STORED[stored]}, but is described as {self._kind}"
            raise MalformedRecord(f"feature {self._name!r} {contents}.")
        values = self._converted(getattr(feature, stored).value)
        if self._many:
            return values if self._shape is None else self._reshaped(values, self._shape)
        if len(values) != 1:
            raise MalformedRecord(f"feature {self._name!r} has {len(values)} values, not one. Use [{self._kind!r}].")
        return values[0] if self._dtype is not None or isinstance(values, list) else values[0].item()

    def _converted(self, values: Any) -> list | np.ndarray:
        if self._kind == "bytes":
            return list(values)
        if self._kind == "text":
            try:
                return [value.decode() for value in values]
            except UnicodeDecodeError as error:
                raise MalformedRecord(
                    f"feature {self._name!r} is not UTF-8 ({error}). Describe it as 'bytes'."
                ) from error
        array = np.array(values, np.int64 if self._kind == "int" else np.float32)
        if self._dtype is None:
            return array
        cast = array.astype(self._dtype)
        if self._kind == "int" and not np.array_equal(cast, array):
            raise MalformedRecord(f"feature {self._name!r} has values outside the range of {self._dtype}.")
        return cast

    def _reshaped(self, values: list | np.ndarray, shape: tuple[int, ...]) -> list | np.ndarray:
        if np.prod(shape) != len(values):
            raise MalformedRecord(f"feature {self._name!r} has {len(values)} values, which do not fit shape {shape}.")
        if isinstance(values, np.ndarray):
            return values.reshape(shape)
        return np.array(values, object).reshape(shape).tolist()


def _as_stored(feature: Any) -> Any:
    stored = feature.WhichOneof("kind")
    if stored in (None, "bytes_list"):
        values = list(feature.bytes_list.value)
        return values[0] if len(values) == 1 else values
    return np.array(getattr(feature, stored).value, np.int64 if stored == "int64_list" else np.float32)


_PROTO = """
name: "t5x/example.proto" package: "t5x" syntax: "proto3"
message_type { name: "BytesList" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED } }
message_type { name: "FloatList" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED } }
message_type { name: "Int64List" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED } }
message_type { name: "Feature" oneof_decl { name: "kind" }
  field { name: "bytes_list" number: 1 type: TYPE_MESSAGE type_name: ".t5x.BytesList" oneof_index: 0 }
  field { name: "float_list" number: 2 type: TYPE_MESSAGE type_name: ".t5x.FloatList" oneof_index: 0 }
  field { name: "int64_list" number: 3 type: TYPE_MESSAGE type_name: ".t5x.Int64List" oneof_index: 0 } }
message_type { name: "Features"
  field { name: "feature" number: 1 type: TYPE_MESSAGE type_name: ".t5x.Features.FeatureEntry" label: LABEL_REPEATED }
  nested_type { name: "FeatureEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".t5x.Feature" } } }
message_type { name: "Example" field { name: "features" number: 1 type: TYPE_MESSAGE type_name: ".t5x.Features" } }
"""


@functools.cache
def _message_class() -> Any:
    """Return the message class, in a separate pool because TensorFlow's may be loaded too."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(_PROTO, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t5x.Example"))
