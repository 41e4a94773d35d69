"""Retrieval: two texts are encoded, and each must find its partner in the batch."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x import data, metrics, models
from t5x.examples.t5 import layers


class TwoTowerConverter(data.EncDecFeatureConverter):
    """Both sides as encoder inputs."""

    def get_model_feature_lengths(self, task_feature_lengths):
        return {"left_tokens": task_feature_lengths["inputs"], "right_tokens": task_feature_lengths["targets"]}

    def convert_row(self, examples, task_feature_lengths, *, trim=True):
        row = super().convert_row(examples, task_feature_lengths, trim=trim)
        return {"left_tokens": row["encoder_input_tokens"], "right_tokens": row["decoder_target_tokens"]}


class DualEncoder(nn.Module):
    features: int = 8

    @nn.compact
    def __call__(self, left_tokens, right_tokens):
        embed = layers.Embed(384, self.features, name="token_embedder")
        project = layers.DenseGeneral(self.features, kernel_axes=("embed", "mlp"), name="project")

        def encode(tokens):
            mask = (tokens > 0)[..., None]
            mean = jnp.sum(embed(tokens) * mask, axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)
            x = project(mean)
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

        return encode(left_tokens), encode(right_tokens)


class DualEncoderModel(models.BaseModel):
    FEATURE_CONVERTER_CLS = TwoTowerConverter

    def __init__(self, module, optimizer_def, temperature=0.1):
        super().__init__(optimizer_def)
        self.module, self._temperature = module, temperature

    def get_initial_variables(self, rng, input_shapes, input_types=None):
        inputs = [jnp.ones(input_shapes[name], jnp.int32) for name in ("left_tokens", "right_tokens")]
        return self.module.init(rng, *inputs)

    def _similarities(self, params, batch):
        left, right = self.module.apply({"params": params}, batch["left_tokens"], batch["right_tokens"])
        return left, right, left @ right.T / self._temperature

    def loss_fn(self, params, batch, dropout_rng):
        _, _, logits = self._similarities(params, batch)
        right = jnp.arange(logits.shape[0])
        loss = -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))
        found = {
            "loss": metrics.AveragePerStep.from_model_output(loss),
            "recall_at_1": metrics.Average.from_model_output(jnp.argmax(logits, axis=-1) == right),
        }
        return loss, found

    def predict_batch_with_aux(self, params, batch, rng=None):
        left, right, _ = self._similarities(params, batch)
        return left, {"right": right}

    def score_batch(self, params, batch, return_intermediates=False):
        return jnp.diagonal(self._similarities(params, batch)[2])
