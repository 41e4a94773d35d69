"""Where examples come from: random access by (split, index), from files of many kinds or from Python.

Nothing here needs TensorFlow. A source can be used from several threads, and pickled: files are opened again where it
arrives. To read something else, make a `FileDataSource` with a function that opens one file, or a subclass of
`DataSource`.
"""

from t5x.data.sources.array_record import ArrayRecordDataSource
from t5x.data.sources.arrow import HuggingFaceDataSource, ParquetDataSource
from t5x.data.sources.base import BadExample, DataSource, FunctionDataSource
from t5x.data.sources.files import FileDataSource
from t5x.data.sources.lines import CsvDataSource, JsonLinesDataSource, TextLineDataSource, TsvDataSource
from t5x.data.sources.tfds import TfdsDataSource
from t5x.data.sources.tfrecord import TFExampleDataSource

__all__ = [
    "ArrayRecordDataSource",
    "BadExample",
    "CsvDataSource",
    "DataSource",
    "FileDataSource",
    "FunctionDataSource",
    "HuggingFaceDataSource",
    "JsonLinesDataSource",
    "ParquetDataSource",
    "TFExampleDataSource",
    "TextLineDataSource",
    "TfdsDataSource",
    "TsvDataSource",
]
