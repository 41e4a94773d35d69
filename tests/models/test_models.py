"""Models with third-party modules, and their gradients."""

import dataclasses
import functools
import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen.partitioning import param_with_axes

from t5x.checkpoints.model_description import describe
from t5x.data import PassThroughVocabulary
from t5x.decoding import beam_search, greedy_decode
from t5x.models import DecoderOnlyModel, EncoderDecoderModel
from t5x.network import DecoderWrapper, T5Config, Transformer, TransformerConfig
from t5x.optimizers.adafactor import Adafactor
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout
from tests.support import tiny


class Counter(nn.Module):
    @nn.compact
    def __call__(self):
        steps = self.variable("cache", "steps", lambda: jnp.zeros((), jnp.int32))
        steps.value += 1


class Bag(nn.Module):
    """A third-party module with T5X's call convention: predicts from the input words and the last token."""

    vocab: int = 31
    width: int = 16

    def setup(self):
        shape, init = (self.vocab, self.width), nn.initializers.normal(0.5)
        self.table = param_with_axes("table", init, shape, axes=("vocab", "embed"), module=self)
        self.head = self.param("head", nn.initializers.normal(0.5), (self.width, self.vocab))  # without logical axes
        self.counter = Counter()

    def encode(self, encoder_input_tokens, encoder_segment_ids=None, enable_dropout=True):
        real = (encoder_input_tokens > 0)[..., None]
        return jnp.where(real, self.table[encoder_input_tokens], 0).sum(1)

    def decode(
        self, encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, encoder_segment_ids=None,
        decoder_segment_ids=None, decoder_positions=None, enable_dropout=True, decode=False, max_decode_length=None,
    ):  # fmt: skip
        if decode:
            self.counter()
        return (encoded[:, None] + self.table[decoder_input_tokens]) @ self.head

    def __call__(
        self, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, encoder_segment_ids=None,
        decoder_segment_ids=None, encoder_positions=None, decoder_positions=None, *, enable_dropout=True, decode=False,
    ):  # fmt: skip
        encoded = self.encode(encoder_input_tokens)
        return self.decode(encoded, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens, decode=decode)


@pytest.mark.slow
def test_a_third_party_module_trains_predicts_and_scores():
    vocabulary = PassThroughVocabulary(31, eos_id=1)
    model = EncoderDecoderModel(Bag(), vocabulary, vocabulary, Adafactor(), greedy_decode)
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 9, "targets": 7}))
    assert layout.axes == {"table": ("vocab", "embed"), "head": None}
    state, rng, schedule = layout.init(jax.random.key(0)), jax.random.key(1), lambda step: jnp.float32(0.1)
    trainer = tiny.trainer(layout, state, rng, schedule)
    losses = [float(trainer.step(tiny.batch())["loss_per_nonpadding_target_token"].compute()) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    params, batch = trainer.train_state.params, tiny.batch()
    tokens = jax.jit(model.predict_batch)(params, batch)
    logits = jax.jit(model.compute_logits)(params, batch)
    np.testing.assert_array_equal(tokens[:, 0], jnp.argmax(logits[:, 0], -1))
    assert (jax.jit(model.score_batch)(params, batch) < 0).all()
    model.decode_fn = beam_search
    beams = jax.jit(functools.partial(model.predict_batch_with_aux, return_all_decodes=True, num_decodes=3))
    (tokens, aux), alone = beams(params, batch), {name: value[2:3] for name, value in batch.items()}
    np.testing.assert_array_equal(tokens[2:3], beams(params, alone)[0])
    assert tokens.shape == (4, 3, 7) and (jnp.diff(aux["scores"]) >= 0).all()


class Doubled(Transformer):
    """A subclass of our network that does not support logit factors."""

    def decode(self, *args, **kwargs):
        return 2 * super().decode(*args, **kwargs)


def tiny_model(network=Transformer, **changes) -> tuple[EncoderDecoderModel, Any, dict[str, np.ndarray]]:
    config = T5Config(
        vocab_size=31, emb_dim=16, num_heads=2, head_dim=8, mlp_dim=32, num_encoder_layers=1, num_decoder_layers=1,
        dropout_rate=0.0, **changes,
    )  # fmt: skip
    vocabulary = PassThroughVocabulary(31, eos_id=1)
    model = EncoderDecoderModel(network(config), vocabulary, vocabulary, None)
    rng = np.random.default_rng(0)
    inputs, targets = (rng.integers(2, 31, (3, n), np.int32) for n in (6, 4))
    batch = {
        "encoder_input_tokens": inputs, "decoder_target_tokens": targets,
        "decoder_loss_weights": np.ones((3, 4), np.float32),
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
    }  # fmt: skip
    return model, tiny.random_params(config), batch


def test_a_subclassed_network_is_trained_and_scored_with_its_own_logits():
    model, params, batch = tiny_model(Doubled)
    functions = model.compute_logits, model.score_batch, model.loss_fn
    logits, scores, loss = jax.jit(lambda *given: [function(*given) for function in functions])(params, batch)
    logits = np.asarray(logits, np.float64)
    probabilities = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = np.take_along_axis(probabilities, batch["decoder_target_tokens"][..., None], axis=-1)[..., 0].sum(1)
    np.testing.assert_allclose(scores, wanted, rtol=1e-5)
    np.testing.assert_allclose(loss[0], -wanted.sum(), rtol=1e-5)


@pytest.mark.slow
def test_scores_can_be_differentiated():
    """As preference losses need."""
    model, params, batch = tiny_model()
    functions = [
        lambda params: model.score_batch(params, batch).sum(),
        lambda params: model.score_batch(params, batch, return_intermediates=True)[0].sum(),
        lambda params: -model.loss_fn(params, batch)[0],
    ]
    found, wanted, loss = jax.jit(lambda params: [jax.grad(function)(params) for function in functions])(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, loss)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_gradient_of_a_few_logits_is_summed_in_float32(tied):
    """All rows of a batch add to the same two columns; bfloat16 would lose most of the sum."""
    model, params, batch = tiny_model(dtype="bfloat16", logits_via_embedding=tied)
    exact = tiny_model(logits_via_embedding=tied)[0]
    inputs = np.tile(batch["encoder_input_tokens"], (400, 1))
    labels = np.broadcast_to([5, 9], (len(inputs), 2))
    first = lambda model, params: model.first_logits(params, inputs, labels)[:, 0].sum()
    of = lambda model: jax.device_get(jax.jit(jax.grad(functools.partial(first, model)))(params))
    column = lambda g: g["token_embedder"]["embedding"][5] if tied else g["decoder"]["logits_dense"]["kernel"][:, 5]
    found, wanted = column(of(model)), column(of(exact))
    assert np.linalg.norm(found - wanted) < 0.02 * np.linalg.norm(wanted)


@pytest.mark.parametrize("kind", [EncoderDecoderModel, DecoderOnlyModel])
def test_losses_and_scores_never_hold_all_logits(kind):
    """float32 [batch, targets, vocab] would exhaust the memory for a large batch."""
    rows, length, vocab = 128, 128, 32128
    if kind is EncoderDecoderModel:
        config = dataclasses.replace(tiny.BYTES, vocab_size=vocab)
        model, batch = tiny.model(config), tiny.batch(rows=rows, targets=length)
    else:
        config = TransformerConfig(vocab_size=vocab, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=8, num_layers=1)
        model = DecoderOnlyModel(DecoderWrapper(config), PassThroughVocabulary(vocab, eos_id=1), Adafactor())
        batch = {name: x for name, x in tiny.batch(rows=rows, targets=length).items() if name.startswith("decoder")}
    shapes = {name: x.shape for name, x in batch.items()}
    params = jax.eval_shape(lambda: model.get_initial_variables(jax.random.key(0), shapes)["params"])
    for function in (jax.grad(lambda p: model.loss_fn(p, batch)[0]), lambda p: model.score_batch(p, batch)):
        found = _sizes(jax.make_jaxpr(function)(params).jaxpr)
        assert max(found) < rows * length * vocab, "all logits at once"


def _sizes(jaxpr):
    """Yield the sizes of all arrays in a program, including inner programs."""
    for equation in jaxpr.eqns:
        yield from (variable.aval.size for variable in equation.outvars if hasattr(variable.aval, "size"))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from _sizes(inner)


def test_a_subclassed_model_is_trained_with_its_own_logits():
    class Louder(EncoderDecoderModel):
        def compute_logits(self, *args, **options):
            return 2 * super().compute_logits(*args, **options)

    vocabulary = PassThroughVocabulary(31, eos_id=1)
    louder = Louder(Transformer(tiny.BYTES), vocabulary, vocabulary, Adafactor())
    params, batch = tiny.random_params(tiny.BYTES), tiny.batch()
    loss = lambda model: jax.jit(model.loss_fn)(params, batch)[0]
    assert abs(loss(louder) - loss(tiny.model(tiny.BYTES))) > 1e-3


def test_checkpoints_record_the_public_name_of_a_model():
    """A run does not resume from a checkpoint with another name."""
    assert describe(tiny.model())["model"] == "t5x.models.EncoderDecoderModel"
    assert pickle.loads(pickle.dumps(DecoderOnlyModel)) is DecoderOnlyModel
