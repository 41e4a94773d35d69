"""One process of a run of several: `member.py INDEX COUNT ADDRESS JOB`. What it finds is JSON on standard output."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from t5x._runtime.errors import UserError
from t5x.partitioning import LocalChunker, PjitPartitioner, consistency, distributed, multiprocess, watch

INDEX, COUNT = int(sys.argv[1]), int(sys.argv[2])
VICTIM = COUNT - 1


JAX_ADDRESS = []  # at which this process reaches JAX's service


def initialize(**options: object) -> None:
    JAX_ADDRESS.append(options["coordinator_address"])
    INITIALIZE(**options)


INITIALIZE, jax.distributed.initialize = jax.distributed.initialize, initialize


def tell() -> dict:
    """What processes tell each other."""
    rounds = [distributed.exchange("of one name", f"{INDEX} {n}") for n in range(3)]
    shared = [distributed.broadcast("word", n if distributed.is_leader() else None) for n in range(3)]
    before = distributed.poll("note")
    distributed.barrier("all have looked")
    if INDEX == 1:
        distributed.put("note", "first")
        distributed.put("note", ["last"])
    distributed.barrier("a/b")
    distributed.barrier("a/b")
    distributed.barrier("all have read")
    store = distributed._key_value_store()
    keys = [store.key_value_dir_get(f"t5x/{name}") for name in ("exchange/of one name", "broadcast")]
    return {
        "rounds": rounds,
        "shared": shared,
        "notes": [before, distributed.poll("note")],
        "keys": [len(entries) for entries in keys],
    }


def place(**options: object) -> dict:
    """Puts a batch whose row r holds r on the devices of a mesh, and looks at what lies there."""
    partitioner = PjitPartitioner(**options)
    size = 4 * partitioner.data_parts
    rows = partitioner.rows(size)
    array = partitioner.to_devices({"x": np.repeat(np.array(rows)[:, None], 3, axis=1)})["x"]
    whole = partitioner.partition(lambda x: x, array.sharding, partitioner.replicated)
    (chunk,) = LocalChunker(partitioner.mesh).get_local_chunk_info((size,), partitioner.spec((size,), ("batch",))).slice
    groups = partitioner.mesh.devices.reshape(-1, partitioner.mesh.shape["model"])
    return {
        "mesh": dict(partitioner.mesh.shape),
        "rows": [rows.start, rows.stop, size],
        "chunk": [chunk.start, chunk.stop],
        "right": np.array_equal(np.asarray(whole(array)), np.repeat(np.arange(size)[:, None], 3, axis=1)),
        "reads them first": partitioner.get_data_layout(size).is_first_host_in_replica_set,
        "processes of a model": max(len({device.process_index for device in group}) for group in groups),
    }


def bound() -> None:
    """Looks whether JAX's service listens at another address than the coordinator's; process 0 knows its port."""
    port = int(distributed.broadcast("address of JAX's service", JAX_ADDRESS[0]).rpartition(":")[2])
    try:
        socket.create_connection(("127.0.0.2", port)).close()
        is_open = True
    except ConnectionRefusedError:
        is_open = False
    print(json.dumps({"processes": jax.process_count(), "JAX's service is open at 127.0.0.2": is_open}))


def gpus() -> None:
    """Prints the GPUs that JAX uses, or would use if this machine had any."""
    print(json.dumps(jax.config.values["jax_cuda_visible_devices"]))


def compare() -> None:
    """What is said of descriptions that differ."""
    cases = {
        "same": {"steps": "10"},
        "value": {"rate": "0.1", "steps": str(10 + INDEX)},
        "missing": {"steps": "10"} | ({"new": "1"} if INDEX else {}),
        "many": {f"name {n}": str(INDEX) for n in range(30)},
        "long": {"text": f"{'x' * 5000}{INDEX} and so on"},
        "afterwards": {"steps": "10"},
    }
    told = {}
    for name, description in cases.items():
        try:
            consistency.require_same("configuration", lambda found=description: found)
            told[name] = None
        except UserError as error:
            told[name] = str(error)
    print(json.dumps(told))


MESHES = {
    "data": {"num_partitions": 1},
    "model inside": {"num_partitions": 4},
    "model across": {"num_partitions": 8},
    "tp": {"preset": "tp"},
    "hybrid": {"ici_mesh_shape": (1, 2, 2), "dcn_mesh_shape": (2, 1, 1)},
}


def work() -> None:
    print(json.dumps({"told": tell(), "meshes": {name: place(**options) for name, options in MESHES.items()}}))


def leave() -> Callable[[], None]:
    """Reads its first device, while the second has yet to begin a sum with the other process's; then that one too."""
    partitioner = PjitPartitioner(num_partitions=2)

    def add(x: jax.Array) -> jax.Array:
        loops = jax.lax.axis_index("model") * 10_000_000 * (1 + 2 * jax.lax.axis_index("data"))
        return jax.lax.psum(jax.lax.fori_loop(0, loops, lambda _, x: jnp.cos(x), x), "data")

    x = np.ones((2, 2), np.float32)
    array = jax.make_array_from_callback(x.shape, NamedSharding(partitioner.mesh, P("data", "model")), x.__getitem__)
    specs = {"in_specs": P("data", "model"), "out_specs": P(None, "model")}
    added = jax.jit(jax.shard_map(add, mesh=partitioner.mesh, **specs))(array)
    parts = added.addressable_shards
    print(parts[0].data.item())
    return lambda: print(parts[1].data.item())


def die() -> None:
    """The last is killed while the others compute with it, on a mesh whose second model copy is on two processes."""
    print(json.dumps(place(num_partitions=3)), flush=True)
    for n in range(10_000):
        multihost_utils.process_allgather(np.ones(1))
        if n == 3 and INDEX == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)


def die_first() -> None:
    """Process 0, where JAX's coordination service is, is killed."""
    distributed.barrier("up")
    if INDEX == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(100)


def hang(victim: int = VICTIM) -> None:
    distributed.barrier("up")
    if victim == INDEX:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(100)


def hang_first() -> None:
    """Process 0, where JAX's coordination service is, is stopped."""
    hang(0)


def wait() -> None:
    distributed.barrier("up")
    print("up", flush=True)
    time.sleep(100)


def refuse() -> None:
    distributed.barrier("up")
    if INDEX == VICTIM:
        raise UserError("the file is missing. Give it.")
    time.sleep(100)


def refuse_all() -> None:
    distributed.barrier("up")  # as in the comparisons after which all fail; on a busy machine one starts seconds later
    raise UserError("all say this.")


class Stopped(Exception):
    """As a run that was asked to stop ends."""

    exit_code = 75


def last() -> None:
    """All stop in good order; one has more to do than the others."""
    time.sleep(2 if INDEX == VICTIM else 0)
    print("finished")
    raise Stopped("stopped in good order")


if __name__ == "__main__":
    watch.PEER_SILENCE_SECONDS = 4.0
    jax.config.update("jax_platforms", os.environ.get("MEMBER_PLATFORMS", "cpu"))
    flags = {"process_count": COUNT, "process_index": INDEX, "initialization_timeout": 60}
    try:
        with multiprocess.run(coordinator_address=sys.argv[3], **flags):
            afterwards = globals()[sys.argv[4]]()
        if afterwards:
            afterwards()
    except (UserError, Stopped) as error:
        print(f"{'error: ' * isinstance(error, UserError)}{error}", file=sys.stderr)
        sys.exit(error.exit_code)
