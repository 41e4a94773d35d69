"""The programs of a model for export: token ids in, token ids and scores out, for any number of rows."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from t5x._runtime.errors import UserError, check_at_least
from t5x.checkpoints import tree
from t5x.inference.generation import Decoding
from t5x.inference.loaded import LoadedModel
from t5x.models import EncoderDecoderModel
from t5x.network.attention import by_reference

_SCALE = ".scale"  # of the array with the name before it
_LARGEST = 127

Arrays = Mapping[str, jax.Array]
GREEDY = Decoding()
PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
DEFAULT_PLATFORMS = ("cpu", "cuda", "tpu")
_STABLEHLO = "1.9.0"  # version of the programs: older than what the TensorFlow of the same year reads


def quantize(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the arrays with kernels and embeddings as int8, each followed by its float32 scales.

    A kernel [inputs, …, outputs] has a scale per output, an embedding [tokens, features] one per token. The output
    projections of feed-forward layers (`wo`) stay as they are: their inputs are the largest of T5, so errors grow
    there. Small arrays (norms, position biases) stay too.
    """
    quantized: dict[str, np.ndarray] = {}
    for name, array in arrays.items():
        *_, module, leaf = ("", *name.split("/"))
        if leaf not in ("kernel", "embedding") or module == "wo" or array.ndim < 2:
            quantized[name] = array
            continue
        values = np.asarray(array, np.float32)
        largest = np.abs(values).max(axis=0 if leaf == "kernel" else -1, keepdims=True)
        scale = np.where(largest > 0, largest / _LARGEST, 1).astype(np.float32)
        quantized[name] = np.rint(values / scale).astype(np.int8)
        quantized[name + _SCALE] = scale
    return quantized


def dequantize(arrays: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """Return the arrays, of NumPy or traced, in the dtype instead of int8."""
    dequantized = {}
    for name, array in arrays.items():
        if name.endswith(_SCALE):
            continue
        scale = arrays.get(name + _SCALE)
        dequantized[name] = array if scale is None else (array.astype(jnp.float32) * scale).astype(dtype)
    return dequantized


class ExportFunction(NamedTuple):
    """A function of parameters and token ids.

    Attributes:
      function: ({parameter: array}, one array of int32 [rows, columns] per input) -> {output: array}.
      inputs: {name of an input: number of its columns; None is any number}.
    """

    function: Callable[..., dict[str, jax.Array]]
    inputs: dict[str, int | None]


@dataclasses.dataclass
class Exportable:
    """A model with the decoding and lengths of its export.

    Attributes:
      loaded: the model.
      decoding: how `predict` decodes: greedily or with beams.
      max_input_length: columns of the inputs.
      max_length: maximum number of generated tokens, and columns of the targets.
      model: the network with its vocabularies.
      arrays: {name: array}, the parameters as the export stores them.
    """

    loaded: LoadedModel
    decoding: Decoding
    max_input_length: int
    max_length: int
    model: EncoderDecoderModel = dataclasses.field(init=False)
    arrays: dict[str, np.ndarray] = dataclasses.field(init=False)

    def __post_init__(self):
        if not isinstance(self.loaded.model, EncoderDecoderModel):
            raise UserError("This model is decoder-only: only encoder-decoder models can be exported in this format.")
        self.model = self.loaded.model
        if self.decoding.samples:
            raise UserError("An export decodes greedily or with beams: remove temperature, top_k and top_p.")
        check_at_least(1, max_input_length=self.max_input_length, max_length=self.max_length)
        self.arrays = tree.flatten(jax.device_get(self.loaded.engine.params))

    def quantize(self) -> None:
        """Store the matrices as int8. From then on the model computes with the rounded values."""
        self.arrays = quantize(self.arrays)
        rounded = dequantize(self.arrays, self.loaded.dtype)
        self.loaded.engine.params = jax.device_put(tree.nest(rounded))

    def decodings(self) -> dict[str, Decoding]:
        """Return the programs that generate: `predict`, and `greedy` unless `predict` is greedy."""
        return {"predict": self.decoding} | ({"greedy": GREEDY} if self.decoding != GREEDY else {})

    def programs(self) -> dict[str, ExportFunction]:
        """Return the programs by name: `predict`, `score`, `rank`, `encode`, and `greedy` if `predict` is not."""
        inputs: dict[str, int | None] = {"input_ids": self.max_input_length}
        generating = {
            name: ExportFunction(self._dequantizing(functools.partial(self._predict, decoding)), inputs)
            for name, decoding in self.decodings().items()
        }
        return generating | {
            "score": ExportFunction(self._dequantizing(self._score), inputs | {"target_ids": self.max_length}),
            "rank": ExportFunction(self._dequantizing(self._rank), inputs | {"label_ids": None}),
            "encode": ExportFunction(self._dequantizing(self._encode), inputs),
        }

    def export(self, program: ExportFunction, platforms: Sequence[str], rows: int | None = None) -> export.Exported:
        """Lower a program to StableHLO.

        Args:
          platforms: where it can run.
          rows: the only batch size; None is any.
        """
        any_rows, any_columns = export.symbolic_shape("rows, columns")
        arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in self.arrays.items()}
        ids = [
            jax.ShapeDtypeStruct((rows or any_rows, columns or any_columns), jnp.int32)
            for columns in program.inputs.values()
        ]
        return lower(program.function, arrays, *ids, platforms=platforms)

    def _dequantizing(self, function: Callable[..., dict[str, jax.Array]]) -> Callable[..., dict[str, jax.Array]]:
        """Return a function of the stored arrays from a function of the parameters and token ids."""

        def run(arrays: Arrays, *ids: jax.Array) -> dict[str, jax.Array]:
            params = tree.nest(dequantize(arrays, self.loaded.dtype))
            with by_reference():
                return function(params, *ids)

        return run

    def _predict(self, decoding: Decoding, params: Any, input_ids: jax.Array) -> dict[str, jax.Array]:
        """Return `output_ids` [rows, max_length] and `score` [rows]; with num_return > 1, [rows, num_return, …]."""
        model = copy.copy(self.model)
        model.decode_fn = decoding.decode_fn(model.output_vocabulary, self.max_length)
        batch = {
            "encoder_input_tokens": input_ids,
            "decoder_input_tokens": jnp.zeros((input_ids.shape[0], self.max_length), jnp.int32),
        }
        ids, aux = model.predict_batch_with_aux(
            params, batch, num_decodes=decoding.num_decodes, return_all_decodes=True
        )
        outputs = {"output_ids": ids[:, ::-1], "score": aux["scores"][:, ::-1]}  # best first
        count = decoding.num_return
        return {name: x[:, 0] if count == 1 else x[:, :count] for name, x in outputs.items()}

    def _score(self, params: Any, input_ids: jax.Array, target_ids: jax.Array) -> dict[str, jax.Array]:
        """Return `score` [rows], the log probability of the targets."""
        model = self.model
        batch = {
            "encoder_input_tokens": input_ids,
            "decoder_input_tokens": jnp.pad(target_ids, ((0, 0), (1, 0)), constant_values=model.start_id)[:, :-1],
            "decoder_target_tokens": target_ids,
            "decoder_loss_weights": (target_ids != model.pad_id).astype(jnp.int32),
        }
        return {"score": model.score_batch(params, batch)}

    def _rank(self, params: Any, input_ids: jax.Array, label_ids: jax.Array) -> dict[str, jax.Array]:
        """Return `logits` [rows, labels] of the labels at the first output position."""
        return {"logits": self.model.first_logits(params, input_ids, label_ids)}

    def _encode(self, params: Any, input_ids: jax.Array) -> dict[str, jax.Array]:
        """Return `encoded` [rows, columns, features], the output of the encoder; rows of padding are meaningless."""
        module = self.model.module
        encoded: Any = module.apply({"params": params}, input_ids, enable_dropout=False, method=module.encode)
        return {"encoded": encoded}


def lower(function: Callable[..., Any], *arguments: Any, platforms: Sequence[str]) -> export.Exported:
    """Lower a function to StableHLO that older readers understand too.

    Args:
      arguments: trees of `jax.ShapeDtypeStruct`.
      platforms: where it can run.
    """
    for platform in platforms:
        if platform not in PLATFORMS:
            raise UserError(f"platforms has {platform!r}: it must be some of {', '.join(PLATFORMS)}.")
    if jax.default_backend() != "cpu":
        raise UserError(
            f"An export is traced on the CPU, so that it has no kernels of one device; JAX runs on "
            f"{jax.default_backend()}. Set JAX_PLATFORMS=cpu."
        )
    exported = export.export(jax.jit(function), platforms=platforms)(*arguments)
    with mlir.make_ir_context():
        text = str(ir.Module.parse(exported.mlir_module()).operation.get_asm())  # without the paths of source files
    module = stablehlo.serialize_portable_artifact_str(text, _STABLEHLO)
    return dataclasses.replace(exported, mlir_module_serialized=module)
