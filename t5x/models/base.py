"""The base class of all models: loss, metrics and scores of a network."""

import abc
import dataclasses
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x import decoding
from t5x.data.vocabularies import Vocabulary, as_vocabulary
from t5x.metrics.accumulators import Average, AveragePerStep, Metrics, StepsPerTime, Sum, Time, TimeRate
from t5x.models import losses
from t5x.models.hooks import hooks_of
from t5x.network import LogitFactors, NetworkConfig, fp8, initial_variables, is_ours, padding
from t5x.optimizers.protocol import OptimizerDef

Batch = Mapping[str, jax.Array]
Params = Mapping[str, Any]


@dataclasses.dataclass
class DecoderParams:
    """T5X's defaults of `predict_batch_with_aux`."""

    return_all_decodes: bool = False
    num_decodes: int = 1


class BaseModel(abc.ABC):
    """What training, evaluation and inference need of a model.

    Args:
      optimizer_def: see `t5x.optimizers.OptimizerDef`; None for inference.
    """

    FEATURE_CONVERTER_CLS: Callable[..., Any]
    module: nn.Module | None = None

    def __init__(self, optimizer_def: OptimizerDef | None):
        self.optimizer_def = optimizer_def

    # Not plain properties: a user's model may assign attributes of these names.
    @functools.cached_property
    def vocabularies(self) -> Mapping[str, Vocabulary]:
        return {}  # by task feature

    @functools.cached_property
    def keys_dropout_by_row(self) -> bool:
        return False

    @abc.abstractmethod
    def loss_fn(self, params: Params, batch: Batch, dropout_rng: jax.Array | None) -> tuple[jax.Array, Metrics]:
        """Return the loss to minimize, and the metrics of the batch.

        A model with other variables than parameters also takes `flax_mutables`, and returns (loss, (metrics, new
        mutables)).
        """

    def eval_fn(self, params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        """Return the loss and metrics without dropout."""
        return self.loss_fn(params=params, batch=batch, dropout_rng=None)

    def predict_batch(self, params: Params, batch: Batch, rng: jax.Array | None = None) -> Any:
        """Return the predictions of `predict_batch_with_aux` without the auxiliary outputs."""
        return self.predict_batch_with_aux(params, batch, rng=rng)[0]

    @abc.abstractmethod
    def predict_batch_with_aux(self, params: Params, batch: Batch, rng: jax.Array | None = None) -> tuple[Any, Any]:
        """Return predictions, and a dictionary of auxiliary outputs."""

    @abc.abstractmethod
    def score_batch(self, params: Params, batch: Batch, return_intermediates: bool = False) -> Any:
        """Return a score for each row."""

    @abc.abstractmethod
    def get_initial_variables(
        self,
        rng: jax.Array,
        input_shapes: Mapping[str, tuple[int, ...]],
        input_types: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return fresh `params`, and their logical axes as `params_axes`.

        Args:
          input_shapes, input_types: shape and dtype of each feature of a batch.
        """

    def with_loss_scale(self, batch: Batch) -> Batch:
        """Add what `loss_fn` needs to normalize a microbatch like the whole batch."""
        return batch


class BaseTransformerModel(BaseModel):
    """A network over tokens with its vocabularies, loss, metrics and scores.

    Args:
      module: a Linen module with T5X's call convention.
      input_vocabulary, output_vocabulary: of the features `inputs` and `targets`.
      optimizer_def: see `t5x.optimizers.OptimizerDef`; None for inference.
      decode_fn: see `t5x.decoding`.
      label_smoothing, z_loss, loss_normalizing_factor: see `t5x.losses`.
      feature_converter_cls: converts task features to model features; None is FEATURE_CONVERTER_CLS.
      default_decoder_params: keyword arguments of `decode_fn`, or a `DecoderParams`.
    """

    _MODULE_INPUTS: tuple[str, ...]  # features that the module takes by position
    _OPTIONAL_INPUTS: tuple[str, ...]  # features that it takes by name, None if the batch does not have them

    module: nn.Module
    # {task feature: length} -> {feature of the module: shape}; a user's model need not have it.
    input_shapes: Callable[[Mapping[str, int]], dict[str, tuple[int, ...]]]

    # Defaults for subclasses that do not call `__init__`.
    default_decoder_params: Mapping[str, Any] = types.MappingProxyType({})
    _return_all_decodes = False

    def __init__(
        self,
        module: nn.Module,
        input_vocabulary: Vocabulary,
        output_vocabulary: Vocabulary,
        optimizer_def: OptimizerDef | None,
        decode_fn: Callable | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: losses.LossNormalizingFactor = None,
        feature_converter_cls: Callable[..., Any] | None = None,
        default_decoder_params: Mapping[str, Any] | DecoderParams | None = None,
    ):
        super().__init__(optimizer_def)
        self.module = module
        self._input_vocabulary = as_vocabulary(input_vocabulary)
        self._output_vocabulary = as_vocabulary(output_vocabulary)
        self._decode_fn = decode_fn
        if feature_converter_cls is not None:
            self.FEATURE_CONVERTER_CLS = feature_converter_cls
        self._label_smoothing = label_smoothing
        self._z_loss = z_loss
        self._loss_normalizing_factor = loss_normalizing_factor
        if isinstance(default_decoder_params, DecoderParams):
            self._return_all_decodes = default_decoder_params.return_all_decodes
            default_decoder_params = {"num_decodes": default_decoder_params.num_decodes}
        self.default_decoder_params = dict(default_decoder_params or {})
        if isinstance(loss_normalizing_factor, str):
            losses.special_loss_normalizing_factor(loss_normalizing_factor)  # report a wrong name before training

    @property
    def vocabularies(self) -> Mapping[str, Vocabulary]:
        return {"inputs": self._input_vocabulary, "targets": self._output_vocabulary}

    @property
    def input_vocabulary(self) -> Vocabulary:
        return self._input_vocabulary

    @property
    def output_vocabulary(self) -> Vocabulary:
        return self._output_vocabulary

    @property
    def decode_fn(self) -> Callable | None:
        return self._decode_fn

    @decode_fn.setter
    def decode_fn(self, decode_fn: Callable | None) -> None:
        self._decode_fn = decode_fn

    # -- network -------------------------------------------------------------------------------------------------------

    def get_initial_variables(
        self,
        rng: jax.Array,
        input_shapes: Mapping[str, tuple[int, ...]],
        input_types: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return fresh `params`, and their logical axes as `params_axes`."""

        def ones(name: str) -> jax.Array:
            return jnp.ones(input_shapes[name], (input_types or {}).get(name, jnp.int32))

        # As in T5X, targets look like the decoder's inputs: subclasses that change shapes may leave the targets' alone.
        like = {"decoder_target_tokens": "decoder_input_tokens"}
        tokens = [ones(like.get(name, name)) for name in self._MODULE_INPUTS]
        if is_ours(self.module):
            return initial_variables(self.module, rng, *tokens)
        optional = {name: ones(name) if name in input_shapes else None for name in self._OPTIONAL_INPUTS}
        return self._init_module(rng, tokens, optional)

    def _init_module(self, rng: jax.Array, tokens: Sequence[jax.Array], optional: Mapping[str, Any]) -> Any:
        """Initialize a custom network with the arguments that T5X passes."""
        return self.module.init(rng, *tokens, **optional, decode=False, enable_dropout=False)

    def compute_logits(
        self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None, mutable: Any = False
    ) -> Any:
        """Return logits float32 [batch, targets, vocab] under teacher forcing; dropout is on if its key is given."""
        options = {} if mutable is False else {"mutable": mutable}
        return self._compute_logits(params, batch, dropout_rng, **options)

    def _compute_logits(
        self,
        params: Params,
        batch: Batch,
        dropout_rng: jax.Array | None = None,
        mutable: Any = False,
        other_variables: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the logits; subclasses may compute others. `other_variables` are further collections."""
        return self._apply(params, batch, dropout_rng, other_variables, mutable=mutable)

    def _apply(
        self, params: Params, batch: Batch, dropout_rng: jax.Array | None, other_variables: Any = None, **options: Any
    ) -> Any:
        return self.module.apply(
            {**self._variables(params, batch.get("fp8_scales")), **(other_variables or {})},
            *(batch[name] for name in self._MODULE_INPUTS),
            **self._optional_inputs(batch),
            **self._row_index(batch, batch[self._MODULE_INPUTS[0]].shape[0]),
            decode=False,
            enable_dropout=dropout_rng is not None,
            rngs=None if dropout_rng is None else {"dropout": dropout_rng},
            **options,
        )

    def _optional_inputs(self, batch: Batch) -> dict[str, Any]:
        return {name: batch.get(name) for name in self._OPTIONAL_INPUTS}

    def _variables(self, params: Params, fp8_scales: Any = None) -> dict[str, Any]:
        """Return the variables of the module, with FP8 scales in a training step that has them."""
        if not fp8_scales:
            return {"params": params}
        return {"params": params, fp8.SCALES: fp8.collection(self.module.config, fp8_scales)}

    def initial_fp8_history(self) -> Any:
        """Return an empty amax history for training in FP8 (see `network.fp8`); {} if the network does not use it."""
        uses = is_ours(self.module) and self.module.config.matmul_dtype == "fp8"
        return fp8.initial_history(self.module.config) if uses else {}

    @property
    def keys_dropout_by_row(self) -> bool:
        """Whether dropout is keyed by the row of the global batch, and so does not depend on microbatches.

        This is the case if the module takes `row_index`, and its `setup` is not that of a user.
        """
        return hooks_of(self).takes_row_index

    def _row_index(self, batch: Batch, num_rows: int) -> dict[str, Any]:
        """Return the `row_index` of a batch of `num_rows`; a multiple if a subclass folds lists into the batch."""
        if not self.keys_dropout_by_row or "row_index" not in batch:
            return {}
        rows = batch["row_index"]
        length, remainder = divmod(num_rows, rows.shape[0])
        return {} if remainder else {"row_index": (rows[:, None] * length + jnp.arange(length)).reshape(-1)}

    @property
    def pad_id(self) -> int:
        """The padding token."""
        return padding.pad_id_of(self.module)

    @property
    def eos_ids(self) -> tuple[int | None, ...]:
        """The tokens that end an output: those of the network's configuration, or else the vocabulary's EOS."""
        stated = getattr(getattr(self.module, "config", None), "eos_token_id", ())
        return stated or (self.output_vocabulary.eos_id,)

    # -- training ------------------------------------------------------------------------------------------------------

    def loss_fn(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, Metrics]:
        """Return the loss to minimize, and the metrics of the batch.

        A microbatch has `loss_scale` (see `with_loss_scale`), so that it is normalized like the whole batch. With
        `fp8_scales` (see `network.fp8`), the matmuls of the layers are in FP8.
        """
        scale = self.with_loss_scale(batch)["loss_scale"]
        targets = batch["decoder_target_tokens"].astype(jnp.int32)
        options = {"z_loss": self._z_loss, "label_smoothing": self._label_smoothing}
        if (factors := self._logit_factors(params, batch, dropout_rng)) is not None:
            options |= {"scale": factors.scale}
            loss, tokens = losses.projected_cross_entropy(factors.hidden, factors.kernel, targets, scale, **options)
        else:
            logits = self.compute_logits(params, batch, dropout_rng)
            per_token, z_part = losses.cross_entropy(logits, targets, **options)
            tokens = losses.TokenLosses(per_token, z_part, jnp.argmax(logits, axis=-1) == targets)
            loss = jnp.sum(per_token * scale)
        z_loss = jnp.sum(tokens.z_loss * scale)
        if (accepted := hooks_of(self).metrics_arguments) is None:
            return loss, self._metrics(batch, tokens, loss, z_loss)
        segments = {name: ids for name, ids in batch.items() if name.endswith("_segment_ids")}
        arguments: dict[str, Any] = {"loss": loss, "z_loss": z_loss, "segment_ids": segments}
        arguments["mask"] = losses.loss_weights(batch)
        arguments = {name: value for name, value in arguments.items() if name in accepted}
        return loss, self._compute_metrics(logits=logits, targets=targets, **arguments)

    def _compute_metrics(
        self,
        logits: jax.Array,
        targets: jax.Array,
        mask: jax.Array,
        loss: jax.Array,
        z_loss: jax.Array | None = None,
        segment_ids: Mapping[str, jax.Array] | None = None,
    ) -> Metrics:
        """Return the metrics of a batch; subclasses may add others."""
        return compute_base_metrics(logits, targets, mask, loss, z_loss, segment_ids)

    def _logit_factors(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> LogitFactors | None:
        """Return hidden states and kernel instead of logits; None for custom networks, or if logits are needed."""
        hooks = hooks_of(self)
        if hooks.custom_network or hooks.custom_logits or hooks.metrics_arguments is not None:
            return None
        return self._apply(params, batch, dropout_rng, as_factors=True)

    def with_loss_scale(self, batch: Batch) -> Batch:
        """Add `loss_scale`, the factor of each target token's loss, to the batch."""
        if "loss_scale" in batch:
            return batch
        return {**batch, "loss_scale": losses.loss_scale(self._loss_normalizing_factor, batch, self.pad_id)}

    def _metrics(self, batch: Batch, of_tokens: losses.TokenLosses, loss: jax.Array, z_loss: jax.Array) -> Metrics:
        weights = losses.loss_weights(batch)
        tokens, size = jnp.sum(weights), batch["decoder_target_tokens"].size
        total, z_total = jnp.sum(of_tokens.loss * weights), jnp.sum(of_tokens.z_loss * weights)
        right = jnp.sum(of_tokens.is_right * weights)
        metrics = {
            "loss": AveragePerStep(total=loss),
            "z_loss": AveragePerStep(total=z_loss),
            "cross_ent_loss": AveragePerStep(total=loss - z_loss),
            "accuracy": Average(right, tokens),
            "loss_per_nonpadding_target_token": Average(total, tokens),
            "loss_per_all_target_tokens": Average(total, size),
            "z_loss_per_all_target_tokens": Average(z_total, size),
            "cross_ent_loss_per_all_target_tokens": Average(total - z_total, size),
            "target_tokens": Sum(tokens),
            "non_padding_fraction/loss_weights": Average(tokens, size),
        }
        features = {k: v for k, v in batch.items() if k.endswith("_tokens") and k != "decoder_input_tokens"}
        real = {k: Average(jnp.sum(v != self.pad_id), v.size) for k, v in features.items()}
        metrics |= {f"non_padding_fraction/{k}": average for k, average in real.items()}
        metrics["non_padding_fraction/overall"] = functools.reduce(Average.merge, real.values(), Average(0, 0))
        return metrics

    # -- inference -----------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def predict_batch_with_aux(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Decode a batch.

        Args:
          params: parameters of the module.
          batch: model features. `example_index`, int [batch], if present, is folded into a single `rng`, so that an
            example gets the same sample in any batch.
          rng: for sampling: one key, or one per row.
          decoder_params: arguments of `decode_fn`; they override `default_decoder_params`. Numbers (alpha, temperature,
            topk, topp, eos_id, decode_rng …) may be traced, so that new values do not recompile.
          return_all_decodes: return all decodes, best last, instead of the best one.
          num_decodes: number of decodes per example.

        Returns:
          tokens [batch, length] and {"scores": [batch]} of the best decodes. With `return_all_decodes`, both have an
          axis of decodes after the batch axis.
        """

    def predict_batch(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Return predicted tokens int32 [batch, length], where length is that of `decoder_input_tokens`."""
        return self.predict_batch_with_aux(params, batch, rng=rng, decoder_params=decoder_params)[0]

    def _decode_options(
        self, batch: Batch, rng: jax.Array | None, decoder_params: Mapping[str, Any] | None, num_decodes: int
    ) -> dict[str, Any]:
        """Merge the arguments of `decode_fn`: defaults, those of the model, those of the call."""
        ends = self.eos_ids
        options: dict[str, Any] = {"num_decodes": 1 if num_decodes is None else num_decodes}
        options["eos_id"] = ends[0] if len(ends) == 1 else ends
        if self.pad_id:
            options["pad_id"] = self.pad_id
        options |= {**self.default_decoder_params, **(decoder_params or {})}
        if rng is not None:
            if "decode_rng" in (decoder_params or {}):
                raise ValueError("The random key is given twice: pass `rng` or decoder_params['decode_rng'].")
            options["decode_rng"] = rng
        rows, length = batch["decoder_input_tokens"].shape[:2]
        self._check_memory(rows, length, options["num_decodes"])
        if "example_index" in batch:
            options["decode_rng"] = decoding.example_keys(options.get("decode_rng"), batch["example_index"])
        configs = (self.module, getattr(self.module, "config", None))
        return options | {"cache_offset": int(any(getattr(config, "scan_layers", False) for config in configs))}

    def _check_memory(self, rows: int, length: int, num_decodes: int) -> None:
        """Raise a UserError if decoding cannot fit into memory, before it is traced and compiled."""
        config = getattr(self.module, "config", None)
        if isinstance(config, NetworkConfig):
            layers = getattr(config, "num_decoder_layers", 0) or getattr(config, "num_layers", 0)
            cache = 2 * layers * config.num_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
            tokens, logits = 2 * 4, 4 * config.vocab_size
            decoding.check_memory(rows, num_decodes, length, per_token=cache + tokens, per_decode=logits)

    def score_batch(self, params: Params, batch: Batch, return_intermediates: bool = False) -> Any:
        """Return the log likelihood of each row's targets, float32 [batch].

        Args:
          params: parameters of the module.
          batch: model features.
          return_intermediates: return (scores, tree) with what the network sowed into `intermediates`, and under
            `decoder` the `target_tokens`, `loss_weights` and `token_scores` (weighted log probabilities), each
            [batch, targets] in a tuple, like all sown values.
        """
        targets, weights = batch["decoder_target_tokens"].astype(jnp.int32), losses.loss_weights(batch)
        if return_intermediates:
            logits, changed = self.compute_logits(params, batch, mutable=["intermediates"])
            token_scores = -losses.cross_entropy(logits, targets)[0] * weights
            sown = changed.get("intermediates", {})
            added = {"target_tokens": (targets,), "loss_weights": (weights,), "token_scores": (token_scores,)}
            return jnp.sum(token_scores, axis=-1), {**sown, "decoder": {**sown.get("decoder", {}), **added}}
        if (factors := self._logit_factors(params, batch)) is not None:
            per_token = losses.projected_losses(factors.hidden, factors.kernel, targets, factors.scale).loss
        else:
            per_token, _ = losses.cross_entropy(self.compute_logits(params, batch), targets)
        return -jnp.sum(per_token * weights, axis=-1)


def best_or_all(decodes: jax.Array, scores: jax.Array, every: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the result of `predict_batch_with_aux` from decodes that are sorted best last."""
    return (decodes, {"scores": scores}) if every else (decodes[:, -1, :], {"scores": scores[:, -1]})


def get_input_vocabulary(model: BaseTransformerModel) -> Vocabulary:
    """Return the vocabulary of the model's inputs, for gin files."""
    return model.input_vocabulary


def get_output_vocabulary(model: BaseTransformerModel) -> Vocabulary:
    """Return the vocabulary of the model's outputs, for gin files."""
    return model.output_vocabulary


# --- T5X's metrics of a batch, for models that compute their own loss -------------------------------------------------


def compute_weighted_accuracy(
    logits: jax.Array, targets: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted number of targets with the largest logit, and the sum of the weights.

    Args:
      logits: float [..., vocab].
      targets: int [...].
      weights: [...]; None is all ones.
    """
    if logits.ndim != targets.ndim + 1:
        raise ValueError(f"logits need one more axis than targets; the shapes are {logits.shape} and {targets.shape}")
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
    return jnp.sum((jnp.argmax(logits, axis=-1) == targets) * weights), jnp.sum(weights)


def count_packed_examples(segment_ids: jax.Array) -> jax.Array:
    """Return the number of examples in packed rows, int [rows, length] with 0 for padding.

    Example:
      >>> int(count_packed_examples(jnp.array([[1, 1, 2, 0], [1, 1, 1, 1]])))
      3
    """
    starts = jnp.diff(segment_ids, axis=-1, prepend=0) != 0
    return jnp.sum(starts & (segment_ids != 0))


def compute_base_metrics(
    logits: jax.Array,
    targets: jax.Array,
    mask: jax.Array | None,
    loss: jax.Array,
    z_loss: jax.Array | None = None,
    segment_ids: Mapping[str, jax.Array] | None = None,
) -> Metrics:
    """Return T5X's metrics of a batch.

    Args:
      logits: float [batch, length, vocab].
      targets: int [batch, length].
      mask: weights of the targets; None is all ones.
      loss: total loss of the batch, including the z-loss.
      z_loss: z-loss contained in it.
      segment_ids: {feature: int [batch, length]} of packed rows.
    """
    right, tokens = compute_weighted_accuracy(logits, targets, mask)
    packed = [count_packed_examples(ids) for ids in (segment_ids or {}).values()]
    sequences = jnp.max(jnp.stack(packed)) if packed else jnp.asarray(targets.shape[0])
    devices = jax.device_count()
    metrics = {
        "accuracy": Average(right, tokens),
        "loss": AveragePerStep(total=loss),
        "loss_per_nonpadding_target_token": Average(loss, tokens),
        "loss_per_all_target_tokens": Average(loss, targets.size),
        "timing/seqs_per_second": TimeRate.from_model_output(sequences),
        "timing/steps_per_second": StepsPerTime.from_model_output(),
        "timing/seconds": Time(),
        "timing/seqs": Sum(sequences),
        "timing/seqs_per_second_per_core": TimeRate.from_model_output(sequences / devices),
        "timing/target_tokens_per_second": TimeRate.from_model_output(tokens),
        "timing/target_tokens_per_second_per_core": TimeRate.from_model_output(tokens / devices),
        "non_padding_fraction/loss_weights": Average(tokens, targets.size),
    }
    for name, ids in (segment_ids or {}).items():
        feature = name.removesuffix("_segment_ids")
        metrics[f"non_padding_fraction/{feature}"] = Average(jnp.sum(ids > 0), ids.size)
        metrics[f"effective_batch_size/{feature}"] = AveragePerStep(total=count_packed_examples(ids))
    if z_loss is not None:
        metrics |= {
            "z_loss": AveragePerStep(total=z_loss),
            "z_loss_per_all_target_tokens": Average(z_loss, targets.size),
            "cross_ent_loss": AveragePerStep(total=loss - z_loss),
            "cross_ent_loss_per_all_target_tokens": Average(loss - z_loss, targets.size),
        }
    return metrics


def compute_metrics(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    loss: jax.Array,
    weight_sum: jax.Array,
    additional_metrics: Metrics,
) -> Metrics:
    """Return accuracy, loss and target tokens of a batch, with `additional_metrics`."""
    right, _ = compute_weighted_accuracy(logits, targets, weights)
    metrics = {
        "cross_ent_loss": Sum(loss),
        "cross_ent_loss_per_nonpadding_target_token": Average(loss, weight_sum),
        "accuracy": Average(right, weight_sum),
    }
    return metrics | dict(additional_metrics)
