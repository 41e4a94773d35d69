"""What public projects for T5X do beyond the eight of `test_projects.py`, each as small as it can be."""

from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gin import resource_reader

import t5x
from t5x import adafactor, checkpoints, losses, models, optimizers, partitioning, trainer, utils
from t5x.data import ByteVocabulary, EncDecFeatureConverter
from t5x.decoding import greedy_decode
from t5x.examples.t5 import layers, network
from t5x.interactive_model import _extract_tokens_and_aux_values
from tests.support import tiny

CONFIG = network.T5Config(
    vocab_size=384, emb_dim=8, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, head_dim=4, mlp_dim=16,
    mlp_activations=("gelu", "linear"), dropout_rate=0.1,
)  # fmt: skip


class OwnTowers(network.Transformer):
    """As networks with another decoder or head are written: `setup` is theirs, the rest is inherited."""

    def setup(self):
        self.shared_embedding = layers.Embed(
            self.config.vocab_size, self.config.emb_dim, embedding_init=nn.initializers.normal(1.0),
            name="token_embedder",
        )  # fmt: skip
        self.encoder = network.Encoder(self.config, self.shared_embedding)
        self.decoder = network.Decoder(self.config, self.shared_embedding)


def model_of(module, cls=models.EncoderDecoderModel, optimizer=None, **options) -> models.EncoderDecoderModel:
    return cls(module, ByteVocabulary(), ByteVocabulary(), optimizer or adafactor.Adafactor(), **options)


@pytest.fixture(scope="module")
def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs, targets = (rng.integers(3, 300, (4, length), np.int32) for length in (7, 5))
    inputs[:2, 4:], targets[2:, 3:] = 0, 0
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    return {
        "encoder_input_tokens": inputs, "decoder_input_tokens": shifted, "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }  # fmt: skip


def state_of(model, batch) -> tuple[utils.TrainStateInitializer, t5x.train_state.TrainState]:
    shapes = {name: x.shape for name, x in batch.items()}
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    initializer = utils.TrainStateInitializer(
        optimizer_def=model.optimizer_def, init_fn=model.get_initial_variables, input_shapes=shapes,
        partitioner=partitioner,
    )  # fmt: skip
    return initializer, tiny.random_state(initializer)


@pytest.mark.slow
def test_towers_of_a_subclass_compute_the_same(batch):
    theirs, ours = (model_of(of(CONFIG), decode_fn=greedy_decode) for of in (OwnTowers, network.Transformer))
    params = tiny.random_params_of(theirs, {name: x.shape for name, x in batch.items()})
    packed = {**batch, "encoder_segment_ids": np.ones((4, 7), int), "decoder_segment_ids": np.ones((4, 5), int)}
    found, expected = (
        jax.jit(lambda params, of=model: (of.score_batch(params, batch), of.predict_batch(params, batch)))(params)
        for model in (theirs, ours)
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(jax.jit(theirs.score_batch)(params, packed), found[0], rtol=1e-5)


class Lists(models.EncoderDecoderModel):
    """Ranks lists: they are folded into the batch before the network, as listwise losses need it."""

    def get_initial_variables(self, rng, input_shapes, input_types=None):
        fold = lambda shape: (shape[0] * shape[1], *shape[2:])
        inputs = ("encoder_input_tokens", "decoder_input_tokens")
        return super().get_initial_variables(rng, {**input_shapes, **{k: fold(input_shapes[k]) for k in inputs}})

    def _compute_logits(self, params, batch, *args, **kwargs):
        tokens = {name: x.reshape(-1, x.shape[-1]) for name, x in batch.items() if name.endswith("_tokens")}
        return super()._compute_logits(params, {**batch, **tokens}, *args, **kwargs)

    def loss_fn(self, params, batch, dropout_rng):
        logits = self._compute_logits(params, batch, dropout_rng)
        targets = batch["decoder_target_tokens"]
        loss, _, _ = losses.compute_weighted_cross_entropy(logits, targets.reshape(-1, targets.shape[-1]))
        return loss, {"loss": t5x.metrics.Sum(loss)}


@pytest.mark.slow
@pytest.mark.parametrize("module", [network.Transformer, OwnTowers])
def test_lists_are_folded_into_the_batch(batch, module):
    model = model_of(module(CONFIG), Lists, optimizers.sgd())
    lists = {name: np.repeat(x[:, None], 3, axis=1) for name, x in batch.items()}
    _, state = state_of(model, lists)
    step = jax.jit(trainer.train_with_lr, static_argnames=["model", "num_microbatches"])
    for_each = [
        step(state, lists, jnp.float32(0.01), jax.random.PRNGKey(1), model=model, num_microbatches=count)
        for count in (1, 2)
    ]
    (one, _), (two, metrics) = for_each
    assert np.isfinite(metrics["loss"].compute())
    embedding = lambda state: state.params["token_embedder"]["embedding"]
    assert not np.array_equal(embedding(one), embedding(state))
    if module is network.Transformer:  # dropout is keyed by the row, of which lists have several
        np.testing.assert_allclose(embedding(one), embedding(two), atol=1e-5)


@pytest.mark.slow
def test_an_encoder_is_restored_from_a_whole_model(batch, tmp_path):
    _, state = state_of(model_of(network.Transformer(CONFIG)), batch)
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    checkpoints.Checkpointer(state, partitioner, str(tmp_path)).save(state)

    class EncoderOnly(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = layers.Embed(CONFIG.vocab_size, CONFIG.emb_dim, name="token_embedder")
            return network.Encoder(CONFIG, embed, name="encoder")(tokens, None, deterministic=True)

    tokens = batch["encoder_input_tokens"][2:]
    initializer = utils.TrainStateInitializer(
        optimizer_def=None, input_shapes={"tokens": tokens.shape}, partitioner=partitioner,
        init_fn=lambda rng, input_shapes: EncoderOnly().init(rng, jnp.ones(input_shapes["tokens"], jnp.int32)),
    )  # fmt: skip
    cfg = utils.RestoreCheckpointConfig(path=f"{tmp_path}/checkpoint_0", mode="specific")
    with pytest.raises(t5x.errors.UserError, match="unexpected"):
        initializer.from_checkpoint([cfg])
    cfg.strict = False
    ((restored, path),) = initializer.from_checkpoints([cfg])
    assert path == f"{tmp_path}/checkpoint_0"
    network_of = network.Transformer(CONFIG)
    expected = network_of.apply({"params": state.params}, tokens, enable_dropout=False, method="encode")
    np.testing.assert_allclose(EncoderOnly().apply({"params": restored.params}, tokens), expected, atol=1e-5)


def test_converters_take_examples():
    examples = [{"inputs": [5, 6, 1], "targets": [7, 1]}, {"inputs": [8, 1], "targets": [9, 4, 1]}]
    first, second = EncDecFeatureConverter(pack=False)(examples, {"inputs": 4, "targets": 3})
    np.testing.assert_array_equal(first["encoder_input_tokens"], [5, 6, 1, 0])
    np.testing.assert_array_equal(second["decoder_input_tokens"], [0, 9, 4])


def test_outputs_are_sorted_by_their_index():
    outputs, aux = _extract_tokens_and_aux_values(([(2, [5]), (0, [6])], {"scores": [-1.0, -2.0]}))
    assert outputs == [[6], [5]] and aux == {"scores": [-2.0, -1.0]}
    assert _extract_tokens_and_aux_values([(1, 0.5), (0, 0.25)]) == ([0.25, 0.5], {})


def test_gin_finds_the_files_of_the_package():
    root = Path(t5x.__file__).parent
    files = [str(path.relative_to(root.parent)) for path in root.rglob("*.gin")]
    assert "t5x/examples/t5/t5_1_1/small.gin" in files
    assert [file for file in files if not resource_reader.system_path_file_exists(file)] == []


def test_partitioners_keep_their_arguments():
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    assert (partitioner._num_partitions, partitioner._model_parallel_submesh) == (1, None)
