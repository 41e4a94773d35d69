"""Dropout of real train steps: every row, step, layer and place has a mask of its own."""

import collections
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x import optimizers
from t5x.network.keys import Keys, dropout
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout
from tests.support import tiny

LAYERS = 2
CONFIG = dataclasses.replace(
    tiny.T5_1_1, emb_dim=64, mlp_dim=64, num_encoder_layers=LAYERS, num_decoder_layers=LAYERS, dropout_rate=0.5
)
PLACES = {
    "/encoder": {"/embedded", "/encoded"},
    "/decoder": {"/embedded", "/decoded"},
    "/encoder/layers": {"/attention/weights", "/attention_out", "/mlp/hidden", "/mlp_out"},
    "/decoder/layers": {
        "/self_attention/weights", "/self_attention_out", "/encoder_decoder_attention/weights", "/cross_attention_out",
        "/mlp/hidden", "/mlp_out",
    },
}  # fmt: skip

Masks = dict[str, list[np.ndarray]]


@pytest.fixture(scope="module", params=["unrolled", pytest.param("scanned", marks=pytest.mark.slow)])
def masks_of_steps(request) -> list[Masks]:
    """{place: masks bool [rows, ...]} that each of two train steps has used."""
    seen: Masks = collections.defaultdict(list)
    keep = Keys.keep

    def recorded(keys, shape, rate):
        mask = keep(keys, shape, rate)
        jax.debug.callback(lambda mask: seen[keys.path].append(np.asarray(mask)), mask)
        return mask

    model = tiny.model(dataclasses.replace(CONFIG, scan_layers=request.param == "scanned"), optimizers.sgd())
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 9, "targets": 7}))
    trainer = tiny.trainer(layout, tiny.random_state(layout), jax.random.key(4), lambda step: jnp.float32(0.02))
    batch, steps = tiny.batch(rows=4), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Keys, "keep", recorded)
        for _ in range(2):
            trainer.step(batch)
            jax.effects_barrier()
            steps.append(dict(seen))
            seen.clear()
    return steps


def differ(masks) -> bool:
    return all((one != other).any() for one, other in itertools.combinations(masks, 2))


@pytest.mark.slow
def test_all_places_drop(masks_of_steps):
    for step in masks_of_steps:
        assert set(step) == {tower + place for tower, places in PLACES.items() for place in places}
        assert all(0.3 < mask.mean() < 0.7 for masks in step.values() for mask in masks)


def test_rows_of_a_batch_have_different_masks(masks_of_steps):
    for step in masks_of_steps:
        for place, masks in step.items():
            assert all(len(mask) == 4 and differ(mask) for mask in masks), place


def test_steps_have_different_masks(masks_of_steps):
    first, second = masks_of_steps
    for place in first:
        assert all((one != other).any() for one, other in itertools.product(first[place], second[place])), place


def test_layers_have_different_masks(masks_of_steps):
    for step in masks_of_steps:
        for place, masks in step.items():
            distinct = {mask.tobytes() for mask in masks}  # some are recorded twice: for all layers, and for each
            assert len(distinct) == (LAYERS if "/layers/" in place else 1), place


def test_places_have_different_masks(masks_of_steps):
    for step in masks_of_steps:
        by_shape = collections.defaultdict(list)
        for masks in step.values():
            by_shape[masks[0].shape].append(masks[0])
        assert all(map(differ, by_shape.values()))


def test_a_mask_is_what_is_dropped():
    keys = Keys(dropout=jax.random.split(jax.random.key(3), 4)).child("place")
    dropped = dropout(jnp.ones((4, 5, 64)), 0.5, keys)
    np.testing.assert_array_equal(dropped, np.broadcast_to(2.0 * keys.keep((1, 64), 0.5), dropped.shape))
