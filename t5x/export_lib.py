"""T5X's `export_lib`: a TensorFlow SavedModel with one signature, configured by gin (`configs/runs/export.gin`).

`t5x export MODEL DEST --format savedmodel` needs no gin files, and writes several signatures.
"""

# ruff: noqa: F401

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from t5x.checkpoints import tree
from t5x.checkpoints.config import RestoreCheckpointConfig
from t5x.data.feature_spec import Feature
from t5x.errors import UserError
from t5x.exporting import saved_model
from t5x.exporting.checking import TEXTS, ExportComparison
from t5x.exporting.destination import new_destination
from t5x.exporting.tf_functions import (
    DEFAULT_SIGNATURE,
    CustomInferenceMode,
    ExportableModule,
    InferenceMode,
    create_batch_polymorphic_shapes,
    create_fake_input,
    create_inference_function,
    create_postprocessor,
    create_preprocessor,
    create_preprocessor_from_task,
    write_warmup_examples,
)
from t5x.lazy_imports import import_extra
from t5x.models import BaseTransformerModel
from t5x.network import compute_params
from t5x.partitioning import PjitPartitioner
from t5x.trainer.restore import open_for_all, restore_params
from t5x.trainer.state import StateLayout


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
    return [examples[i % len(examples)] for i in range(rows or len(examples))]


def _check(
    directory: str, signature_name: str, functions: Sequence[Any], arrays: Mapping[str, Any], examples: Any, model: Any
) -> str:
    """Compare the SavedModel with the model, and return a line about the differences."""
    import tensorflow as tf

    preprocess, in_jax, postprocess = functions
    batch = {name: x.numpy() for name, x in preprocess(tf.constant(examples)).items()}
    jax_outputs = jax.tree.map(lambda x: tf.constant(np.asarray(x)), jax.jit(in_jax)(arrays, batch))
    expected = postprocess(jax_outputs)
    signature = tf.saved_model.load(directory).signatures[signature_name]
    (name,) = signature.structured_input_signature[1]
    outputs = signature(**{name: tf.constant(examples)})
    comparison = ExportComparison(jnp.dtype(model.module.config.dtype).name)
    for name, value in expected.items():
        original, exported = value.numpy(), outputs[name].numpy()
        if np.issubdtype(original.dtype, np.floating):
            comparison.numbers(name, original, exported)
        else:
            comparison.outputs(name, original.tolist(), exported.tolist())
    return str(comparison)
