"""Models: a batch in; a loss, predictions or scores out."""

import abc
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x import decoding, losses
from t5x.data.feature_converters import DecoderFeatureConverter, EncDecFeatureConverter
from t5x.data.vocabularies import Vocabulary, as_vocabulary
from t5x.metrics.accumulators import Average, AveragePerStep, Metrics, Sum
from t5x.network import CACHES, DecoderWrapper, LogitFactors, Transformer, compute_params
from t5x.optimizers import Optimizer

Batch = Mapping[str, jax.Array]
Params = Mapping[str, Any]


class BaseTransformerModel(abc.ABC):
    """What a model over tokens has whatever its network: its vocabularies, loss, metrics and scores.

    Args:
      module: a Linen module with T5X's call convention.
      vocabularies: by the name of the task feature they belong to.
      optimizer_def: see `t5x.optimizers.Optimizer`; None for inference.
      decode_fn: see `t5x.decoding`.
      feature_converter_cls: makes model features of a task's features.
      label_smoothing, z_loss, loss_normalizing_factor: see `t5x.losses`.
      default_decoder_params: keyword arguments for `decode_fn`.
    """

    FEATURE_CONVERTER_CLS: type

    def __init__(
        self,
        module: nn.Module,
        vocabularies: Mapping[str, Vocabulary],
        optimizer_def: Optimizer | None,
        decode_fn: Callable,
        feature_converter_cls: type | None,
        label_smoothing: float,
        z_loss: float,
        loss_normalizing_factor: losses.LossNormalizingFactor,
        default_decoder_params: Mapping[str, Any] | None,
    ):
        self.module = module
        self.vocabularies = {feature: as_vocabulary(vocabulary) for feature, vocabulary in vocabularies.items()}
        self.optimizer_def = optimizer_def
        self.decode_fn = decode_fn
        if feature_converter_cls is not None:
            self.FEATURE_CONVERTER_CLS = feature_converter_cls
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.loss_normalizing_factor = loss_normalizing_factor
        self.default_decoder_params = dict(default_decoder_params or {})
        if isinstance(loss_normalizing_factor, str):
            losses.special_loss_normalizing_factor(loss_normalizing_factor)  # a wrong name is told now, not at step 1

    @property
    def input_vocabulary(self) -> Vocabulary:
        return self.vocabularies.get("inputs", self.output_vocabulary)

    @property
    def output_vocabulary(self) -> Vocabulary:
        return self.vocabularies["targets"]

    # -- for each kind of network --------------------------------------------------------------------------------------

    @abc.abstractmethod
    def input_shapes(self, task_feature_lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Shapes of one row of the features that `get_initial_variables` needs."""

    @abc.abstractmethod
    def get_initial_variables(self, rng: jax.Array, input_shapes: Mapping[str, tuple[int, ...]]) -> Any:
        """Fresh variables: `params`, and the logical axes of each in `params_axes`."""

    @abc.abstractmethod
    def compute_logits(
        self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None, mutable: Any = False
    ) -> Any:
        """Logits float32 [batch, targets, vocab] under teacher forcing; dropout is on where its key is given."""

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
        """Decodes a batch.

        Args:
          rng: for sampling: a key, or one for each row. `example_index`, int [batch], where the batch has it, is folded
            into the one; so an example gets the same sample in any batch.
          decoder_params: arguments for `decode_fn`, over those of the model. Numbers may be traced (alpha, temperature,
            topk, topp, eos_id, decode_rng …): other values then need no compilation.
          return_all_decodes: all `num_decodes` of them, best last, not the best alone.

        Returns:
          (tokens, {"scores"}): of the best decode, [batch, length] and [batch]; of all, with a dimension of decodes.
        """

    @property
    def keys_dropout_by_row(self) -> bool:
        """Whether the module takes `row_index`, the rows of the global batch, and so drops the same units however the
        batch is cut into microbatches."""
        return "row_index" in inspect.signature(type(self.module).__call__).parameters

    def _row_index(self, batch: Batch) -> dict[str, jax.Array]:
        return {"row_index": batch["row_index"]} if self.keys_dropout_by_row and "row_index" in batch else {}

    def _decode_options(
        self, batch: Batch, rng: jax.Array | None, decoder_params: Mapping[str, Any] | None, num_decodes: int
    ) -> dict[str, Any]:
        """Arguments for `decode_fn`: of this call, of the model, and what both leave open."""
        options = {"num_decodes": num_decodes, "eos_id": self.output_vocabulary.eos_id, "decode_rng": rng}
        options |= self.default_decoder_params | dict(decoder_params or {})
        if "example_index" in batch:
            options["decode_rng"] = decoding.example_keys(options["decode_rng"], batch["example_index"])
        scanned = getattr(self.module, "scan_layers", False) or getattr(
            getattr(self.module, "config", None), "scan_layers", False
        )
        return options | {"cache_offset": int(scanned)}

    # -- training ------------------------------------------------------------------------------------------------------

    def loss_fn(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> tuple[jax.Array, Metrics]:
        """The loss to minimise, and the metrics of this batch.

        Where the batch is a part of a larger one, `loss_scale` in it (see `with_loss_scale`) keeps the normalisation
        that of the whole.
        """
        scale = self.with_loss_scale(batch)["loss_scale"]
        loss, tokens = self._loss_of_tokens(params, batch, scale, dropout_rng)
        return loss, self._metrics(batch, tokens, loss, jnp.sum(tokens.z_loss * scale))

    def _loss_of_tokens(
        self, params: Params, batch: Batch, weights: jax.Array, dropout_rng: jax.Array | None
    ) -> tuple[jax.Array, losses.TokenLosses]:
        """The weighted sum of the tokens' losses, and these."""
        targets = batch["decoder_target_tokens"]
        options = {"z_loss": self.z_loss, "label_smoothing": self.label_smoothing}
        if (factors := self._logit_factors(params, batch, dropout_rng)) is not None:
            options |= {"scale": factors.scale}
            return losses.projected_cross_entropy(factors.hidden, factors.kernel, targets, weights, **options)
        logits = self.compute_logits(params, batch, dropout_rng)
        per_token, z_part = losses.cross_entropy(logits, targets, **options)
        is_right = jnp.argmax(logits, axis=-1) == targets
        return jnp.sum(per_token * weights), losses.TokenLosses(per_token, z_part, is_right)

    def _logit_factors(self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None) -> LogitFactors | None:
        """Instead of all logits at once; None where a network, or `compute_logits`, is not ours."""
        own = type(self).compute_logits.__module__ == __name__ and "compute_logits" not in vars(self)
        if not own or type(self.module) not in (Transformer, DecoderWrapper):
            return None
        return self._apply(params, batch, dropout_rng, as_factors=True)

    def with_loss_scale(self, batch: Batch) -> Batch:
        """The batch with `loss_scale`, what each target token's loss is multiplied with."""
        if "loss_scale" in batch:
            return batch
        return {**batch, "loss_scale": losses.loss_scale(self.loss_normalizing_factor, batch)}

    def eval_fn(self, params: Params, batch: Batch) -> tuple[jax.Array, Metrics]:
        """The loss and metrics without dropout."""
        return self.loss_fn(params, batch, dropout_rng=None)

    def _metrics(self, batch: Batch, of_tokens: losses.TokenLosses, loss: jax.Array, z_loss: jax.Array) -> Metrics:
        targets = batch["decoder_target_tokens"]
        weights = batch.get("decoder_loss_weights")
        weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
        tokens, places = jnp.sum(weights), targets.size
        total, z_total = jnp.sum(of_tokens.loss * weights), jnp.sum(of_tokens.z_loss * weights)
        right = jnp.sum(of_tokens.is_right * weights)
        metrics = {
            "loss": AveragePerStep(loss),
            "z_loss": AveragePerStep(z_loss),
            "cross_ent_loss": AveragePerStep(loss - z_loss),
            "accuracy": Average(right, tokens),
            "loss_per_nonpadding_target_token": Average(total, tokens),
            "loss_per_all_target_tokens": Average(total, places),
            "z_loss_per_all_target_tokens": Average(z_total, places),
            "cross_ent_loss_per_all_target_tokens": Average(total - z_total, places),
            "target_tokens": Sum(tokens),
            "non_padding_fraction/loss_weights": Average(tokens, places),
        }
        real = {k: v for k, v in batch.items() if k.endswith("_tokens") and k != "decoder_input_tokens"}
        counts = {k: (jnp.sum(v > 0), v.size) for k, v in real.items()}
        metrics |= {f"non_padding_fraction/{k}": Average(n, size) for k, (n, size) in counts.items()}
        metrics["non_padding_fraction/overall"] = Average(
            sum(n for n, _ in counts.values()), sum(size for _, size in counts.values())
        )
        return metrics

    # -- inference -----------------------------------------------------------------------------------------------------

    def predict_batch(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
    ) -> jax.Array:
        """Predicted tokens int32 [batch, length]; the length is that of `decoder_input_tokens`."""
        return self.predict_batch_with_aux(params, batch, rng=rng, decoder_params=decoder_params)[0]

    def score_batch(self, params: Params, batch: Batch, return_intermediates: bool = False) -> Any:
        """Log likelihood of each row's targets, float32 [batch].

        Args:
          return_intermediates: give (scores, tree) with what the network sowed into `intermediates`, and in it under
            `decoder` the `target_tokens`, `loss_weights` and `token_scores` (weighted log probabilities), each [batch,
            targets] and, as all that is sown, in a tuple.
        """
        targets, weights = batch["decoder_target_tokens"], batch.get("decoder_loss_weights")
        weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
        if not return_intermediates:
            return -jnp.sum(self._token_losses(params, batch) * weights, axis=-1)
        logits, changed = self.compute_logits(params, batch, mutable=["intermediates"])
        token_scores = -losses.cross_entropy(logits, targets)[0] * weights
        sown = changed.get("intermediates", {})
        added = {"target_tokens": (targets,), "loss_weights": (weights,), "token_scores": (token_scores,)}
        return jnp.sum(token_scores, axis=-1), {**sown, "decoder": {**sown.get("decoder", {}), **added}}

    def _token_losses(self, params: Params, batch: Batch) -> jax.Array:
        """Cross entropy of each target token, [batch, targets]."""
        targets = batch["decoder_target_tokens"]
        if (factors := self._logit_factors(params, batch)) is None:
            return losses.cross_entropy(self.compute_logits(params, batch), targets)[0]
        return losses.projected_losses(factors.hidden, factors.kernel, targets, scale=factors.scale).loss


class EncoderDecoderModel(BaseTransformerModel):
    """An encoder-decoder network with its vocabularies, loss and decoding.

    Args:
      module: a Linen module with T5X's call convention (`__call__`, `encode`, `decode`).
      input_vocabulary, output_vocabulary: of the features `inputs` and `targets`.
      optimizer_def, decode_fn …: see `BaseTransformerModel`.
    """

    FEATURE_CONVERTER_CLS = EncDecFeatureConverter

    def __init__(
        self,
        module: nn.Module,
        input_vocabulary: Vocabulary,
        output_vocabulary: Vocabulary,
        optimizer_def: Optimizer | None,
        decode_fn: Callable = decoding.beam_search,
        feature_converter_cls: type | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: losses.LossNormalizingFactor = None,
        default_decoder_params: Mapping[str, Any] | None = None,
    ):
        super().__init__(
            module, {"inputs": input_vocabulary, "targets": output_vocabulary}, optimizer_def, decode_fn,
            feature_converter_cls, label_smoothing, z_loss, loss_normalizing_factor, default_decoder_params,
        )  # fmt: skip

    def input_shapes(self, task_feature_lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        inputs, targets = task_feature_lengths["inputs"], task_feature_lengths["targets"]
        return {"encoder_input_tokens": (1, inputs), "decoder_input_tokens": (1, targets)}

    def get_initial_variables(self, rng: jax.Array, input_shapes: Mapping[str, tuple[int, ...]]) -> Any:
        tokens = {name: jnp.ones(shape, jnp.int32) for name, shape in input_shapes.items()}
        inputs, targets = tokens["encoder_input_tokens"], tokens["decoder_input_tokens"]
        return self.module.init({"params": rng}, inputs, targets, targets, enable_dropout=False)

    def compute_logits(
        self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None, mutable: Any = False
    ) -> Any:
        return self._apply(params, batch, dropout_rng, mutable=mutable)

    def _apply(self, params: Params, batch: Batch, dropout_rng: jax.Array | None, **options: Any) -> Any:
        packed = ("encoder_segment_ids", "decoder_segment_ids", "encoder_positions", "decoder_positions")
        return self.module.apply(
            {"params": params},
            batch["encoder_input_tokens"],
            batch["decoder_input_tokens"],
            batch["decoder_target_tokens"],
            **{name: batch.get(name) for name in packed},
            **self._row_index(batch),
            enable_dropout=dropout_rng is not None,
            rngs=None if dropout_rng is None else {"dropout": dropout_rng},
            **options,
        )

    def predict_batch_with_aux(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
        prompt_with_targets: bool = False,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As of every model.

        Args:
          prompt_with_targets: the decodes begin with the row's targets, without their EOS.
        """
        inputs = batch["encoder_input_tokens"]
        options = self._decode_options(batch, rng, decoder_params, num_decodes)
        prompts = batch["decoder_input_tokens"].astype(jnp.int32)
        empty = jnp.zeros_like(prompts)
        prompts = jnp.where(prompts == options["eos_id"], 0, prompts) if prompt_with_targets else empty
        variables = {"params": compute_params(self.module, params)}  # not anew at every step
        encoded = self.module.apply(variables, inputs, enable_dropout=False, method=self.module.encode)
        decode = functools.partial(
            self.module.apply, enable_dropout=False, decode=True, method=self.module.decode,
        )  # fmt: skip
        # The pass that creates the caches; the compiler drops what it computes besides them.
        _, caches = decode(variables, encoded, inputs, empty, empty, mutable=list(CACHES))
        caches = dict(caches)
        cache = caches.pop("cache", {})
        if "cross_cache" not in caches:  # without our cross-attention, where beams share what the encoder gave
            encoded, inputs = (jnp.repeat(x, options["num_decodes"], axis=0) for x in (encoded, inputs))

        def tokens_to_logits(state: decoding.DecodingState) -> tuple[jax.Array, Any]:
            logits, changed = decode(
                {**variables, **caches, "cache": state.cache}, encoded, inputs, state.cur_token, state.cur_token,
                max_decode_length=empty.shape[1], mutable=["cache"],
            )  # fmt: skip
            return logits[:, -1, :], changed.get("cache", {})

        decodes, scores = self.decode_fn(inputs=prompts, cache=cache, tokens_to_logits=tokens_to_logits, **options)
        if return_all_decodes:
            return decodes, {"scores": scores}
        return decodes[:, -1, :], {"scores": scores[:, -1]}

    def score_batch(
        self, params: Params, batch: Batch, return_intermediates: bool = False, first_logits: bool = False
    ) -> Any:
        """As of every model.

        Args:
          first_logits: instead, the logits of each row's target tokens at the first position, float32 [batch, targets],
            without looking at what follows: with the targets `true` and `false`, what monoT5 ranks by.
        """
        if not first_logits:
            return super().score_batch(params, batch, return_intermediates)
        return self.first_logits(params, batch["encoder_input_tokens"], batch["decoder_target_tokens"])

    def first_logits(
        self,
        params: Params,
        inputs: jax.Array,
        tokens: jax.Array,
        dropout_rng: jax.Array | None = None,
        **options: jax.Array,
    ) -> jax.Array:
        """Logits of `tokens`, int [batch, n], at the first position of the output, float32 [batch, n].

        Args:
          inputs: int [batch, length].
          options: further arguments of the module's `encode` and `decode`.
        """
        start = jnp.zeros((inputs.shape[0], 1), jnp.int32)
        only = "logits_of" in inspect.signature(type(self.module).decode).parameters
        options |= {"enable_dropout": dropout_rng is not None}

        def first_position(module: nn.Module) -> jax.Array:
            wanted = {"logits_of": tokens} if only else {}
            encoded = module.encode(inputs, **options)
            return module.decode(encoded, inputs, start, jnp.ones_like(start), **options, **wanted)[:, 0]

        rngs = None if dropout_rng is None else {"dropout": dropout_rng}
        logits = self.module.apply({"params": params}, rngs=rngs, method=first_position)
        return logits if only else jnp.take_along_axis(logits, tokens, axis=-1)


class DecoderOnlyModel(BaseTransformerModel):
    """A decoder alone: a causal language model, or a prefix LM over `inputs` and `targets`.

    Args:
      module: a Linen module with T5X's call convention (`__call__` with `prefill`).
      vocabulary: of `targets`, and of `inputs` where there are any.
      inputs_bidirectional_attention: the inputs see each other whole (a prefix LM); False: everything is causal.
      optimizer_def, decode_fn …: see `BaseTransformerModel`.
    """

    FEATURE_CONVERTER_CLS = DecoderFeatureConverter

    def __init__(
        self,
        module: nn.Module,
        vocabulary: Vocabulary,
        optimizer_def: Optimizer | None,
        decode_fn: Callable = decoding.temperature_sample,
        inputs_bidirectional_attention: bool = False,
        feature_converter_cls: type | None = None,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        loss_normalizing_factor: losses.LossNormalizingFactor = None,
        default_decoder_params: Mapping[str, Any] | None = None,
    ):
        super().__init__(
            module, {"targets": vocabulary}, optimizer_def, decode_fn, feature_converter_cls, label_smoothing, z_loss,
            loss_normalizing_factor, default_decoder_params,
        )  # fmt: skip
        self.inputs_bidirectional_attention = inputs_bidirectional_attention

    def input_shapes(self, task_feature_lengths: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        return {"decoder_input_tokens": (1, sum(task_feature_lengths.values()))}

    def get_initial_variables(self, rng: jax.Array, input_shapes: Mapping[str, tuple[int, ...]]) -> Any:
        tokens = jnp.ones(input_shapes["decoder_input_tokens"], jnp.int32)
        return self.module.init({"params": rng}, tokens, tokens, enable_dropout=False)

    def compute_logits(
        self, params: Params, batch: Batch, dropout_rng: jax.Array | None = None, mutable: Any = False
    ) -> Any:
        return self._apply(params, batch, dropout_rng, mutable=mutable)

    def _apply(self, params: Params, batch: Batch, dropout_rng: jax.Array | None, **options: Any) -> Any:
        return self.module.apply(
            {"params": params},
            batch["decoder_input_tokens"],
            batch["decoder_target_tokens"],
            decoder_segment_ids=batch.get("decoder_segment_ids"),
            decoder_positions=batch.get("decoder_positions"),
            decoder_causal_attention=self._prefix(batch),
            **self._row_index(batch),
            enable_dropout=dropout_rng is not None,
            rngs=None if dropout_rng is None else {"dropout": dropout_rng},
            **options,
        )

    def predict_batch_with_aux(
        self,
        params: Params,
        batch: Batch,
        rng: jax.Array | None = None,
        decoder_params: Mapping[str, Any] | None = None,
        return_all_decodes: bool = False,
        num_decodes: int = 1,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """As of every model; the tokens are those after the inputs.

        `decoder_causal_attention` of the batch marks the start token and the inputs in `decoder_input_tokens`; without
        it there are no inputs. They are read into the cache in one pass, and each row goes on from its own position.
        """
        shifted = batch["decoder_input_tokens"]
        inside = batch.get("decoder_causal_attention")
        if inside is None:
            inside = jnp.zeros(shifted.shape, jnp.int32).at[:, 0].set(1)
        inputs = jnp.where(inside > 0, shifted, 0)
        lengths = jnp.maximum(jnp.sum(inside, axis=1) - 1, 0).astype(jnp.int32)
        params = compute_params(self.module, params)  # not anew at every step
        apply = functools.partial(self.module.apply, enable_dropout=False, mutable=["cache"])
        # The prefix stands for the targets too: the start token is 0, yet it is no padding.
        prefix = inside if self.inputs_bidirectional_attention else None
        _, filled = apply(
            {"params": params}, inputs, inside, decoder_causal_attention=prefix, prefill=True, prefill_lengths=lengths
        )

        def tokens_to_logits(state: decoding.DecodingState) -> tuple[jax.Array, Any]:
            logits, changed = apply(
                {"params": params, "cache": state.cache}, state.cur_token, state.cur_token, decode=True,
                max_decode_length=inputs.shape[1],
            )  # fmt: skip
            return logits[:, -1, :], changed["cache"]

        decodes, scores = self.decode_fn(
            inputs=inputs,
            cache=filled["cache"],
            tokens_to_logits=tokens_to_logits,
            initial_index=lengths,
            **self._decode_options(batch, rng, decoder_params, num_decodes),
        )
        decodes = decoding.remove_prefix(decodes, lengths)
        if return_all_decodes:
            return decodes, {"scores": scores}
        return decodes[:, -1, :], {"scores": scores[:, -1]}

    def _prefix(self, batch: Batch) -> jax.Array | None:
        return batch.get("decoder_causal_attention") if self.inputs_bidirectional_attention else None


def get_input_vocabulary(model: BaseTransformerModel) -> Vocabulary:
    """The vocabulary of the model's inputs, for gin files."""
    return model.input_vocabulary


def get_output_vocabulary(model: BaseTransformerModel) -> Vocabulary:
    """The vocabulary of the model's outputs, for gin files."""
    return model.output_vocabulary
