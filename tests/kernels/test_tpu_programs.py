"""Our programs, compiled for TPUs by their real compiler, on a machine without one: `make tpu`.

libtpu compiles for a topology whose devices are not there. Nothing is run.
"""

import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from t5x._runtime.errors import UserError
from t5x.apps.planning.estimates import SIZES
from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.models import EncoderDecoderModel
from t5x.network.attention import attend
from t5x.partitioning import PjitPartitioner, devices, meshes
from t5x.trainer import StateLayout
from t5x.trainer.abstract_run import abstract_trainer
from tests.support import tiny

pytest.importorskip("libtpu", reason="compiles with libtpu: `make tpu`")

pytestmark = pytest.mark.nightly

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
CONFIG = dataclasses.replace(SIZES["tiny"], head_dim=64, dtype="bfloat16", scan_layers=True, dropout_rate=0.1)
ROWS, INPUTS, TARGETS = 8, 300, 100


@pytest.fixture(autouse=True, scope="module")
def _no_compilation_cache():
    """JAX cannot read programs of devices that are not there."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@functools.cache
def devices_of(generation: str) -> list[jax.Device]:
    # libtpu asks no metadata server, and shares no devices with other processes.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    options = {"chip_config_name": "megacore"} if generation == "v4" else {}  # both cores as one device, as JAX does
    return list(topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation], **options).devices)


def partitioner_of(monkeypatch, generation: str, preset: str) -> PjitPartitioner:
    monkeypatch.setattr(meshes, "devices_of", lambda backend: devices_of(generation))
    return PjitPartitioner(preset=preset)


def batch_of(partitioner: PjitPartitioner, packed: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    names = ["encoder_input_tokens", "decoder_target_tokens", "decoder_input_tokens", "decoder_loss_weights"]
    if packed:
        names += [f"{side}_{kind}" for side in ("encoder", "decoder") for kind in ("segment_ids", "positions")]
    length = lambda name: INPUTS if name.startswith("encoder") else TARGETS
    row = partitioner.batch_sharding
    return {name: jax.ShapeDtypeStruct((ROWS, length(name)), jnp.int32, sharding=row) for name in names}


def layout_of(partitioner: PjitPartitioner, **changes) -> StateLayout:
    model = tiny.model(dataclasses.replace(CONFIG, **changes))
    with partitioner.activate():
        return StateLayout.of(model, partitioner, {name: x.shape for name, x in batch_of(partitioner).items()})


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize(
    ("backend", "preset"),
    [("pallas", "dp"), ("pallas", "fsdp"), ("pallas", "tp"), ("pallas", "2d"), ("xla", "fsdp")],
    ids=str,
)
def test_a_train_step_compiles(monkeypatch, generation, backend, preset):
    partitioner = partitioner_of(monkeypatch, generation, preset)
    layout = layout_of(partitioner, attention_backend=backend)
    with partitioner.activate():
        trainer = abstract_trainer(layout, learning_rate_fn=lambda step: 1e-3, num_microbatches=2)
    step = trainer._partitioned_train_step.lower(layout.abstract, batch_of(partitioner, packed=True)).compile()
    assert ("tpu_custom_call" in step.as_text()) == (backend == "pallas")


@pytest.mark.parametrize("beams", [1, 4])
def test_scoring_and_decoding_compile(monkeypatch, beams):
    partitioner = partitioner_of(monkeypatch, "v5e", "dp")
    layout = layout_of(partitioner, dropout_rate=0.0, attention_backend="pallas")
    model: EncoderDecoderModel = layout.model
    for compute in (
        lambda params, batch: model.predict_batch_with_aux(params, batch, num_decodes=beams),
        lambda params, batch: model.score_batch(params, batch),
    ):
        run = partitioner.partition(compute, (layout.shardings.params, partitioner.batch_sharding), None, decodes=True)
        assert run.lower(layout.abstract.params, batch_of(partitioner)).compile()


# The longest rows of T5's heads, and of heads of 128 that share their keys in pairs; twice as long, they are refused.
LONGEST = {"v4": (16384, 8192), "v5e": (131072, 65536), "v5p": (65536, 32768), "v6e": (131072, 65536)}


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("kind", [0, 1], ids=["T5", "wide"])
@pytest.mark.parametrize("length", [1, 100, 4096, "longest", "longer"])
def test_rows_fit_into_vector_memory_or_are_refused(monkeypatch, generation, kind, length):
    """Forward and backward pass of an encoder's attention."""
    heads, key_heads, width = ((2, 2, 64), (4, 2, 128))[kind]
    longest = LONGEST[generation][kind]
    length = {"longest": longest, "longer": 2 * longest}.get(length, length)
    device = devices_of(generation)[0]
    monkeypatch.setattr(devices, "device", lambda: device)
    array = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
    query, key = array(2, length, heads, width), array(2, length, key_heads, width)
    ids, table = array(2, length, dtype="int32"), array(heads, 32, dtype="float32")

    def gradients(query, key, table, ids):
        compute = lambda q, k, table: attend(
            q, k, k, mask=Mask(ids, ids), bias=RelativeBias(table, True), softcap=50.0, backend="pallas"
        ).astype(jnp.float32)
        return jax.grad(lambda *args: jnp.square(compute(*args)).sum(), (0, 1, 2))(query, key, table)

    lower = lambda: jax.jit(gradients).lower(query, key, table, ids)
    if length > longest:
        with pytest.raises(UserError, match=f"rows of {length} queries and {length} keys need .* MB of vector memory"):
            lower()
    else:
        assert lower().compile()


def test_the_bias_as_a_matrix_needs_no_larger_array():
    on_device = SingleDeviceSharding(devices_of("v5e")[0])
    table, weights = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=on_device) for shape in ((4, 32), (4, 2048, 2048))
    )
    matrix = lambda table: RelativeBias(table, True).matrix_by_matmul(2048, 2048)
    for compute in (matrix, lambda table, weights: jax.vjp(matrix, table)[1](weights)):
        program = jax.jit(compute).lower(*(table, weights)[: 1 + (compute is not matrix)]).compile()
        assert program.memory_analysis().temp_size_in_bytes < 4 * 2048 * 2048
