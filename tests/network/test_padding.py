"""Padding between tokens, which not every attention can mask: inputs go to the reference, and training raises an error.

A back end for the CPU stands for cuDNN's here: NaN for the whole batch where padding is not at the end of its rows. The
last test has cuDNN's own where there is a GPU: T5X_TEST_PLATFORM=cuda pytest tests/network/test_padding.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import t5x
from t5x._runtime.errors import UserError
from t5x.apps.ranking.models import RankingFeatureConverter
from t5x.data import PassThroughVocabulary
from t5x.inference.engine import Engine
from t5x.kernels.ops import BACKENDS, Ops
from t5x.models import DecoderOnlyModel
from t5x.network import DecoderWrapper, TransformerConfig, padding
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout
from tests.inference.models import byte_model
from tests.support import tiny

INPUTS = [[70, 71, 1], [70, 0, 72, 73, 1], [72, 1], [0, 71, 0, 0, 70, 1], [73, 74, 75, 76, 1]]
TARGETS = [[70, 1], [70, 1], [70, 0, 71, 1], [71, 1], [72, 73, 1]]
BETWEEN = {1, 2, 3}


def at_the_end_alone(self, query, key, value, mask, bias, softcap=None):
    out = self.attend_xla(query, key, value, mask, bias, softcap)
    real = jnp.ones(key.shape[:2], bool) if mask.key_segments is None else mask.key_segments > 0
    return out + jnp.where(jnp.all(real[:, 1:] <= real[:, :-1]), 0.0, jnp.nan)


@pytest.fixture
def fused(monkeypatch):
    monkeypatch.setitem(BACKENDS, "fused", False)
    monkeypatch.setattr(Ops, "attend_fused", at_the_end_alone, raising=False)


def with_backend(module, name):
    return module.clone(config=dataclasses.replace(module.config, attention_backend=name))


@jax.default_matmul_precision("highest")
def test_inputs_with_inner_padding_use_the_reference(fused, tmp_path):
    path = str(byte_model(tmp_path / "model"))
    ours, expected = (t5x.load(path, dtype="float32") for _ in range(2))  # on GPUs too
    ours.model.module = with_backend(ours.model.module, "fused")
    batch = ours.model.FEATURE_CONVERTER_CLS(pack=False).convert_batch(
        [[{"inputs": i, "targets": t}] for i, t in zip(INPUTS, TARGETS, strict=True)], {"inputs": 6, "targets": 4}
    )  # fmt: skip
    assert np.isnan(jax.jit(ours.model.compute_logits)(ours.engine.params, batch)).all()
    ways = padding.MaskingVariants("usual", "by reference")
    assert ways.chosen(ours.model, batch) == "by reference" and ways.chosen(expected.model, batch) == "usual"
    assert ways.chosen(ours.model, {name: array[[0, 4]] for name, array in batch.items()}) == "usual"

    sizes = {"max_input_length": 8, "batch_size": 4}
    done = []
    found = ours.scores(INPUTS, TARGETS, **sizes, after_batch=done.append)
    np.testing.assert_allclose(found, expected.scores(INPUTS, TARGETS, **sizes), rtol=1e-5)
    assert done == [len(INPUTS) - len(BETWEEN), len(INPUTS)]
    made, known = (m.label_logits(INPUTS, [70, 71], **sizes) for m in (ours, expected))
    np.testing.assert_allclose(made, known, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("inputs", [[[7, 0, 8], [7, 8], [9]], [[7, 8], [7, 0], [9]]])
def test_inputs_and_targets_of_a_decoder_alone_are_one_row(fused, inputs):
    targets = [[5, 1], [5, 6, 1], [1]]
    config = TransformerConfig(vocab_size=31, emb_dim=12, num_heads=3, head_dim=4, mlp_dim=16, num_layers=1)
    model = DecoderOnlyModel(DecoderWrapper(config), PassThroughVocabulary(31, eos_id=1), None)
    shapes = model.input_shapes({"inputs": 3, "targets": 3})
    params = tiny.random_params_of(model, shapes)
    examples = [{"inputs": i, "targets": t} for i, t in zip(inputs, targets, strict=True)]
    scores = []
    for backend in ("fused", "xla"):
        model.module = with_backend(model.module, backend)
        engine = Engine(model, PjitPartitioner(), params)
        program = engine.program(lambda params, batch, rng: model.score_batch(params, batch))
        scores.append(engine.run(program, examples, {"inputs": 3, "targets": 3}, rows=4))
    np.testing.assert_allclose(*scores, rtol=1e-5)

    model.module = with_backend(model.module, "fused")
    batch = model.FEATURE_CONVERTER_CLS(pack=False).convert_batch([[e] for e in examples], {"inputs": 3, "targets": 3})
    assert "decoder_causal_attention" in batch
    with pytest.raises(UserError, match=r"decoder_target_tokens .* 1 of 3 .* network.TransformerConfig.attention_"):
        padding.check(model, batch)
    model._inputs_bidirectional_attention = True  # the mask has a prefix, which the reference computes
    padding.check(model, batch)


def test_passages_of_a_list_are_rows(fused):
    model = tiny.model(dataclasses.replace(tiny.T5_1_1, attention_backend="fused"))
    convert = RankingFeatureConverter(pack=False).convert_batch
    sizes = {"inputs": 3, "targets": 3, "grades": 3}
    example = {"inputs": [[7, 1, 0], [8, 9, 1], [7, 1, 0]], "targets": [5, 0, 6], "grades": [2, 0, 1]}
    padding.check(model, convert([[example]], sizes))
    example["inputs"][1] = [8, 0, 1]
    with pytest.raises(UserError, match=r"encoder_input_tokens has padding .* 1 of 3 rows, row 1 first"):
        padding.check(model, convert([[example]], sizes))


def test_training_step_with_inner_padding_raises_user_error(fused):
    model = tiny.model(tiny.T5_1_1)
    batch = tiny.batch(rows=2)
    batch["encoder_input_tokens"] = np.array([[5, 6, 7, 0], [5, 0, 7, 1]], np.int32)
    for name in ("auto", "xla"):
        model.module = with_backend(model.module, name)
        padding.check(model, batch)
    model.module = with_backend(model.module, "fused")
    padding.check(model, tiny.batch())
    padding.check(model, tiny.packed_batch())

    partitioner = PjitPartitioner()
    layout = StateLayout.of(model, partitioner, {name: array.shape for name, array in batch.items()})
    trainer = tiny.trainer(layout, layout.abstract, jax.random.key(0), lambda step: 0.1)
    for call in (trainer.step, trainer.measure):
        with pytest.raises(UserError, match=r"encoder_input_tokens has padding .* 1 of 2 rows, row 1 .* 'xla'"):
            call(batch)
    assert trainer.train_state is layout.abstract


@pytest.mark.slow
def test_scores_in_bfloat16_are_those_of_the_reference(fused):
    config = dataclasses.replace(tiny.WIDE, head_dim=64, dtype="bfloat16")
    params, lengths = tiny.random_params(config), {"inputs": 8, "targets": 4}
    examples = [{"inputs": i, "targets": t} for i, t in zip(INPUTS, TARGETS, strict=True)]

    def results(backend):
        model = tiny.model(dataclasses.replace(config, attention_backend=backend))
        engine = Engine(model, PjitPartitioner(), params)
        batch = model.FEATURE_CONVERTER_CLS(pack=False).convert_batch([[e] for e in examples], lengths)
        straight = jax.jit(model.score_batch)(engine.params, batch)
        program = engine.program(lambda params, batch, rng: model.score_batch(params, batch))
        return model, batch, straight, engine.run(program, examples, lengths, rows=len(examples))

    model, batch, straight, found = results("cudnn" if jax.default_backend() == "gpu" else "fused")
    assert np.isnan(straight).any()
    with pytest.raises(UserError, match="encoder_input_tokens has padding"):
        padding.check(model, batch)
    _, _, known, expected = results("xla")
    np.testing.assert_allclose(known, expected, rtol=1e-2)
    np.testing.assert_allclose(found, expected, rtol=1e-2)
