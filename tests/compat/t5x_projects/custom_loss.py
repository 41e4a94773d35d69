"""A loss that weights targets by their rarity, with a metric of its own."""

import jax.numpy as jnp

from t5x import losses, metrics, models


class RarityModel(models.EncoderDecoderModel):
    """Common tokens (digits below `rare`) count half."""

    def __init__(self, *args, rare=60, **kwargs):
        super().__init__(*args, **kwargs)
        self._rare = rare

    def loss_fn(self, params, batch, dropout_rng):
        logits = self._compute_logits(params, batch, dropout_rng)
        factor, weights = losses.get_loss_normalizing_factor_and_weights(self._loss_normalizing_factor, batch)
        targets = batch["decoder_target_tokens"]
        rare = jnp.where(targets < self._rare, 0.5, 1.0)
        loss, z_loss, _ = losses.compute_weighted_cross_entropy(
            logits,
            targets=targets,
            weights=weights * rare,
            label_smoothing=self._label_smoothing,
            z_loss=self._z_loss,
            loss_normalizing_factor=factor,
        )
        found = self._compute_metrics(logits=logits, targets=targets, mask=weights, loss=loss, z_loss=z_loss)
        return loss, found

    def _compute_metrics(self, logits, targets, mask, loss, z_loss=None):
        found = models.compute_base_metrics(logits=logits, targets=targets, mask=mask, loss=loss, z_loss=z_loss)
        found["rare_targets"] = metrics.Sum.from_model_output((targets >= self._rare) * mask)
        found["largest_logit"] = metrics.AveragePerStep.from_model_output(jnp.max(logits))
        return found
