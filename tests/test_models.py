"""Models over modules that are not ours."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.partitioning import param_with_axes

from t5x.adafactor import Adafactor
from t5x.data import PassThroughVocabulary
from t5x.decoding import beam_search, greedy_decode
from t5x.models import EncoderDecoderModel
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout, Trainer
from tests import tiny


class Counter(nn.Module):
    @nn.compact
    def __call__(self):
        steps = self.variable("cache", "steps", lambda: jnp.zeros((), jnp.int32))
        steps.value += 1


class Bag(nn.Module):
    """A user's own module with T5X's call convention: a bag of input words and the last token predict the next."""

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


def test_a_users_own_module_trains_predicts_and_scores():
    vocabulary = PassThroughVocabulary(31, eos_id=1)
    model = EncoderDecoderModel(Bag(), vocabulary, vocabulary, Adafactor(), greedy_decode)
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 9, "targets": 7}))
    assert layout.axes == {"table": ("vocab", "embed"), "head": None}
    trainer = Trainer(
        model,
        layout.init(jax.random.key(0)),
        PjitPartitioner(),
        layout,
        jax.random.key(1),
        lambda step: jnp.float32(0.1),
    )
    losses = [float(trainer.step(tiny.batch())["loss_per_nonpadding_target_token"].compute()) for _ in range(30)]
    assert losses[-1] < 0.7 * losses[0]
    params, batch = trainer.state.params, tiny.batch()
    tokens = model.predict_batch(params, batch)
    logits = model.compute_logits(params, batch)
    np.testing.assert_array_equal(tokens[:, 0], jnp.argmax(logits[:, 0], -1))
    assert (model.score_batch(params, batch) < 0).all()
    model.decode_fn = beam_search
    beams = jax.jit(functools.partial(model.predict_batch_with_aux, return_all_decodes=True, num_decodes=3))
    (tokens, aux), alone = beams(params, batch), {name: value[2:3] for name, value in batch.items()}
    np.testing.assert_array_equal(tokens[2:3], beams(params, alone)[0])
    assert tokens.shape == (4, 3, 7) and (jnp.diff(aux["scores"]) >= 0).all()
