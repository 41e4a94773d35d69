"""On eight virtual devices: saves sharded one way, restores sharded another way and onto one device, compares bits.

Usage: reshard.py MODEL_DIR, with XLA_FLAGS=--xla_force_host_platform_device_count=8
"""

import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from t5x.checkpoints import CheckpointStore
from tests.checkpoints.helpers import abstract, assert_same, make_tree

devices = jax.devices()
assert len(devices) == 8
wide = Mesh(np.array(devices).reshape(4, 2), ("data", "model"))
flat = Mesh(np.array(devices[:2]), ("data",))


def on(mesh, *axes):
    """A function from an array to its sharding: the axes where they divide it, else replicated."""

    def choose(leaf):
        spec = axes[: leaf.ndim]
        sizes = [mesh.shape[axis] if axis else 1 for axis in spec]
        fits = leaf.size and all(dim % size == 0 for dim, size in zip(leaf.shape, sizes, strict=False))
        return NamedSharding(mesh, PartitionSpec(*spec) if fits else PartitionSpec())

    return choose


def restored(choose):
    leaves = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=choose(x)), tree)
    result = store.restore(store.path(3), leaves)
    assert all(
        have.sharding.is_equivalent_to(want.sharding, have.ndim)
        for have, want in zip(jax.tree.leaves(result), jax.tree.leaves(leaves), strict=True)
    )
    return result


tree = make_tree(3)
sharded = jax.tree.map(lambda leaf: jax.device_put(leaf, on(wide, "data", "model")(leaf)), tree)
split = [leaf for leaf in jax.tree.leaves(sharded) if not leaf.is_fully_replicated]
assert len(split) >= 5, "the test is to have arrays that are really spread"

with CheckpointStore(sys.argv[1]) as store:
    store.save(3, sharded, sidecars={})
    store.wait()
    assert_same(tree, restored(on(wide, "data", "model")))
    assert_same(tree, restored(on(wide, "model", "data")))
    assert_same(tree, restored(on(wide, None, "data")))
    assert_same(tree, restored(on(flat, "data")))
    assert_same(tree, restored(lambda leaf: SingleDeviceSharding(devices[5])))
    assert_same(tree, store.restore(store.path(3), abstract(tree)))
    assert_same(tree, store.restore(store.path(3)))
print("same bits")
