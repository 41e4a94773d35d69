"""The losses and scores of rankers, against what the network's logits say."""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.apps.ranking.models import RankingModel, listwise_softmax
from t5x.apps.ranking.templates import MONOT5, Template
from t5x.checkpoints import model_description
from t5x.checkpoints.formats.own_checkpoint import MODEL_FILE
from t5x.data import PassThroughVocabulary
from t5x.network import Transformer
from t5x.trainer import accumulate_grads_microbatched
from t5x.trainer.train_state import InferenceState
from tests.support import tiny
from tests.support.paths import REPO
from tests.support.programs import run_python

RELEVANT, IRRELEVANT = 7, 11
CONFIG = dataclasses.replace(tiny.T5_1_1, num_encoder_layers=1, num_decoder_layers=1)
DROPPING = dataclasses.replace(CONFIG, dropout_rate=0.2)
PARAMS = tiny.random_params(CONFIG)
compute_logits = jax.jit(tiny.model(CONFIG).compute_logits)


class Words(PassThroughVocabulary):
    """Ids for tokens, and two words."""

    def encode(self, text):
        return {"true": [RELEVANT], "false": [IRRELEVANT]}[text]


def ranker(config=CONFIG, template=MONOT5, **options) -> RankingModel:
    vocabulary = Words(config.vocab_size, eos_id=1)
    return RankingModel(Transformer(config), vocabulary, vocabulary, None, template=template, **options)


def pairs(rows: int = 6, padding: int = 1) -> dict[str, np.ndarray]:
    """Pairs with the targets true, false, …, and rows of padding behind them."""
    batch = tiny.batch(rows=rows, targets=2)
    targets = np.array([[(RELEVANT, IRRELEVANT)[row % 2], 1] for row in range(rows)], np.int32)
    targets[rows - padding :] = 0
    inputs = np.where(targets[:, :1] > 0, batch["encoder_input_tokens"], 0)
    shifted = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    return {
        "encoder_input_tokens": inputs,
        "decoder_target_tokens": targets,
        "decoder_input_tokens": shifted,
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }


def lists(size: int = 3) -> dict[str, np.ndarray]:
    """Eight lists: most are full, one has a passage less, one is padding."""
    inputs = tiny.batch(rows=8 * size)["encoder_input_tokens"].reshape(8, size, -1)
    grades = np.random.default_rng(1).integers(0, 4, (8, size)).astype(np.int32)
    grades[:, 0] = 2
    targets = np.where(grades > 0, RELEVANT, IRRELEVANT).astype(np.int32)
    targets[1, 2] = grades[1, 2] = 0
    inputs[1, 2] = [1] + [0] * (inputs.shape[-1] - 1)
    for array in (inputs, targets, grades):
        array[7] = 0
    return {
        "encoder_input_tokens": inputs,
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.int32),
        "passage_grades": grades,
    }


def word_logits(inputs: np.ndarray) -> np.ndarray:
    """Logits of the two words at the first position, from a whole pass with teacher forcing."""
    start = np.zeros((len(inputs), 1), np.int32)
    batch = {"encoder_input_tokens": inputs, "decoder_input_tokens": start, "decoder_target_tokens": start + 1}
    logits = compute_logits(PARAMS, batch)
    return np.asarray(logits[:, 0, [RELEVANT, IRRELEVANT]], np.float64)


def test_scores_are_log_probabilities_of_the_two_words_whatever_the_target():
    batch = pairs(padding=0)
    logits = word_logits(batch["encoder_input_tokens"])
    expected = logits[:, 0] - np.logaddexp(logits[:, 0], logits[:, 1])
    scores = jax.jit(ranker().score_batch)(PARAMS, batch)
    np.testing.assert_allclose(scores, expected, atol=1e-5)
    other = batch | {"decoder_target_tokens": batch["decoder_target_tokens"][::-1]}
    np.testing.assert_array_equal(jax.jit(ranker(loss="labels").score_batch)(PARAMS, other), scores)


def test_the_score_of_a_template_with_one_word_is_its_logit():
    batch = pairs(padding=0)
    model = ranker(template=Template(irrelevant=None), loss="listwise")
    scores = jax.jit(model.score_batch)(PARAMS, batch)
    np.testing.assert_allclose(scores, word_logits(batch["encoder_input_tokens"])[:, 0], atol=1e-5)


def test_the_vocabulary_loss_is_that_of_any_model():
    found = [jax.jit(model.loss_fn)(PARAMS, pairs())[0] for model in (ranker(), tiny.model(CONFIG))]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(("factor", "expected"), [(None, 5.0), (10, 0.5), ("NUM_REAL_TARGET_TOKENS", 1.0)])
def test_the_loss_of_labels_is_cross_entropy_over_the_two_words(factor, expected):
    batch = pairs(rows=6, padding=1)
    logits = word_logits(batch["encoder_input_tokens"])[:5]
    right = logits[np.arange(5), np.arange(5) % 2]
    mean = np.mean(np.logaddexp(logits[:, 0], logits[:, 1]) - right)
    model = ranker(loss="labels", loss_normalizing_factor=factor)
    loss, metrics = jax.jit(model.loss_fn)(PARAMS, batch)
    np.testing.assert_allclose(loss, expected * mean, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss_per_nonpadding_target_token"].compute(), mean, rtol=1e-5)
    found = np.mean(np.argmax(logits, axis=1) == np.arange(5) % 2)
    np.testing.assert_allclose(metrics["accuracy"].compute(), found, rtol=1e-6)


def test_a_target_of_another_template_is_not_a_label():
    batch = pairs()
    batch["decoder_target_tokens"][2, 0] = 20
    assert np.isnan(jax.jit(ranker(loss="labels").loss_fn)(PARAMS, batch)[0])


def brute_force(batch: dict[str, np.ndarray], template: Template) -> np.ndarray:
    """The listwise loss of each list, in a loop."""
    size = batch["passage_grades"].shape[1]
    logits = word_logits(batch["encoder_input_tokens"].reshape(8 * size, -1)).reshape(8, size, 2)
    scores = logits[..., 0] if template.irrelevant is None else logits[..., 0] - logits[..., 1]
    found = np.zeros(8)
    for row in range(8):
        real = [i for i in range(size) if batch["decoder_loss_weights"][row, i]]
        total = sum(batch["passage_grades"][row])
        for i in real:
            p = np.exp(scores[row, i]) / sum(np.exp(scores[row, j]) for j in real)
            found[row] -= batch["passage_grades"][row, i] / total * np.log(p)
    return found


@pytest.mark.parametrize("template", [MONOT5, Template(irrelevant=None)], ids=["difference", "logit"])
@pytest.mark.slow
def test_the_listwise_loss(template):
    batch = lists()
    expected = brute_force(batch, template)
    model = ranker(template=template, loss="listwise", loss_normalizing_factor="NUM_REAL_TARGET_TOKENS")
    (loss, metrics), grads = jax.jit(jax.value_and_grad(model.loss_fn, has_aux=True))(PARAMS, batch)
    np.testing.assert_allclose(loss, expected[:7].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss_per_nonpadding_target_token"].compute(), expected[:7].mean(), rtol=1e-5)
    assert metrics["target_tokens"].compute() == 7 * 3 - 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(grads))
    assert 0 <= metrics["accuracy"].compute() <= 1


def test_padding_of_a_list_has_no_gradient():
    scores, gains = jnp.array([[1.0, 0.5, 3.0], [2.0, 2.0, 2.0]]), jnp.array([[1, 0, 2], [0, 0, 0]])
    real = jnp.array([[True, True, False], [False, False, False]])
    grads = jax.grad(lambda s: listwise_softmax(s, gains, real).sum())(scores)
    p = np.exp(0.5) / (np.exp(1.0) + np.exp(0.5))
    np.testing.assert_allclose(grads, [[-p, p, 0], [0, 0, 0]], atol=1e-6)


@pytest.mark.slow
def test_microbatches_never_divide_a_list():
    model = ranker(DROPPING, loss="listwise", loss_normalizing_factor="NUM_REAL_TARGET_TOKENS")
    gradients = jax.jit(functools.partial(accumulate_grads_microbatched, model), static_argnums=3)
    found = [gradients(InferenceState(0, PARAMS), lists(), jax.random.key(3), parts) for parts in (1, 4)]
    for whole, in_parts in zip(*(jax.tree.leaves(grads) for grads, _, _ in found), strict=True):
        np.testing.assert_allclose(whole, in_parts, atol=1e-6)
    losses = [float(metrics["loss"].compute()) for _, metrics, _ in found]
    np.testing.assert_allclose(*losses, rtol=1e-5)


ON_DEVICES = """
import json, jax, numpy as np
from t5x.partitioning import PjitPartitioner
from tests.apps.ranking.test_models import DROPPING, PARAMS, lists, ranker
model = ranker(DROPPING, loss="listwise")
batch = {**lists(), "row_index": np.arange(8, dtype=np.int32)}
partitioner = PjitPartitioner()
assert partitioner.data_parts == jax.device_count() == 8
gradient = jax.grad(lambda p, b: model.loss_fn(p, b, jax.random.key(3)), has_aux=True)
run = partitioner.partition(
    gradient, (partitioner.replicated, partitioner.batch_sharding), partitioner.replicated)
grads, metrics = run(PARAMS, partitioner.to_devices(batch))
norms = [float(np.linalg.norm(x)) for x in jax.tree.leaves(grads)]
print(json.dumps([float(metrics["loss"].compute()), norms]))
"""


@pytest.mark.slow  # partitioning/test_meshes.py
def test_eight_devices_find_what_one_does():
    batch = {**lists(), "row_index": np.arange(8, dtype=np.int32)}
    gradient = jax.jit(jax.value_and_grad(ranker(DROPPING, loss="listwise").loss_fn, has_aux=True))
    (loss, _), grads = gradient(PARAMS, batch, jax.random.key(3))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = run_python("-c", ON_DEVICES, cwd=REPO, env={**os.environ, "XLA_FLAGS": flags})
    assert done.returncode == 0, done.stderr[-2000:]
    there, norms = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(there, loss, rtol=1e-5)
    np.testing.assert_allclose(norms, [np.linalg.norm(x) for x in jax.tree.leaves(grads)], rtol=1e-4, atol=1e-6)


def test_the_template_travels_in_the_description():
    template = Template(text="{document} answers {query}", max_length=64)
    described = json.loads(model_description.sidecars(ranker(template=template), None)[MODEL_FILE])
    assert Template(**described["template"]) == template
    assert "template" not in model_description.describe(tiny.model())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "pairwise"}, "vocabulary, labels or listwise"),
        ({"template": "duo"}, "template is 'duo': it must be one of monot5, mt5, ptt5"),
        ({"template": Template(irrelevant=None)}, "word for irrelevant passages"),
    ],
)
def test_invalid_ranking_model_raises_user_error(options, words):
    with pytest.raises(UserError, match=words):
        ranker(**options)


def test_pairs_for_lists_and_lists_for_pairs_are_refused():
    with pytest.raises(UserError, match="needs lists of passages"):
        ranker(loss="listwise").loss_fn(PARAMS, pairs())
    with pytest.raises(UserError, match="only for the loss 'listwise'"):
        ranker(loss="labels").loss_fn(PARAMS, lists())
    with pytest.raises(UserError, match="pack=False"):
        ranker(loss="labels").loss_fn(PARAMS, pairs() | {"encoder_segment_ids": np.ones((6, 9), np.int32)})
