"""What models have in common."""

import abc
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x import decoding, losses
from t5x.data.vocabularies import Vocabulary, as_vocabulary
from t5x.metrics.accumulators import Average, AveragePerStep, Metrics, Sum
from t5x.network import LogitFactors, is_ours
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
    _own_compute_logits: Callable | None = None  # of our classes, to see whether a subclass has another

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
        cls = type(self)
        own = cls.compute_logits is cls._own_compute_logits and "compute_logits" not in vars(self)
        if not own or not is_ours(self.module):
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


def decoded(decodes: jax.Array, scores: jax.Array, every: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The best, which stands last, or all."""
    return (decodes, {"scores": scores}) if every else (decodes[:, -1, :], {"scores": scores[:, -1]})


def get_input_vocabulary(model: BaseTransformerModel) -> Vocabulary:
    """The vocabulary of the model's inputs, for gin files."""
    return model.input_vocabulary


def get_output_vocabulary(model: BaseTransformerModel) -> Vocabulary:
    """The vocabulary of the model's outputs, for gin files."""
    return model.output_vocabulary
