"""Data: vocabularies, sources, tasks, preprocessors, feature converters and the loader, under seqio's names."""

# ruff: noqa: F401

from t5x.data import preprocessors, seqio_bridge
from t5x.data.dataset_config import DatasetConfig, import_task_module
from t5x.data.evaluator import Evaluator, JSONLogger, PyLoggingLogger, TensorBoardLogger
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
from t5x.data.file_tasks import file_task
from t5x.data.lanes import merge_states
from t5x.data.loader import EvalBatch, TrainLoader, eval_batches, measure_lengths, train_loader
from t5x.data.pipeline import CacheDatasetPlaceholder, Feature, map_over_dataset
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
