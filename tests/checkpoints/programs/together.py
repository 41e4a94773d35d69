"""One of the processes that save and restore together. Usage: together.py MODEL_DIR PORT INDEX COUNT WHAT …

Every process resumes from MODEL_DIR, checks its shards bit for bit, and then, by WHAT:

    save N         saves N steps
    for-ever       saves until somebody kills it
    fail [fill]    saves three steps, of which process 1 cannot write its part of the second; then, on a small disk, a
                   checkpoint that is too large for it and another one
    resume         restores a tiny T5, whose layers may be stacked in the checkpoint, and saves it at the next step
"""

import errno
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x._runtime.errors import UserError
from t5x.checkpoints import CheckpointStore, ModelDirLock, array_writer
from t5x.checkpoints.paths import step_of
from t5x.files import disk_space
from t5x.partitioning import multiprocess
from tests.checkpoints.helpers import make_tree


def main(directory: str, port: str, index: str, count: str, what: str, *more: str) -> None:
    multiprocess.start(coordinator_address=f"localhost:{port}", process_count=int(count), process_index=int(index))
    assert jax.process_count() == int(count)
    if what == "resume":
        resume(directory)
        return
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("data", "model"))
    with ModelDirLock(directory), CheckpointStore(directory, keep=2) as store:
        store.remove_stale_tmp()
        newest, damaged = store.latest_whole()
        step = 0
        if newest is not None:
            step = step_of(newest)
            check(
                store.restore(newest, jax.tree.map(lambda x: described(mesh, x), make_tree(step)), verify=False), step
            )
        print(f"at step {step}, {len(damaged)} damaged", flush=True)
        if what == "fail":
            fail(store, mesh, index == "1")
            if more == ("fill",):
                fill(store, mesh)
            return
        last = 10**9 if what == "for-ever" else step + int(*more)
        while step < last:
            step += 1
            print(f"at step {step}{save(store, step, mesh)}", flush=True)


def fail(store, mesh, here: bool) -> None:
    write = array_writer.HostArrays.write
    for step in (1, 2, 3):
        array_writer.HostArrays.write = no_space if here and step == 2 else write
        print(f"{step}: {save(store, step, mesh)}{waited(store)}", flush=True)


def fill(store, mesh) -> None:
    disk_space.check_space = lambda *_: None
    noise = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    large = {"target": {f"w{i}": noise + i for i in range(4)}}
    print(f"4: {save(store, 4, mesh, large)}{waited(store)}", flush=True)
    print(f"5: {save(store, 5, mesh)}{waited(store)}", flush=True)


def save(store, step, mesh, tree=None) -> str:
    tree = jax.tree.map(lambda x: over(mesh, x), make_tree(step) if tree is None else tree)
    sidecars = {"model.json": b"{}", "process": str(jax.process_index()).encode()}
    try:
        store.save(step, tree, sidecars=sidecars, pinned=step == 1)
    except UserError as error:
        return str(error)
    return ""


def waited(store) -> str:
    try:
        store.wait()
    except UserError as error:
        return str(error)
    return ""


def resume(directory) -> None:
    from t5x.partitioning import PjitPartitioner
    from t5x.trainer.restore import position_of_all, restore_or_init
    from t5x.trainer.state_layout import StateLayout
    from tests.support import tiny

    model = tiny.model(tiny.WIDE)
    partitioner = PjitPartitioner(num_partitions=2)
    layout = StateLayout.of(model, partitioner, model.input_shapes({"inputs": 3, "targets": 3}))
    with CheckpointStore(directory) as store:
        state, run = restore_or_init(store, None, model, layout, jax.random.key(0))
        mine = {"seed": 1, "batches": 3, "lanes": [[row, 1, row // 2] for row in partitioner.rows(4)]}
        print(run.data["batches"], position_of_all(mine)["lanes"], flush=True)
        store.save(int(state.step) + 1, state.state_dict(), sidecars={})


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def over(mesh, leaf) -> jax.Array:
    leaf = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, described(mesh, leaf).sharding, lambda index: leaf[index])


def described(mesh, leaf) -> jax.ShapeDtypeStruct:
    """Over both axes of the mesh where they divide an array, else the same everywhere."""
    fits = leaf.ndim == 2 and leaf.size and leaf.shape[0] % 2 == 0 and leaf.shape[1] % mesh.shape["model"] == 0
    spec = PartitionSpec("data", "model") if fits else PartitionSpec()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def check(found, step) -> None:
    for want, have in zip(jax.tree.leaves(make_tree(step)), jax.tree.leaves(found), strict=True):
        assert have.dtype == want.dtype
        for shard in have.addressable_shards:
            assert np.asarray(shard.data).tobytes() == np.asarray(want)[shard.index].tobytes()


if __name__ == "__main__":
    main(*sys.argv[1:])
