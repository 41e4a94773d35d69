"""A small project shaped like T5X's: modules, a model file and a run file, in a directory of its own."""

import importlib
import sys
import textwrap
from pathlib import Path

import pytest

from t5x import configuration

MODULES = {
    "lab/__init__.py": "",
    "lab/utils.py": """
        import dataclasses
        import enum
        from typing import Any, Callable, Literal, Mapping, Optional, Sequence, Union

        class Mode(enum.Enum):
            SPECIFIC = "specific"
            LATEST = "latest"

        @dataclasses.dataclass
        class DatasetConfig:
            mixture_or_task_name: str
            task_feature_lengths: Optional[Mapping[str, int]]
            split: str
            batch_size: int
            shuffle: bool = True
            seed: Optional[int] = None
            module: Optional[str] = None

        @dataclasses.dataclass
        class RestoreConfig:
            path: Union[str, Sequence[str]]
            mode: Literal["specific", "latest"] = "latest"
            how: Mode = Mode.LATEST
            dtype: Any = "float32"
            mesh: Optional[tuple[int, int]] = None
            steps: Sequence[int] = ()
            rename: Optional[Mapping[str, str]] = None

        def schedule(base_learning_rate: float = 0.5, warmup_steps: int = 10000, factors: str = "constant"):
            return lambda step: base_learning_rate

        def untyped(flag=True, number=3, word="x", nothing=None):
            return flag, number, word, nothing
        """,
    "lab/network.py": """
        import dataclasses
        from typing import Any, Sequence

        @dataclasses.dataclass
        class T5Config:
            emb_dim: int = 512
            dropout_rate: float = 0.1
            mlp_activations: Sequence[str] = ("relu",)
            dtype: Any = "float32"

        class Transformer:
            def __init__(self, config: T5Config):
                self.config = config
        """,
    "lab/models.py": """
        class EncoderDecoderModel:
            def __init__(self, module, input_vocabulary, z_loss: float = 0.0, label_smoothing: float = 0.0):
                self.module, self.input_vocabulary, self.z_loss = module, input_vocabulary, z_loss

            def predict_batch_with_aux(self, batch, num_decodes: int = 1, return_all_decodes: bool = False):
                return batch, num_decodes

        def beam_search(inputs, alpha: float = 0.6):
            return inputs, alpha
        """,
    "lab/trainer.py": """
        from typing import Callable

        class Trainer:
            def __init__(self, model, learning_rate_fn: Callable[[int], float], num_microbatches: int | None):
                self.model, self.learning_rate_fn, self.num_microbatches = model, learning_rate_fn, num_microbatches
        """,
    "lab/train.py": """
        from typing import Any, Callable, Mapping, Optional, Sequence

        def train(*, model, train_dataset_cfg, infer_eval_dataset_cfg, trainer_cls: Callable, model_dir: str,
                  total_steps: int, eval_steps: int = 20, stats_period: Optional[int] = None,
                  random_seed: Optional[int] = None, actions: Optional[Mapping[str, Sequence[Any]]] = None):
            return dict(locals())
        """,
    "lab/vocabularies.py": """
        class SentencePieceVocabulary:
            def __init__(self, sentencepiece_model_file: str, extra_ids: int = 0):
                self.sentencepiece_model_file, self.extra_ids = sentencepiece_model_file, extra_ids
        """,
    "lab/stand_in/__init__.py": "from lab.vocabularies import SentencePieceVocabulary\n",
    "lab/stand_in/loggers.py": """
        class JSONLogger:
            def __init__(self, output_dir: str, write_n_results: int | None = None):
                self.write_n_results = write_n_results
        """,
}

MODEL_GIN = """
    # The model.
    from __gin__ import dynamic_registration
    import absent_seqio
    from lab import models
    from lab import network

    Z_LOSS = 0.0001
    LABEL_SMOOTHING = 0.0
    DROPOUT_RATE = %gin.REQUIRED
    VOCABULARY = @absent_seqio.SentencePieceVocabulary()
    absent_seqio.SentencePieceVocabulary.sentencepiece_model_file = "gs://t5-data/sentencepiece.model"
    MODEL = @models.EncoderDecoderModel()
    models.EncoderDecoderModel:
      module = @network.Transformer()
      input_vocabulary = %VOCABULARY
      z_loss = %Z_LOSS
      label_smoothing = %LABEL_SMOOTHING
    network.Transformer.config = @network.T5Config()
    network.T5Config:
      emb_dim = 768
      dropout_rate = %DROPOUT_RATE
      mlp_activations = ('gelu', 'linear')
      dtype = 'bfloat16'
    """

RUN_GIN = """
    from __gin__ import dynamic_registration
    import __main__ as train_script
    from lab import utils
    from lab import trainer

    MODEL_DIR = %gin.REQUIRED
    MIXTURE_OR_TASK_NAME = %gin.REQUIRED
    TASK_FEATURE_LENGTHS = %gin.REQUIRED
    TRAIN_STEPS = %gin.REQUIRED
    BATCH_SIZE = 128
    DROPOUT_RATE = 0.1
    train_script.train:
      model = %MODEL
      model_dir = %MODEL_DIR
      total_steps = %TRAIN_STEPS
      train_dataset_cfg = @train/utils.DatasetConfig()
      infer_eval_dataset_cfg = @infer_eval/utils.DatasetConfig()
      trainer_cls = @trainer.Trainer
    train/utils.DatasetConfig:
      mixture_or_task_name = %MIXTURE_OR_TASK_NAME
      task_feature_lengths = %TASK_FEATURE_LENGTHS
      split = 'train'
      batch_size = %BATCH_SIZE
    infer_eval/utils.DatasetConfig:
      mixture_or_task_name = %MIXTURE_OR_TASK_NAME
      task_feature_lengths = %TASK_FEATURE_LENGTHS
      split = 'validation'
      batch_size = %BATCH_SIZE
      shuffle = False
    trainer.Trainer:
      num_microbatches = None
      learning_rate_fn = @utils.schedule()
    utils.schedule.warmup_steps = 1_000
    """

GIVEN = (
    "MODEL_DIR = /tmp/run",
    "MIXTURE_OR_TASK_NAME = wmt",
    "TASK_FEATURE_LENGTHS = {'inputs': 64, 'targets': 32}",
    "TRAIN_STEPS = 1_020_000",
    "DROPOUT_RATE = 0.0",
)


class Project:
    """Writes files, and parses them with the project's `train` as the entry point."""

    given = GIVEN

    def __init__(self, path: Path):
        self.path = path

    def write(self, name: str, text: str) -> str:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        importlib.invalidate_caches()
        return name

    def module(self, name: str):
        return importlib.import_module(name)

    @property
    def train(self):
        return self.module("lab.train").train

    def parse(self, *gin_files: str, bindings=(), **kwargs) -> None:
        kwargs.setdefault("entry_points", {"train": self.train})
        kwargs.setdefault("aliases", {"absent_seqio": "lab.stand_in"})
        configuration.parse(gin_files=gin_files, bindings=bindings, **kwargs)

    def parse_text(self, text: str, **kwargs) -> None:
        self.parse(self.write("text.gin", text), **kwargs)

    def error(self, text: str, **kwargs) -> str:
        """The message of the error that parsing (or then checking) `text` raises."""
        with pytest.raises(configuration.ConfigurationError) as caught:
            self.parse_text(text, **kwargs)
            configuration.check(self.train)
        return str(caught.value)


@pytest.fixture
def project(tmp_path, monkeypatch):
    configuration.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    made = Project(tmp_path)
    for name, text in MODULES.items():
        made.write(name, text)
    made.write("model.gin", MODEL_GIN)
    made.write("run.gin", RUN_GIN)
    yield made
    configuration.clear()
    for name in set(sys.modules) - before:
        if name.startswith("lab") or str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
