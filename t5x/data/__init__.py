"""Data: vocabularies, sources, tasks, preprocessors, feature converters and the loader, under seqio's names."""

from t5x.data import preprocessors
from t5x.data.dataset_config import DatasetConfig, import_task_module
from t5x.data.feature_converters import (
    DecoderFeatureConverter,
    EncDecFeatureConverter,
    EncoderFeatureConverter,
    FeatureConverter,
    LMFeatureConverter,
    PassThroughFeatureConverter,
    PrefixLMFeatureConverter,
    PrePackedEncDecFeatureConverter,
    make_autoregressive_inputs,
    non_padding_position,
)
from t5x.data.feature_spec import Feature
from t5x.data.file_tasks import file_task
from t5x.data.lanes import merge_states
from t5x.data.loader import EvalBatch, TrainLoader, eval_batches, measure_lengths, train_loader
from t5x.data.pipeline import map_over_dataset
from t5x.data.preprocessor_kinds import CacheDatasetPlaceholder
from t5x.data.sources import (
    ArrayRecordDataSource,
    BadExample,
    CsvDataSource,
    DataSource,
    FileDataSource,
    FunctionDataSource,
    HuggingFaceDataSource,
    JsonLinesDataSource,
    ParquetDataSource,
    TextLineDataSource,
    TfdsDataSource,
    TFExampleDataSource,
    TsvDataSource,
)
from t5x.data.tasks import (
    Mixture,
    MixtureRegistry,
    Task,
    TaskRegistry,
    get_mixture_or_task,
    get_subtasks,
    rate_num_examples,
)
from t5x.data.vocabularies import (
    ByteVocabulary,
    HuggingFaceVocabulary,
    PassThroughVocabulary,
    SentencePieceVocabulary,
    Vocabulary,
    load_vocabulary,
)
from t5x.lazy_imports import lazy_attributes

# Imported on first use, because evaluation imports this package.
__getattr__ = lazy_attributes(
    __name__, "t5x.data.evaluator", ("Evaluator", "JSONLogger", "PyLoggingLogger", "TensorBoardLogger")
)

__all__ = [
    "ArrayRecordDataSource",
    "BadExample",
    "ByteVocabulary",
    "CacheDatasetPlaceholder",
    "CsvDataSource",
    "DataSource",
    "DatasetConfig",
    "DecoderFeatureConverter",
    "EncDecFeatureConverter",
    "EncoderFeatureConverter",
    "EvalBatch",
    "Evaluator",
    "Feature",
    "FeatureConverter",
    "FileDataSource",
    "FunctionDataSource",
    "HuggingFaceDataSource",
    "HuggingFaceVocabulary",
    "JSONLogger",
    "JsonLinesDataSource",
    "LMFeatureConverter",
    "Mixture",
    "MixtureRegistry",
    "ParquetDataSource",
    "PassThroughFeatureConverter",
    "PassThroughVocabulary",
    "PrePackedEncDecFeatureConverter",
    "PrefixLMFeatureConverter",
    "PyLoggingLogger",
    "SentencePieceVocabulary",
    "TFExampleDataSource",
    "Task",
    "TaskRegistry",
    "TensorBoardLogger",
    "TextLineDataSource",
    "TfdsDataSource",
    "TrainLoader",
    "TsvDataSource",
    "Vocabulary",
    "eval_batches",
    "file_task",
    "get_mixture_or_task",
    "get_subtasks",
    "import_task_module",
    "load_vocabulary",
    "make_autoregressive_inputs",
    "map_over_dataset",
    "measure_lengths",
    "merge_states",
    "non_padding_position",
    "preprocessors",
    "rate_num_examples",
    "train_loader",
]
