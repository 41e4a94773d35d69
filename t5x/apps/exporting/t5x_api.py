"""TensorFlow functions around a model, with T5X's names and parameters: see `export_lib`."""

import dataclasses
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from t5x._runtime.errors import UserError
from t5x._runtime.imports import import_extra
from t5x.apps.exporting import saved_model
from t5x.apps.exporting.checking import TEXTS, ExportComparison
from t5x.apps.exporting.exporter import new_destination
from t5x.apps.exporting.programs import DEFAULT_PLATFORMS, lower
from t5x.checkpoints import tree
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.configuration.ignored_parameters import log_ignored
from t5x.data.pipeline import Feature
from t5x.data.vocabularies import Vocabulary, as_vocabulary
from t5x.models import BaseTransformerModel
from t5x.network import compute_params
from t5x.network.attention import by_reference
from t5x.network.config import FIXED_IN_T5X, TOKEN_IDS
from t5x.partitioning import PjitPartitioner
from t5x.trainer.restore import open_for_all, restore_params
from t5x.trainer.state_layout import StateLayout

log = logging.getLogger(__name__)

Preprocessor = Callable[..., dict[str, Any]]  # strings, or ids -> model features, all tensors
DEFAULT_SIGNATURE = "serving_default"


@dataclasses.dataclass(eq=False)
class TfFunction:
    """A function of tensors.

    Attributes:
      resources: objects that a module must keep to save the function.
      examples: inputs to check it with, instead of texts.
    """

    function: Callable[..., Any]
    resources: Sequence[Any] = ()
    examples: Sequence[Any] | None = None

    def __call__(self, *inputs: Any) -> Any:
        return self.function(*inputs)


@dataclasses.dataclass(frozen=True)
class CustomInferenceMode:
    """A method of the model to export.

    Attributes:
      model_fn_name: name of the method, called with (params, batch, **model_fn_const_kwargs).
      fetch_output: what of its result to export; None is all.
      model_fn_const_kwargs: further arguments.
    """

    model_fn_name: str
    fetch_output: Callable[[Any], Any] | None = None
    model_fn_const_kwargs: Mapping[str, Any] | None = None


InferenceMode = str | CustomInferenceMode


class ExportableModule:
    """Tokenization, model and detokenization as one TensorFlow function.

    Args:
      preproc_tf_fn: inputs of the signature -> model features.
      model_tf_fn: (variables, model features) -> outputs of the model.
      postproc_tf_fn: outputs of the model -> outputs of the signature.
      params: {name: array}.
      batch_size: None is any.
      jit_compile: compile everything with XLA; strings cannot be compiled.
      use_batch_function: let TensorFlow join concurrent requests to batches, with the options below.
    """

    def __init__(
        self,
        preproc_tf_fn: Preprocessor,
        model_tf_fn: Callable[..., Any],
        postproc_tf_fn: Callable[..., Any],
        params: Mapping[str, Any],
        batch_size: int | None,
        jit_compile: bool = False,
        use_batch_function: bool = False,
        num_batch_threads: int = 8,
        max_enqueued_batches: int = 64,
        batch_timeout_micros: int = 1_000_000,
        max_batch_size: int | None = None,
        allowed_batch_sizes: Sequence[int] | None = None,
        use_gpu: bool = False,
        enable_large_batch_splitting: bool = True,
    ):
        import tensorflow as tf

        self.module = tf.Module()
        self.module.params = {name: tf.Variable(x, trainable=False) for name, x in params.items()}
        self.module.kept = [*getattr(preproc_tf_fn, "resources", ()), *getattr(postproc_tf_fn, "resources", ())]
        self.batch_size = batch_size

        def run(*inputs: Any) -> Any:
            return postproc_tf_fn(model_tf_fn(self.module.params, preproc_tf_fn(*inputs)))

        if use_batch_function:
            sizes = list(allowed_batch_sizes or [])
            largest = max_batch_size or (sizes[-1] if sizes else batch_size)
            if largest is None:
                raise UserError("use_batch_function needs max_batch_size, allowed_batch_sizes or BATCH_SIZE.")
            run = tf.nondifferentiable_batch_function(
                num_batch_threads, largest, batch_timeout_micros, allowed_batch_sizes=sizes or None,
                max_enqueued_batches=max_enqueued_batches, enable_large_batch_splitting=enable_large_batch_splitting,
                autograph=False,
            )(run)  # fmt: skip
        if use_gpu:
            log.warning("ExportableModule.use_gpu is ignored: TensorFlow places the program where it runs.")
        self._function = tf.function(run, autograph=False, jit_compile=jit_compile or None)

    def __call__(self, *inputs: Any) -> Any:
        return self._function(*inputs)

    def save(self, directory: str, signature_name: str, input_signature: Sequence[Any]) -> None:
        """Write a SavedModel with one signature."""
        import tensorflow as tf

        self.module.call = self._function
        signature = self._function.get_concrete_function(*input_signature)
        tf.saved_model.save(self.module, directory, {signature_name: signature})


def create_preprocessor(
    batch_size: int | None,
    output_features: Mapping[str, Feature],
    task_feature_lengths: Mapping[str, int],
    tokenized_inputs: bool = False,
    *,
    input_tensor_name: str = "text_batch",
    split_separator: str | None = None,
    bucket_keys: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Preprocessor, Sequence[Any]]:
    """Return a function of strings that returns model features, and its signature.

    Args:
      batch_size: None is any.
      output_features: `inputs` and `targets`, with their vocabularies.
      task_feature_lengths: lengths to which features are truncated and padded.
      tokenized_inputs: inputs are token ids, int32 [rows, length], padded with zeros.
      input_tensor_name: name of the input.
      split_separator: divides an input string into inputs and targets, for scoring; None has empty targets.
      bucket_keys: not supported; lengths are fixed.
    """
    import tensorflow as tf

    if bucket_keys:
        raise UserError("create_preprocessor.bucket_keys is not supported: lengths are fixed. Remove it.")
    columns, targets_length = task_feature_lengths["inputs"], task_feature_lengths["targets"]

    def without_targets(ids: Any) -> dict[str, Any]:
        return _model_features(ids, tf.zeros([tf.shape(ids)[0], targets_length], tf.int32))

    if tokenized_inputs:
        return without_targets, [tf.TensorSpec([batch_size, columns], tf.int32, input_tensor_name)]
    vocabularies = (as_vocabulary(output_features[name].vocabulary) for name in ("inputs", "targets"))
    inputs, targets = map(saved_model.TensorFlowTokenizer, vocabularies)

    def preprocess(text_batch: Any) -> dict[str, Any]:
        if split_separator is None:
            return without_targets(inputs.encode(text_batch, columns))
        parts = tf.strings.split(text_batch, split_separator, maxsplit=1).to_tensor("", shape=[None, 2])
        return _model_features(inputs.encode(parts[:, 0], columns), targets.encode(parts[:, 1], targets_length))

    resources = [inputs.resource, targets.resource]
    return TfFunction(preprocess, resources), [tf.TensorSpec([batch_size], tf.string, input_tensor_name)]


def create_preprocessor_from_task(
    batch_size: int | None,
    output_features: Mapping[str, Feature] | None,
    task_feature_lengths: Mapping[str, int],
    tokenized_inputs: bool = False,
    *,
    model: BaseTransformerModel,
    task_name: str,
    serialized_examples: bool = True,
    run_precache: bool = False,
    input_tensor_name: str = "text_batch",
) -> tuple[Preprocessor, Sequence[Any]]:
    """Return a function that runs the preprocessors of a task of the real seqio, and its signature.

    Args:
      serialized_examples: inputs are serialized tf.train.Example messages with the strings `inputs` and `targets`;
        False: strings, which become `inputs`.
      run_precache: also run the preprocessors before `CacheDatasetPlaceholder`.
      output_features, tokenized_inputs: part of T5X's signature; unused.
      batch_size, task_feature_lengths, input_tensor_name: see `create_preprocessor`.
    """
    import seqio
    import tensorflow as tf

    del output_features, tokenized_inputs, model
    task = seqio.get_mixture_or_task(task_name)
    if not isinstance(task, seqio.Task):
        raise UserError(f"{task_name} is a mixture: an export has the preprocessors of one task.")
    lengths = {name: task_feature_lengths[name] for name in ("inputs", "targets")}
    fields = dict.fromkeys(lengths, tf.io.FixedLenFeature([], tf.string, ""))

    def preprocess(text_batch: Any) -> dict[str, Any]:
        data = tf.data.Dataset.from_tensor_slices(text_batch)
        if serialized_examples:
            data = data.map(lambda example: tf.io.parse_single_example(example, fields))
        else:
            data = data.map(lambda text: {"inputs": text, "targets": ""})
        if run_precache:
            data = task.preprocess_precache(data, seed=0)
        data = task.preprocess_postcache(data, sequence_length=task_feature_lengths, seed=0)
        data = data.map(lambda example: {name: tf.cast(example[name][:n], tf.int32) for name, n in lengths.items()})
        data = data.padded_batch(tf.shape(text_batch, tf.int64)[0], {name: [n] for name, n in lengths.items()})
        return _model_features(**data.get_single_element())

    examples = [_serialized(text) for text in TEXTS] if serialized_examples else None
    return TfFunction(preprocess, examples=examples), [tf.TensorSpec([batch_size], tf.string, input_tensor_name)]


def _serialized(text: str) -> bytes:
    """Return a tf.train.Example with an input and an empty target."""
    import tensorflow as tf

    values = {name: tf.train.BytesList(value=[x.encode()]) for name, x in (("inputs", text), ("targets", ""))}
    features = {name: tf.train.Feature(bytes_list=x) for name, x in values.items()}
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def _model_features(inputs: Any, targets: Any) -> dict[str, Any]:
    """Return the features of an encoder-decoder model."""
    import tensorflow as tf

    return {
        "encoder_input_tokens": inputs,
        "decoder_input_tokens": tf.pad(targets, [[0, 0], [1, 0]])[:, :-1],
        "decoder_target_tokens": targets,
        "decoder_loss_weights": tf.cast(targets > 0, tf.int32),
    }


def create_fake_input(signature: Any) -> Any:
    """Return a tensor for a signature: a batch of 3 where its size is open."""
    import tensorflow as tf

    shape = [3 if n is None else n for n in signature.shape]
    return tf.fill(shape, "") if signature.dtype == tf.string else tf.zeros(shape, signature.dtype)


def create_batch_polymorphic_shapes(
    input_signature: Sequence[Any],
    preprocessor: Preprocessor,
    create_fake_input_fn: Callable[[Any], Any] = create_fake_input,
    overrides: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the shapes of the model features with the batch dimension `b`: {feature: "b, length"}."""
    features = preprocessor(*(create_fake_input_fn(signature) for signature in input_signature))
    is_open = input_signature[0].shape[0] is None
    shapes = {
        name: ", ".join([("b" if is_open else str(x.shape[0])), *(str(n) for n in x.shape[1:])])
        for name, x in features.items()
    }
    return shapes | dict(overrides or {})


def create_inference_function(
    *,
    model: BaseTransformerModel,
    inference_mode: InferenceMode,
    partitioner: PjitPartitioner | None = None,
    train_state_initializer: Any = None,
    decoding_state_callback_fn: Callable[..., Any] | None = None,
    enable_jax2tf: bool = True,
    enable_xla: bool = True,
    polymorphic_shapes_inputs: Mapping[str, str] | None = None,
    native_lowering: bool = True,
    native_lowering_platforms: Sequence[str] | None = None,
    model_fn_extra_kwargs: Mapping[str, Any] | None = None,
    jax2tf_disable_platform_checks: bool = False,
    output_len: int | None = None,
) -> Callable[[Mapping[str, Any], Mapping[str, Any]], Any]:
    """Return a function of ({parameter: array}, model features): in TensorFlow, or JAX without `enable_jax2tf`.

    Args:
      inference_mode: `predict` (tokens and scores), `score`, or a `CustomInferenceMode`.
      decoding_state_callback_fn: see `state_callback_fn` of `decoding.temperature_sample`.
      polymorphic_shapes_inputs: {feature: shape}, see `create_batch_polymorphic_shapes`.
      native_lowering_platforms: where the program can run; None is cpu, cuda and tpu.
      model_fn_extra_kwargs: further arguments of the model's method.
      output_len: for `predict`, the length of the output instead of that of the targets.
      partitioner, train_state_initializer, enable_xla, native_lowering, jax2tf_disable_platform_checks: part of T5X's
        signature; jax2tf without XLA no longer exists.
    """
    del partitioner, train_state_initializer
    if not (enable_xla and native_lowering):
        ignored = {"enable_xla": enable_xla, "native_lowering": native_lowering}
        log_ignored("export_lib.create_inference_function", ignored)
    mode = inference_mode if isinstance(inference_mode, CustomInferenceMode) else _MODES.get(inference_mode)
    if mode is None or not hasattr(model, mode.model_fn_name):
        raise UserError(f"inference_mode is {inference_mode!r}: it must be predict, score or a CustomInferenceMode.")
    config = getattr(model.module, "config", None)
    if changed := [name for name in TOKEN_IDS if getattr(config, name, FIXED_IN_T5X[name]) != FIXED_IN_T5X[name]]:
        raise UserError(f"T5X's exports do not support the {', '.join(changed)} of this model. Use `t5x export`.")
    method = getattr(model, mode.model_fn_name)
    options = dict(mode.model_fn_const_kwargs or {}) | dict(model_fn_extra_kwargs or {})
    if decoding_state_callback_fn is not None:
        options["decoder_params"] = {"state_callback_fn": decoding_state_callback_fn}

    def run(arrays: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> Any:
        batch = dict(batch)
        if output_len is not None and mode is _MODES["predict"]:
            batch["decoder_input_tokens"] = jnp.zeros((batch["encoder_input_tokens"].shape[0], output_len), jnp.int32)
        with by_reference():
            outputs = method(tree.nest(arrays), batch, **options)
        return outputs if mode.fetch_output is None else mode.fetch_output(outputs)

    if not enable_jax2tf:
        return run
    platforms = native_lowering_platforms or DEFAULT_PLATFORMS

    def run_in_tensorflow(variables: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
        arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype.as_numpy_dtype) for name, x in variables.items()}
        ids = {name: jax.ShapeDtypeStruct([n or 1 for n in x.shape], jnp.int32) for name, x in batch.items()}
        specs = export.symbolic_args_specs(ids, polymorphic_shapes_inputs or "b, ...")
        exported = lower(run, arrays, specs, platforms=platforms)
        return saved_model.tensorflow_function(exported, variables)(*(batch[name] for name in sorted(batch)))

    return run_in_tensorflow


_MODES = {
    "predict": CustomInferenceMode("predict_batch_with_aux", lambda outputs: (outputs[0], outputs[1]["scores"])),
    "score": CustomInferenceMode("score_batch"),
}


def create_postprocessor(
    vocab: Vocabulary,
    inference_mode: InferenceMode,
    decode_outputs: bool | None = True,
    *,
    output_feature_names: Sequence[str] | None = None,
    add_token_length_to_output: bool = False,
) -> Callable[[Any], Any]:
    """Return a function of the model's outputs that decodes tokens.

    Args:
      decode_outputs: False returns token ids.
      output_feature_names: names of the outputs; None is `output_0`, `output_1`.
      add_token_length_to_output: also return `num_tokens` and `num_tokens_before_eos`.
    """
    import tensorflow as tf

    tokenizer = None
    if inference_mode == "predict" and decode_outputs is not False:
        vocab = as_vocabulary(vocab)
        tokenizer = saved_model.TensorFlowTokenizer(vocab)

    def postprocess(model_outputs: Any) -> dict[str, Any]:
        outputs = list(jax.tree.leaves(model_outputs))
        if tokenizer is not None:
            outputs[0] = tokenizer.decode(model_outputs[0])
        names = output_feature_names or [f"output_{i}" for i in range(len(outputs))]
        if len(names) != len(outputs):
            raise UserError(f"There are {len(outputs)} outputs: output_feature_names must have as many names.")
        named = dict(zip(names, outputs, strict=True))
        if add_token_length_to_output and inference_mode == "predict":
            ids = model_outputs[0]
            is_before = tf.equal(tf.cumsum(tf.cast(tf.equal(ids, vocab.eos_id), tf.int32), axis=-1), 0)
            for name, is_counted in (("num_tokens", ids > 0), ("num_tokens_before_eos", is_before & (ids > 0))):
                named[name] = tf.reduce_sum(tf.cast(is_counted, tf.int32), axis=-1)
        return named

    return TfFunction(postprocess, () if tokenizer is None else [tokenizer.resource])


def write_warmup_examples(
    text_batch: Sequence[Any],
    output_dir: str,
    model_name: str,
    *,
    signature_name: str = DEFAULT_SIGNATURE,
    generate_examples_fn: Callable[..., Sequence[Any]] | None = None,
    batch_sizes: Sequence[int | None] = (1,),
    input_tensor_name: str = "text_batch",
    decoder_params_spec: Any = None,
    request_to_prediction_log: Any = None,
    input_tensor_dtype: Any = None,
) -> None:
    """Write requests that TensorFlow Serving runs before a model is ready, one for each batch size.

    Args:
      text_batch: inputs; repeated to fill a batch.
      output_dir: of the SavedModel.
      generate_examples_fn: () -> inputs, instead of `text_batch`.
      decoder_params_spec, request_to_prediction_log, input_tensor_dtype: part of T5X's signature; unused.
    """
    del decoder_params_spec, request_to_prediction_log, input_tensor_dtype
    examples = text_batch if generate_examples_fn is None else generate_examples_fn()
    requests = [{input_tensor_name: _repeated(examples, size or 1)} for size in batch_sizes]
    saved_model.write_warmup_requests(output_dir, requests, model_name=model_name, signature_name=signature_name)


def save(
    *,
    model: BaseTransformerModel,
    inference_mode: InferenceMode = "predict",
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    exportable_module_cls: Callable[..., Any] = ExportableModule,
    create_preprocessor_fn: Callable[..., Any] = create_preprocessor,
    create_inference_function_fn: Callable[..., Any] = create_inference_function,
    create_postprocessor_fn: Callable[..., Any] = create_postprocessor,
    partitioner: PjitPartitioner | None = None,
    create_decoding_state_callback_fn: Callable[..., Any] | None = None,
    create_polymorphic_shapes_fn: Callable[..., Any] = create_batch_polymorphic_shapes,
    output_features: Mapping[str, Feature] | None = None,
    task_feature_lengths: Mapping[str, int],
    batch_size: int | None = None,
    output_dir: str | Mapping[str, str],
    model_name: str,
    warmup_examples: Sequence[Any] | None = None,
    tokenized_inputs: bool = False,
    write_warmup_example_fn: Callable[..., None] = write_warmup_examples,
    mixture_or_task_name: str | None = None,
    validation_examples: Sequence[Any] | None = None,
    native_lowering: bool = True,
    native_lowering_platforms: Sequence[str] | None = None,
    enable_xla: bool = True,
    decode_outputs: bool | None = None,
    trailing_shapes: Mapping[str, Sequence[int]] | None = None,
    output_vocab_feature_name: str = "targets",
    signature_name: str = DEFAULT_SIGNATURE,
) -> None:
    """Write a SavedModel, and check it against the model.

    Args:
      restore_checkpoint_cfg: one checkpoint of any format.
      output_dir: BASE/VERSION, with a number as the version: the model is written to BASE_cpu/VERSION. Or {"cpu":
        directory}.
      model_name: name of the model in TensorFlow Serving.
      warmup_examples: inputs for `write_warmup_example_fn`.
      validation_examples: inputs to compare with the model; None uses built-in ones.
      mixture_or_task_name: part of T5X's signature; `create_preprocessor_from_task` has a parameter of its own.
      decode_outputs: False returns token ids; None decodes unless `tokenized_inputs`.
      trailing_shapes: not supported; lengths are `task_feature_lengths`.
      inference_mode, native_lowering, …: see the functions that take them.
    """
    import_extra("tensorflow", saved_model.EXTRA)
    if trailing_shapes:
        raise UserError("export_lib.save.trailing_shapes is not supported: set task_feature_lengths.")
    destination = _destination(output_dir)
    features = output_features or {name: Feature(vocabulary) for name, vocabulary in model.vocabularies.items()}
    decode_outputs = not tokenized_inputs if decode_outputs is None else decode_outputs
    with new_destination(destination) as directory:
        arrays = _arrays(model, restore_checkpoint_cfg, partitioner)
        preprocess, signature = create_preprocessor_fn(
            batch_size=batch_size, output_features=features, task_feature_lengths=task_feature_lengths,
            tokenized_inputs=tokenized_inputs,
        )  # fmt: skip
        inference_args: dict[str, Any] = {
            "model": model, "inference_mode": inference_mode, "partitioner": partitioner, "enable_xla": enable_xla,
            "native_lowering": native_lowering, "native_lowering_platforms": native_lowering_platforms,
            "polymorphic_shapes_inputs": create_polymorphic_shapes_fn(signature, preprocess),
        }  # fmt: skip
        if create_decoding_state_callback_fn is not None:
            vocabulary = features[output_vocab_feature_name].vocabulary
            inference_args["decoding_state_callback_fn"] = create_decoding_state_callback_fn(vocab=vocabulary)
        in_tensorflow = create_inference_function_fn(**inference_args, enable_jax2tf=True)
        postprocess = create_postprocessor_fn(
            vocab=features[output_vocab_feature_name].vocabulary, inference_mode=inference_mode,
            decode_outputs=decode_outputs,
        )  # fmt: skip
        module = exportable_module_cls(
            preproc_tf_fn=preprocess, model_tf_fn=in_tensorflow, postproc_tf_fn=postprocess, params=arrays,
            batch_size=batch_size,
        )  # fmt: skip
        module.save(directory, signature_name, signature)
        if warmup_examples:
            write_warmup_example_fn(
                warmup_examples, directory, model_name, batch_sizes=[batch_size], signature_name=signature_name
            )
        in_jax = create_inference_function_fn(**inference_args, enable_jax2tf=False)
        inputs = validation_examples or getattr(preprocess, "examples", None)
        examples = _examples(signature[0], inputs, batch_size)
        differences = _check(directory, signature_name, (preprocess, in_jax, postprocess), arrays, examples, model)
    print(f"checked against the original: {differences}")
    print(f"wrote {destination} ({model_name})")


def _destination(output_dir: str | Mapping[str, str]) -> str:
    """Return the directory of the CPU model, which T5X calls BASE_cpu/VERSION."""
    if isinstance(output_dir, Mapping):
        if "cpu" not in output_dir:
            raise UserError(f"output_dir has {', '.join(output_dir)}: it must have 'cpu'.")
        return output_dir["cpu"]
    base, version = os.path.split(os.path.normpath(output_dir))
    if not base or not version.isdecimal():
        raise UserError(f"MODEL_OUTPUT_DIR is {output_dir!r}: it must end with a version, as models/mine/1.")
    return os.path.join(f"{base}_cpu", version)


def _arrays(
    model: BaseTransformerModel, cfg: RestoreCheckpointConfig, partitioner: PjitPartitioner | None
) -> dict[str, np.ndarray]:
    """Return {name: array} of a checkpoint's parameters, in the dtype in which the network uses them."""
    source = open_for_all(cfg.single_path())
    layout = StateLayout.of(model, partitioner or PjitPartitioner(), model.input_shapes({"inputs": 1, "targets": 1}))
    params = restore_params(source, model, layout, cfg)
    return tree.flatten(jax.device_get(compute_params(model.module, params)))


def _examples(signature: Any, examples: Sequence[Any] | None, rows: int | None) -> Any:
    """Return a batch of inputs for the check."""
    if examples is None and signature.dtype != "string":
        return np.ones([rows or 3, *signature.shape[1:]], np.int32)
    examples = TEXTS if examples is None else examples
    return _repeated(examples, rows or len(examples))


def _repeated(examples: Sequence[Any], rows: int) -> list[Any]:
    return list(itertools.islice(itertools.cycle(examples), rows))


def _check(
    directory: str, signature_name: str, functions: Sequence[Any], arrays: Mapping[str, Any], examples: Any, model: Any
) -> str:
    """Compare the SavedModel with the model, and return a line about the differences."""
    import tensorflow as tf

    preprocess, in_jax, postprocess = functions
    batch = {name: x.numpy() for name, x in preprocess(tf.constant(examples)).items()}
    expected = postprocess(jax.tree.map(tf.constant, jax.device_get(jax.jit(in_jax)(arrays, batch))))
    signature = tf.saved_model.load(directory).signatures[signature_name]
    (name,) = signature.structured_input_signature[1]
    outputs = signature(**{name: tf.constant(examples)})
    comparison = ExportComparison(jnp.dtype(model.module.config.dtype).name)
    for name, value in expected.items():
        compare = comparison.numbers if value.dtype.is_floating else comparison.outputs
        compare(name, value.numpy().tolist(), outputs[name].numpy().tolist())
    return str(comparison)
