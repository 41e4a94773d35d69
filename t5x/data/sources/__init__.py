"""Data sources: random access to examples by (split, index), from many kinds of files or from Python.

Nothing here needs TensorFlow. A source can be used from several threads and can be pickled: files are reopened after
unpickling. To read something else, create a `FileDataSource` with a function that reads one file, or subclass
`DataSource`.
"""

# ruff: noqa: F401

from t5x.data.sources.arrow import HuggingFaceDataSource, ParquetDataSource
from t5x.data.sources.base import BadExample, DataSource, FunctionDataSource
from t5x.data.sources.files import FileDataSource
from t5x.data.sources.lines import CsvDataSource, JsonLinesDataSource, TextLineDataSource, TsvDataSource
from t5x.data.sources.records import ArrayRecordDataSource, TFExampleDataSource
from t5x.data.sources.tfds import TfdsDataSource
