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

from t5x.bench.workload import SIZES
from t5x.models import EncoderDecoderModel
from t5x.network import attention
from t5x.network.attention import Mask, attend
from t5x.network.flash_attention import tpu_memory
from t5x.network.relative_position import RelativeBias
from t5x.partitioning import PjitPartitioner, devices, meshes
from t5x.trainer import StateLayout
from t5x.trainer.abstract_run import abstract_trainer
from tests import tiny

pytest.importorskip("libtpu", reason="compiles with libtpu: `make tpu`")

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
CONFIG = dataclasses.replace(SIZES["tiny"], head_dim=64, dtype="bfloat16", scan_layers=True, dropout_rate=0.1)
ROWS, INPUTS, TARGETS = 8, 300, 100


@functools.cache
def devices_of(generation: str) -> list[jax.Device]:
    # libtpu asks no metadata server, and shares no devices with other processes.
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return list(topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[generation]).devices)


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
    ("backend", "preset"), [("pallas", "dp"), ("pallas", "tp"), ("xla", "fsdp"), ("pallas", "2d")], ids=str
)
def test_a_train_step_compiles(monkeypatch, generation, backend, preset):
    partitioner = partitioner_of(monkeypatch, generation, preset)
    layout = layout_of(partitioner, attention_backend=backend)
    with partitioner.activate():
        trainer = abstract_trainer(layout, learning_rate_fn=lambda step: 1e-3, num_microbatches=2)
    step = trainer._partitioned_train_step.lower(layout.abstract, batch_of(partitioner, packed=True)).compile()
    assert ("tpu_custom_call" in step.as_text()) == (backend == "pallas")
    assert step.memory_analysis().temp_size_in_bytes > 0


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


@pytest.mark.parametrize("generation", TOPOLOGIES)
@pytest.mark.parametrize("length", [1, 100, 4096, 8192, 16384, 32768, 65536])
def test_rows_fit_into_vector_memory_or_are_refused(monkeypatch, generation, length):
    """Forward and backward pass of an encoder's attention with two kinds of heads."""
    device = devices_of(generation)[0]
    monkeypatch.setattr(devices, "device", lambda: device)
    monkeypatch.setattr(attention, "device", lambda: device)
    array = lambda *shape, dtype="bfloat16": jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))
    refused = []
    for heads, key_heads, width in ((2, 2, 64), (4, 2, 128)):
        query, key = array(2, length, heads, width), array(2, length, key_heads, width)
        reason = attention.pallas_refuses(query, key, Mask())
        assert (reason is not None) == (tpu_memory(query.shape, key.shape) > devices.vmem_bytes())
        refused.append(reason)
        if reason is not None:
            assert "vector memory" in reason
            continue

        def gradients(query, key, table, ids):
            compute = lambda q, k, table: attend(
                q, k, k, mask=Mask(ids, ids), bias=RelativeBias(table, True), softcap=50.0, backend="pallas"
            ).astype(jnp.float32)
            return jax.grad(lambda *args: jnp.square(compute(*args)).sum(), (0, 1, 2))(query, key, table)

        ids, table = array(2, length, dtype="int32"), array(heads, 32, dtype="float32")
        assert jax.jit(gradients).lower(query, key, table, ids).compile()
    assert refused == [None, None] or length > 4096
