"""Classification of sequences of vectors: a feature converter, a network and a model for float inputs of rank 3."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax.linen import partitioning as nn_partitioning

from t5x import data, models
from t5x.examples.t5 import layers


class VectorConverter(data.FeatureConverter):
    """`inputs` [length, width] of floats; `targets` of tokens."""

    TASK_FEATURES = ("inputs", "targets")

    def get_model_feature_lengths(self, task_feature_lengths):
        lengths = task_feature_lengths
        return {"encoder_inputs": lengths["inputs"], "decoder_target_tokens": lengths["targets"]}

    def convert_row(self, examples, task_feature_lengths, *, trim=True):
        lengths = task_feature_lengths
        inputs = np.zeros((lengths["inputs"], 6), np.float32)
        targets = np.zeros(lengths["targets"], np.int32)
        for example in examples:
            inputs[: len(example["inputs"])] = example["inputs"]
            targets[: len(example["targets"])] = example["targets"]
        return {
            "encoder_inputs": inputs,
            "decoder_target_tokens": targets,
            "decoder_input_tokens": data.feature_converters.make_autoregressive_inputs(targets),
            "decoder_loss_weights": (targets > 0).astype(np.int32),
        }


class VectorNetwork(nn.Module):
    """Projects and averages vectors; one logit per token and position."""

    vocab_size: int = 16
    features: int = 8

    @nn.compact
    def __call__(self, encoder_inputs, decoder_input_tokens, decoder_target_tokens, *, enable_dropout=True):
        x = layers.DenseGeneral(self.features, kernel_axes=("embed", "mlp"), name="project")(encoder_inputs)
        x = layers.LayerNorm(name="norm")(jnp.mean(nn.gelu(x), axis=1))
        position = nn_partitioning.param_with_axes(
            "position", nn.initializers.normal(1.0), (decoder_target_tokens.shape[1], self.features), jnp.float32,
            axes=("length", "embed"),
        )  # fmt: skip
        x = x[:, None] + position[None]
        return layers.DenseGeneral(self.vocab_size, kernel_axes=("embed", "vocab"), name="logits_dense")(x)


class VectorModel(models.BaseTransformerModel):
    FEATURE_CONVERTER_CLS = VectorConverter

    def get_initial_variables(self, rng, input_shapes, input_types=None):
        inputs = jnp.ones(input_shapes["encoder_inputs"], input_types["encoder_inputs"])
        assert inputs.ndim == 3 and inputs.dtype == jnp.float32
        tokens = jnp.ones(input_shapes["decoder_target_tokens"], input_types["decoder_target_tokens"])
        return self.module.init(rng, inputs, tokens, tokens, enable_dropout=False)

    def _compute_logits(self, params, batch, dropout_rng=None, mutable=False, other_variables=None):
        inputs = (batch["encoder_inputs"], batch["decoder_input_tokens"], batch["decoder_target_tokens"])
        return self.module.apply({"params": params}, *inputs, enable_dropout=dropout_rng is not None, mutable=mutable)

    def predict_batch_with_aux(self, params, batch, rng=None, **kwargs):
        logits = self._compute_logits(params, batch)
        return jnp.argmax(logits, axis=-1), {"scores": jnp.sum(jnp.max(logits, axis=-1), axis=-1)}
