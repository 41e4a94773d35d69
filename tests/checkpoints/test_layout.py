"""Stacked and unrolled layers hold the same numbers: parameters and optimizer state, there and back."""

import dataclasses
import functools
import weakref

import jax
import numpy as np
import pytest

from t5x._runtime.errors import UserError
from t5x.checkpoints import array_writer, restore
from t5x.checkpoints import tree as trees
from t5x.checkpoints.formats.own_checkpoint import write_own_checkpoint
from t5x.checkpoints.formats.source import LazyArray
from t5x.checkpoints.layout import arranged, canonical
from t5x.network import T5Config
from t5x.optimizers.adafactor import Adafactor
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout
from tests.support import tiny

# One dimension of each kernel is the larger one, and not always the same.
CONFIG = dataclasses.replace(
    tiny.WIDE, emb_dim=160, num_heads=4, head_dim=32, mlp_dim=192, num_encoder_layers=2, num_decoder_layers=3
)


def layout_of(config: T5Config, beta1=None) -> StateLayout:
    model = tiny.model(config, optimizer=Adafactor(beta1=beta1))
    return StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 3, "targets": 3}))


def lazy(tree) -> dict[str, LazyArray]:
    return {n: LazyArray(x.shape, np.dtype(x.dtype), lambda x=x: np.asarray(x)) for n, x in trees.flatten(tree).items()}


def random_arrays(layout: StateLayout) -> dict[str, LazyArray]:
    rng = np.random.default_rng(0)
    fill = lambda x: np.zeros(x.shape, x.dtype) if x.shape == (1,) else rng.random(x.shape).astype(x.dtype)
    return lazy(jax.tree.map(fill, layout.abstract.state_dict()))


def names_and_axes(layout: StateLayout):
    flat = trees.flatten(layout.abstract.state_dict())
    treedef = jax.tree.structure(layout.abstract.state_dict())
    axes = treedef.flatten_up_to({"target": layout.axes, "state": {"step": (), "param_states": layout.state_axes}})
    return flat, dict(zip(flat, axes, strict=True))


@pytest.mark.parametrize("scan_axis", [0, 1])
@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.slow
def test_unrolled_to_stacked_and_back(scan_axis, per_layer):
    unrolled = layout_of(dataclasses.replace(CONFIG, per_layer_relative_position_bias=per_layer), beta1=0.9)
    scanned = layout_of(
        dataclasses.replace(
            CONFIG, per_layer_relative_position_bias=per_layer, scan_layers=True, param_scan_axis=scan_axis
        ),
        beta1=0.9,
    )
    start = random_arrays(unrolled)
    wanted, axes = names_and_axes(scanned)
    stacked = arranged(start, wanted, axes)
    assert {n: a.shape for n, a in stacked.items()} == {n: tuple(x.shape) for n, x in wanted.items()}
    kernel = stacked["target/decoder/decoder/mlp/wo/kernel"].read()
    np.testing.assert_array_equal(kernel.take(2, scan_axis), start["target/decoder/layers_2/mlp/wo/kernel"].read())
    back = canonical(stacked, scan_axis=scan_axis)
    assert back.keys() == start.keys()
    for name, array in start.items():
        np.testing.assert_array_equal(back[name].read(), array.read(), err_msg=name)


@pytest.mark.slow
def test_stacked_network_trains_as_the_unrolled_one():
    """The optimizer state means the same in both: one more step gives the same parameters."""
    config = dataclasses.replace(CONFIG, num_encoder_layers=1, num_decoder_layers=2)
    layouts = [layout_of(dataclasses.replace(config, scan_layers=scan)) for scan in (False, True)]
    arrays = random_arrays(layouts[0])
    results = []
    for layout in layouts:
        wanted, axes = names_and_axes(layout)
        tree = trees.nest({n: a.read() for n, a in arranged(arrays, wanted, axes).items()})
        rng = np.random.default_rng(1)
        grads = {n: rng.random(a.shape).astype(np.float32) for n, a in arrays.items() if n.startswith("target/")}
        grads = trees.nest({n: a.read() for n, a in arranged(lazy(trees.nest(grads)), wanted, axes).items()})
        update = functools.partial(
            layout.model.optimizer_def.update, axes=layout.axes, step=np.int32(3), learning_rate=0.1
        )
        params, _ = jax.jit(update)(grads["target"], tree["state"]["param_states"], tree["target"])
        results.append(canonical(lazy({"target": params})))
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        np.testing.assert_allclose(results[0][name].read(), results[1][name].read(), rtol=1e-5, atol=1e-6, err_msg=name)


def test_kernels_with_heads_apart_are_flattened():
    """T5X's scalable_t5: [embed, layers, heads, kv] and [heads, layers, kv, embed]."""
    query, out = np.random.rand(6, 2, 3, 5), np.random.rand(3, 2, 5, 6)
    arrays = lazy(
        {"target": {"encoder": {"encoder": {"attention": {"query": {"kernel": query}, "out": {"kernel": out}}}}}}
    )
    flat = canonical(arrays)
    np.testing.assert_array_equal(
        flat["target/encoder/layers_1/attention/query/kernel"].read(), query[:, 1].reshape(6, 15)
    )
    np.testing.assert_array_equal(flat["target/encoder/layers_1/attention/out/kernel"].read(), out[:, 1].reshape(15, 6))


def test_a_checkpoint_is_written_one_array_at_a_time(tmp_path, monkeypatch):
    """Conversion needs memory for one array and for the small ones of a commit, not for the model."""
    monkeypatch.setattr(array_writer, "_COMMIT_BYTES", 1)
    alive = []

    def tensors():
        for number in range(5):
            array = np.full((4, 3), number, np.float32)
            alive.append(weakref.ref(array))
            yield f"target/p{number}", array
            del array
            assert sum(ref() is not None for ref in alive[:-1]) == 0, "an earlier array is still held"

    write_own_checkpoint(tmp_path / "checkpoint_7", 7, tensors(), sidecars={"model.json": b"{}"})
    tree = restore(tmp_path / "checkpoint_7")
    assert int(tree["state"]["step"]) == 7
    np.testing.assert_array_equal(tree["target"]["p3"], np.full((4, 3), 3))
    with pytest.raises(UserError, match="exists already"):
        write_own_checkpoint(tmp_path / "checkpoint_7", 7, tensors(), sidecars={})


def test_layers_of_different_shapes_cannot_be_stacked():
    arrays = lazy({"target": {"encoder": {f"layers_{i}": {"norm": {"scale": np.ones(3 + i)}} for i in range(2)}}})
    with pytest.raises(UserError, match="scan_layers=False"):
        arranged(
            arrays,
            {"target/encoder/encoder/norm/scale": None},
            {"target/encoder/encoder/norm/scale": ("embed", "layers")},
        )
