"""A gin value of the wrong type for a parameter of t5x ends any command with a message, before anything runs."""

import collections.abc
import inspect
import types
import typing

import jax
import numpy as np
import pytest

from t5x import configuration
from t5x.apps.exporting.t5x_api import save
from t5x.configuration import names
from t5x.configuration import state as states
from t5x.configuration.values import describe, parameters_of
from t5x.partitioning import PjitPartitioner
from t5x.runs.eval import evaluate
from t5x.runs.infer import infer
from t5x.runs.precompile import precompile
from t5x.runs.train import train
from t5x.scripts.convert_tf_checkpoint import convert_checkpoint
from tests.support import programs
from tests.support.paths import REPO

ENTRIES = {entry.__name__: entry for entry in (train, evaluate, infer, precompile, save, convert_checkpoint)}
IMPORTS = """\
from __gin__ import dynamic_registration
import __main__ as script
import seqio
from t5x import adafactor
from t5x import checkpoints
from t5x import decoding
from t5x import export_lib
from t5x import gin_utils
from t5x import models
from t5x import optimizers
from t5x import partitioning
from t5x import trainer
from t5x import utils
from t5x.examples.decoder_only import network as decoder_only
from t5x.examples.scalable_t5 import network as scalable
from t5x.examples.t5 import network as t5_network
"""


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Parses gin text, with `ENTRIES`, `script.collect` and the names in `IMPORTS`."""
    monkeypatch.chdir(REPO)

    def parse(text: str = "", **kwargs) -> None:
        configuration.clear()
        (tmp_path / "types.gin").write_text(IMPORTS + text)
        configuration.parse(
            gin_files=[str(tmp_path / "types.gin")], entry_points=ENTRIES | {"collect": collect}, **kwargs
        )

    yield parse
    configuration.clear()


def collect(values):
    """Stands for an entry point that uses what is bound to `values`."""
    return values


# --- Every parameter --------------------------------------------------------------------------------------------------

# What the entry points reach, and what T5X's gin files configure.
CONFIGURABLES = """
    script.train script.evaluate script.infer script.precompile script.save script.convert_checkpoint
    script.create_task_from_tfexample_file script.write_inferences_to_file gin_utils.get_gin_config_str
    utils.DatasetConfig utils.CheckpointConfig utils.SaveCheckpointConfig utils.RestoreCheckpointConfig
    utils.create_learning_rate_scheduler utils.get_training_eval_datasets utils.get_dataset
    partitioning.PjitPartitioner partitioning.standard_logical_axis_rules
    trainer.Trainer trainer.TerminateOnNanAction trainer.EarlyStoppingAction
    models.EncoderDecoderModel models.DecoderOnlyModel models.DecoderParams
    models.EncoderDecoderModel.predict_batch_with_aux models.EncoderDecoderModel.score_batch
    models.DecoderOnlyModel.predict_batch_with_aux models.DecoderOnlyModel.score_batch
    t5_network.T5Config t5_network.Transformer scalable.T5Config decoder_only.TransformerConfig
    decoder_only.DecoderWrapper decoding.temperature_sample decoding.beam_search adafactor.Adafactor
    adafactor.standard_logical_factor_rules optimizers.adamw optimizers.sgd optimizers.chain optimizers.freeze
    optimizers.clip_by_global_norm optimizers.MultiOptimizer optimizers.weight_decay_mask
    checkpoints.SaveBestCheckpointer checkpoints.OrbaxCheckpointManagerInterface checkpoints.Checkpointer
    export_lib.ExportableModule export_lib.create_preprocessor export_lib.create_preprocessor_from_task
    export_lib.create_inference_function export_lib.create_postprocessor export_lib.create_batch_polymorphic_shapes
    export_lib.write_warmup_examples export_lib.CustomInferenceMode
    seqio.Evaluator seqio.JSONLogger seqio.TensorBoardLogger seqio.PyLoggingLogger seqio.Feature
    seqio.SentencePieceVocabulary seqio.ByteVocabulary seqio.PassThroughVocabulary
"""
# Parameters that code passes, and those of Optax that may be any tree.
ANYTHING = {
    "self", "train_state", "train_state_axes", "train_state_initializer", "partitioner", "dataset_iterator", "cache",
    "mask", "mu_dtype", "accumulator_dtype", "normalizer_spec_overrides", "decoder_params_spec",
    "request_to_prediction_log", "input_tensor_dtype",
}  # fmt: skip
VALUES = {
    "word": "'word'", "fraction": "2.5", "whole": "7", "truth": "True", "nothing": "None", "list": "[b'x']",
    "mapping": "{b'x': b'x'}", "function": "@gin_utils.bool_fn", "object": "@partitioning.PjitPartitioner()",
}  # fmt: skip
PLAIN = {
    int: {"whole"}, float: {"whole", "fraction"}, complex: {"whole", "fraction", "truth"}, bool: {"truth"},
    str: {"word"}, np.dtype: {"word"}, types.NoneType: {"nothing"}, collections.abc.Callable: {"function"},
    type: {"function"},
}  # fmt: skip


def fitting(annotation) -> set[str]:
    """Return the keys of `VALUES` that fit, found in another way than in the package."""
    kind, arguments = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if kind in (typing.Union, types.UnionType):
        return set().union(*map(fitting, arguments))
    if kind in (typing.Any, inspect.Parameter.empty):
        return set(VALUES)
    if kind in PLAIN or not inspect.isclass(kind):
        return PLAIN.get(kind, set())
    if issubclass(kind, collections.abc.Iterable) and not issubclass(kind, (np.ndarray, jax.Array)):
        what = "mapping" if issubclass(kind, collections.abc.Mapping) else "list"
        return {what} if all("mapping" in fitting(argument) for argument in arguments) else set()
    if getattr(kind, "_is_protocol", False):  # jax's SupportsDType
        return {"function", "object"}
    is_called = any("__call__" in vars(base) for base in kind.__mro__)
    return ({"object"} if issubclass(PjitPartitioner, kind) else set()) | ({"function"} if is_called else set())


@pytest.mark.parametrize("name", CONFIGURABLES.split())
def test_every_parameter_refuses_values_of_other_types(parse, name):
    parse(f"script.collect.values = [@{name}]\n")
    reference = dict(states.bindings())["", names.entry_point(collect, states.current()), "values"][0]
    parameters = parameters_of(reference.configurable)
    assert {p.name for p in parameters.values() if fitting(p.annotation) == set(VALUES)} <= ANYTHING
    for value in VALUES:
        unfit = [p.name for p in parameters.values() if value not in fitting(p.annotation)]
        text = f"script.collect.values = [@{name}]\n" + "".join(
            f"{name}.{parameter} = {VALUES[value]}\n" for parameter in unfit
        )
        parse(text)
        if not unfit:
            continue
        with pytest.raises(configuration.ConfigurationError) as caught:
            configuration.check(collect)
        message = str(caught.value)
        for line, parameter in enumerate(unfit, start=2 + IMPORTS.count("\n")):
            expected = describe(parameters[parameter].annotation)
            problem = f"types.gin:{line}: `{name}.{parameter}` expects {expected}, got {VALUES[value]}."
            assert problem in message, message
        assert message.count(" expects ") == len(unfit)


# --- On the command line ----------------------------------------------------------------------------------------------

DATES = ["--gin_file=t5x/examples/demo/dates.gin", *programs.SMALL]
MODEL = ["--gin_file=t5x/examples/demo/model.gin", "--gin.MODEL=@models.EncoderDecoderModel()"]
FILES = {
    "train": [*DATES, "--gin.MODEL_DIR={0}"],
    "plan": [*DATES, "--gin.MODEL_DIR={0}", "--topology=a100x1"],
    "eval": ["--gin_file=t5x/examples/demo/dates_eval.gin", "--gin.CHECKPOINT_PATH={0}", "--gin.EVAL_OUTPUT_DIR={0}"],
    "infer": [
        *MODEL, "--gin_file=t5x/configs/runs/infer.gin", "--gin.MIXTURE_OR_TASK_NAME=dates",
        "--gin.CHECKPOINT_PATH={0}", "--gin.INFER_OUTPUT_DIR={0}", "--gin.TASK_FEATURE_LENGTHS=None",
    ],
    "export": [
        *MODEL, "--gin_file=t5x/configs/runs/export.gin", "--gin.TASK_FEATURE_LENGTHS={'inputs': 8}",
        "--gin.CHECKPOINT_PATH={0}", "--gin.MODEL_OUTPUT_DIR={0}", "--gin.MODEL_NAME=m",
    ],
    "precompile": [
        *MODEL, "--gin_file=t5x/configs/runs/precompile.gin", "--gin.MODEL_DIR={0}",
        "--gin.MIXTURE_OR_TASK_NAME=dates", "--gin.TASK_FEATURE_LENGTHS=None",
    ],
    "convert-tf-checkpoint": [
        *MODEL, "--gin.convert_checkpoint.model=%MODEL", "--gin.convert_checkpoint.tf_checkpoint_path={0}",
        "--gin.convert_checkpoint.output_dir={0}",
    ],
}  # fmt: skip
INT, FUNCTION = "int or None", "a function or class (@NAME)"
# Verb, binding as the user types it, expected type, and the parameter if a macro has the value.
WRONG = [
    ("train", "train.total_steps='abc'", INT),
    ("train", "train.total_steps=abc", INT),
    ("train", "train.total_steps=2.5", INT),
    ("train", "TRAIN_STEPS=True", INT, "train_script.train.total_steps"),
    ("train", "train.random_seed=[1]", INT),
    ("train", "train.eval_period='x'", INT),
    ("train", "train.eval_steps='20'", INT),
    ("train", "train.stats_period={}", INT),
    ("train", "train.gc_period=0.5", INT),
    ("train", "train.use_hardware_rng='yes'", "bool"),
    ("train", "train.concurrent_metrics=2", "bool"),
    ("train", "train.model_dir=3", "str"),
    ("train", "train.on_changed_data='ask'", "'refuse' or 'continue' or 'restart'"),
    ("train", "train.partitioner=@partitioning.PjitPartitioner", "PjitPartitioner (@NAME())"),
    ("train", "train.trainer_cls=@trainer.Trainer()", FUNCTION),
    ("train", "train.summarize_config_fn='summarize'", f"{FUNCTION} or None"),
    ("train", "train.checkpoint_cfg=@utils.SaveCheckpointConfig()", "CheckpointConfig (@NAME())"),
    ("train", "train.train_dataset_cfg={}", "DatasetConfig (@NAME())"),
    ("train", "train.total_steps=@utils.create_learning_rate_scheduler()", INT),
    ("train", "train.actions={'TRAIN': 3}", "a mapping from str to a list of BaseAction (@NAME()) or None"),
    ("train", "train/utils.DatasetConfig.batch_size='8'", "int"),
    ("train", "BATCH_SIZE=[8]", "int", "train/utils.DatasetConfig.batch_size"),
    ("train", "train/utils.DatasetConfig.task_feature_lengths=7", "a mapping from str to int or None"),
    ("train", "train/utils.DatasetConfig.task_feature_lengths={'inputs': '64'}", "a mapping from str to int or None"),
    ("train", "train/utils.DatasetConfig.mixture_or_task_name=3", "str or Task (@NAME()) or Mixture (@NAME())"),
    ("train", "train/utils.DatasetConfig.shuffle='no'", "bool"),
    ("train", "train/utils.DatasetConfig.split=1", "str"),
    ("train", "train/utils.DatasetConfig.runtime_preprocessors='trim'", f"a list of {FUNCTION} or None"),
    ("train", "train/utils.DatasetConfig.use_custom_packing_ops='x'", "bool"),
    ("train", "utils.SaveCheckpointConfig.keep='many'", INT),
    ("train", "utils.SaveCheckpointConfig.checkpoint_steps=100", "a list of int or None"),
    ("train", "utils.SaveCheckpointConfig.keep_dataset_checkpoints='1'", INT),
    ("train", "trainer.Trainer.num_microbatches='4'", INT),
    ("train", "trainer.Trainer.learning_rate_fn=0.001", FUNCTION),
    ("train", "utils.create_learning_rate_scheduler.warmup_steps=1.5", "int"),
    ("train", "utils.create_learning_rate_scheduler.base_learning_rate='0.1'", "float"),
    ("train", "partitioning.PjitPartitioner.num_partitions='2'", INT),
    ("train", "partitioning.PjitPartitioner.logical_axis_rules=[('batch',)]",
     "a list of a list of 2 values (str, str or a list of str or None) or None"),
    ("train", "network.T5Config.emb_dim='big'", "int"),
    ("train", "network.T5Config.dtype=16", f"str or {FUNCTION}"),
    ("train", "network.T5Config.mlp_activations='gelu'", "a list of str"),
    ("train", "models.EncoderDecoderModel.z_loss='small'", "float"),
    ("train", "models.EncoderDecoderModel.optimizer_def=@adafactor.Adafactor", "OptimizerDef (@NAME()) or None"),
    ("train", "adafactor.Adafactor.decay_rate='fast'", "float"),
    ("plan", "train.total_steps='abc'", INT),
    ("eval", "evaluate.output_dir=['a']", "str"),
    ("eval", "evaluate.wait_until_step='x'", INT),
    ("eval", "seqio.Evaluator.logger_cls=@seqio.JSONLogger", f"a list of {FUNCTION}"),
    ("eval", "utils.RestoreCheckpointConfig.path=3", "str or a list of str or None"),
    ("eval", "utils.RestoreCheckpointConfig.mode='newest'", "'specific' or 'latest' or 'all'"),
    ("infer", "infer.checkpoint_period='100'", "int"),
    ("infer", "utils.RestoreCheckpointConfig.strict='no'", "bool"),
    ("export", "export_lib.save.batch_size='4'", INT),
    ("precompile", "precompile.random_seed='x'", INT),
    ("convert-tf-checkpoint", "convert_checkpoint.output_dir=7", "str"),
]  # fmt: skip


@pytest.mark.parametrize("case", WRONG, ids=lambda case: f"{case[0]} {case[1]}")
def test_a_wrong_type_on_the_command_line(run_here, tmp_path, case):
    verb, binding, expected, *parameter = case
    name, _, value = binding.partition("=")
    arguments = [argument.replace("{0}", str(tmp_path / "run")) for argument in FILES[verb]]
    result = run_here(verb, *arguments, f"--gin.{binding}")
    got = repr(value) if value == "abc" else value
    result.refused(f"--gin.{binding}: `", f"{(parameter or [name])[0]}` expects {expected}, got {got}.")
    assert not (tmp_path / "run").exists()


def test_a_wrong_type_in_a_file(run_here, tmp_path):
    (tmp_path / "mine.gin").write_text(
        "train.stats_period = 3\n\nTRAIN_STEPS = \\\n    'many'\ntrain.eval_steps = 1.5\n"
    )
    result = run_here("train", *DATES, f"--gin_file={tmp_path}/mine.gin", "--gin.MODEL_DIR=run")
    result.refused(
        "2 problems", f"{tmp_path}/mine.gin:3: `train_script.train.total_steps` expects int or None, got 'many'.",
        f"{tmp_path}/mine.gin:5: `train_script.train.eval_steps` expects int or None, got 1.5.",
    )  # fmt: skip


def test_a_forgotten_or_superfluous_call_is_pointed_out(run_here, tmp_path):
    bindings = ("train.partitioner=@partitioning.PjitPartitioner", "train.trainer_cls=@trainer.Trainer()")
    result = run_here("train", *DATES, "--gin.MODEL_DIR=run", *(f"--gin.{binding}" for binding in bindings))
    result.refused("Write @partitioning.PjitPartitioner().", "Write @trainer.Trainer.")


@pytest.mark.parametrize(
    ("verb", "binding", "message"),
    [
        ("train", "TRAIN_STEPS=None", "train.total_steps is None. Set it, or train.relative_steps."),
        ("eval", "CHECKPOINT_PATH=None", "utils.RestoreCheckpointConfig.path is empty"),
    ],
)
def test_none_where_another_run_needs_no_value(run_here, tmp_path, verb, binding, message):
    arguments = [argument.replace("{0}", str(tmp_path / "run")) for argument in FILES[verb]]
    run_here(verb, *arguments, f"--gin.{binding}").refused(message)


# --- What T5X's users pass --------------------------------------------------------------------------------------------

RIGHT = """
    script.train.total_steps = 1e5
    script.train.eval_period = None
    script.train.random_seed = None
    script.train.gc_period = None
    script.train.actions = {'TRAIN_EVAL': [@trainer.TerminateOnNanAction()]}
    script.train.trainer_cls = @trainer.Trainer
    script.train.model = %MODEL
    script.train.checkpoint_cfg = @utils.CheckpointConfig()
    script.train.train_eval_dataset_cfg = @train_eval/utils.DatasetConfig()
    script.train.train_eval_get_dataset_fn = @utils.get_training_eval_datasets
    script.train.inference_evaluator_cls = @seqio.Evaluator
    MODEL = @models.EncoderDecoderModel()
    utils.CheckpointConfig.save = None
    utils.CheckpointConfig.restore = @utils.RestoreCheckpointConfig()
    train_eval/utils.DatasetConfig.use_cached = 0
    train_eval/utils.DatasetConfig.task_feature_lengths = None
    train_eval/utils.DatasetConfig.batch_size = 128.0
    train_eval/utils.DatasetConfig.runtime_preprocessors = [@seqio.CacheDatasetPlaceholder()]
    utils.RestoreCheckpointConfig.path = None
    utils.RestoreCheckpointConfig.path = ('a', 'b')
    utils.RestoreCheckpointConfig.dtype = 'bfloat16'
    utils.RestoreCheckpointConfig.dtype = None
    utils.RestoreCheckpointConfig.assignment_map = [(r'a/(.*)', r'b/\\1'), ['c', None]]
    utils.RestoreCheckpointConfig.state_transformation_fns = (@gin_utils.bool_fn,)
    utils.RestoreCheckpointConfig.checkpointer_cls = @checkpoints.Checkpointer
    utils.SaveCheckpointConfig.period = 1e3
    utils.SaveCheckpointConfig.checkpoint_steps = (1, 2)
    utils.SaveCheckpointConfig.checkpointer_cls = @checkpoints.SaveBestCheckpointer
    utils.create_learning_rate_scheduler.base_learning_rate = 1
    utils.create_learning_rate_scheduler.warmup_steps = 1e4
    trainer.Trainer.num_microbatches = None
    trainer.Trainer.learning_rate_fn = @utils.create_learning_rate_scheduler()
    trainer.EarlyStoppingAction.metric = ['task', 'loss']
    partitioning.PjitPartitioner.model_parallel_submesh = [1, 1, 1, 1]
    partitioning.PjitPartitioner.logical_axis_rules = [['batch', 'data'], ('embed', None), ('mlp', ['data', 'model'])]
    partitioning.PjitPartitioner.logical_axis_rules = @partitioning.standard_logical_axis_rules()
    models.EncoderDecoderModel.module = @t5_network.Transformer()
    models.EncoderDecoderModel.input_vocabulary = @seqio.ByteVocabulary()
    models.EncoderDecoderModel.optimizer_def = None
    models.EncoderDecoderModel.optimizer_def = @optimizers.chain()
    models.EncoderDecoderModel.decode_fn = @decoding.temperature_sample
    models.EncoderDecoderModel.loss_normalizing_factor = 233472
    models.EncoderDecoderModel.loss_normalizing_factor = 'NUM_REAL_TARGET_TOKENS'
    models.EncoderDecoderModel.feature_converter_cls = @seqio.EncDecFeatureConverter
    models.EncoderDecoderModel.default_decoder_params = @models.DecoderParams()
    models.EncoderDecoderModel.default_decoder_params = {'alpha': 0.6}
    models.EncoderDecoderModel.predict_batch_with_aux.return_all_decodes = 1
    t5_network.T5Config.mlp_activations = ['gelu', 'linear']
    t5_network.T5Config.dropout_rate = 0
    decoding.temperature_sample.temperature = 1
    decoding.temperature_sample.topp = 0
    adafactor.Adafactor.multiply_by_parameter_scale = @adafactor.HParamMap()
    adafactor.Adafactor.logical_factor_rules = @adafactor.standard_logical_factor_rules()
    adafactor.Adafactor.logical_factor_rules = {'vocab': 'COLUMN'}
    adafactor.Adafactor.dtype_momentum = 'bfloat16'
    adafactor.Adafactor.skip_nan_updates = None
    optimizers.chain.transformations = (@optimizers.adamw(),)
    optimizers.adamw.learning_rate = @utils.create_learning_rate_scheduler()
    seqio.Evaluator.logger_cls = [@seqio.PyLoggingLogger, @seqio.TensorBoardLogger]
    seqio.Evaluator.num_examples = None
    script.create_task_from_tfexample_file.paths = 'a*'
    script.create_task_from_tfexample_file.features = {'inputs': @inputs/seqio.Feature()}
    inputs/seqio.Feature.dtype = 'int32'
    script.save.output_dir = {'cpu': 'a'}
    script.save.inference_mode = @export_lib.CustomInferenceMode()
    script.save.trailing_shapes = {'inputs': (1, 2)}
"""


@pytest.mark.parametrize("binding", [line.strip() for line in RIGHT.strip().splitlines()])
def test_types_that_users_of_t5x_pass_are_accepted(parse, caplog, binding):
    parse(f"{binding}\n")
    try:
        configuration.check()
    except configuration.ConfigurationError as error:
        assert " expects " not in str(error)
    assert " expects " not in caplog.text


def test_whole_floats_become_integers(parse):
    parse("script.collect.values = [@utils.create_learning_rate_scheduler(), %N]\nN = 2e4\n"
          "utils.create_learning_rate_scheduler.warmup_steps = %N\n"
          "utils.create_learning_rate_scheduler.base_learning_rate = 2.0\n")  # fmt: skip
    configuration.check(collect)
    bound = configuration.bindings()
    assert bound["N"] == "20000" and bound["utils.create_learning_rate_scheduler.base_learning_rate"] == "2.0"


def test_parameters_that_a_users_class_inherits_are_checked(parse, tmp_path, monkeypatch):
    (tmp_path / "my_trainers.py").write_text(
        "from t5x.trainer import Trainer\n\n\nclass Mine(Trainer):\n    pass\n\n\n"
        "class Other(Trainer):\n    def __init__(self, scale: int = 1, **kwargs):\n        super().__init__(**kwargs)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    parse("import my_trainers\nscript.collect.values = [@my_trainers.Mine, @my_trainers.Other]\n"
          "my_trainers.Mine.num_microbatches = '4'\nmy_trainers.Other.scale = 'x'\n")  # fmt: skip
    with pytest.raises(configuration.ConfigurationError) as caught:
        configuration.check(collect)
    assert "`my_trainers.Mine.num_microbatches` expects int or None, got '4'." in str(caught.value)
    assert "Other" not in str(caught.value)


GIN_FILES = [
    path
    for folder in ("t5x", "tests/examples", "tests/compat/t5x_projects")
    for path in sorted(REPO.glob(f"{folder}/**/*.gin"))
]


@pytest.mark.parametrize("path", GIN_FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_no_gin_file_is_refused(path, monkeypatch, caplog):
    monkeypatch.chdir(REPO)
    monkeypatch.syspath_prepend(REPO / "tests/compat/t5x_projects")
    configuration.clear()
    try:
        search_paths = [".", "tests/compat/t5x_projects"]
        configuration.parse(gin_files=[str(path)], entry_points=ENTRIES, search_paths=search_paths)
        for entry in (None, *configuration.entry_points_in_use()):
            configuration.check(entry)
    except configuration.ConfigurationError as error:  # what other files define is missing
        assert " expects " not in str(error)
    finally:
        configuration.clear()
    assert " expects " not in caplog.text
