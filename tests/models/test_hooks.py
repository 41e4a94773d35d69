"""What `hooks_of` reports about users' models, which decides what may be computed faster than they wrote it."""

import dataclasses
import types

import flax.linen as nn
import pytest

from t5x.data import PassThroughVocabulary
from t5x.models import EncoderDecoderModel
from t5x.models.hooks import Hooks, hooks_of
from t5x.network import T5Config, Transformer

OURS = Hooks(
    custom_network=False, custom_logits=False, custom_step=False, metrics_arguments=None, takes_row_index=True,
    takes_logits_of=True, takes_mutables=False,
)  # fmt: skip


class CustomLogits(EncoderDecoderModel):
    def compute_logits(self, *args, **options):
        return 2 * super().compute_logits(*args, **options)


class CustomStep(EncoderDecoderModel):
    def _compute_logits_from_slice(self, *args, **options):
        return super()._compute_logits_from_slice(*args, **options)


class CustomMetrics(EncoderDecoderModel):
    def _compute_metrics(self, logits, targets, mask, loss):
        return {}


class OpenMetrics(EncoderDecoderModel):
    def _compute_metrics(self, logits, targets, **others):
        return {}


class WithMutables(EncoderDecoderModel):
    def loss_fn(self, params, batch, dropout_rng, flax_mutables=None):
        return super().loss_fn(params, batch, dropout_rng)


class CustomSetup(Transformer):
    def setup(self):
        super().setup()


class DecodeField(nn.Module):
    decode: bool = False

    def __call__(self, encoder_input_tokens, decoder_input_tokens, decoder_target_tokens):
        return decoder_input_tokens


def model(cls=EncoderDecoderModel, network=Transformer):
    sizes = dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 1)
    config = T5Config(vocab_size=32, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16, **sizes)
    vocabulary = PassThroughVocabulary(32, eos_id=1)
    return cls(DecodeField() if network is DecodeField else network(config), vocabulary, vocabulary, None)


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"cls": CustomLogits}, {"custom_logits": True}),
        ({"cls": CustomStep}, {"custom_step": True}),
        ({"cls": CustomMetrics}, {"metrics_arguments": {"logits", "targets", "mask", "loss"}}),
        ({"cls": OpenMetrics}, {"metrics_arguments": {"mask", "loss", "z_loss", "segment_ids"}}),
        ({"cls": WithMutables}, {"takes_mutables": True}),
        ({"network": CustomSetup}, {"custom_network": True, "takes_row_index": False}),
        ({"network": DecodeField}, {"custom_network": True, "takes_row_index": False, "takes_logits_of": False}),
    ],
)
def test_hooks_are_those_that_a_class_overrides(options, changes):
    assert hooks_of(model(**options)) == dataclasses.replace(OURS, **changes)


def test_a_mixin_between_our_classes_overrides():
    mixin = type("Mixin", (EncoderDecoderModel.__mro__[1],), {"compute_logits": CustomLogits.compute_logits})
    assert hooks_of(model(type("Mixed", (EncoderDecoderModel, mixin), {}))).custom_logits


def test_a_method_that_is_set_on_an_object_counts_from_then_on():
    one = model()
    assert hooks_of(one) == OURS
    one._compute_logits = lambda *args, **options: None
    assert hooks_of(one).custom_logits


def test_an_object_with_only_a_loss_has_hooks():
    loss = types.SimpleNamespace(loss_fn=lambda params, batch, rng, flax_mutables: None)
    assert hooks_of(loss).takes_mutables and not hooks_of(loss).takes_row_index
