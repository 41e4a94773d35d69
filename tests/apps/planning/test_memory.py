"""Memory and time: against JAX's own residuals, XLA's compiler for an H200, and measurements."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from benchmarks.bench.workload import SIZES, Workload
from t5x.apps.planning import estimates, memory
from t5x.apps.planning.memory import Share
from t5x.apps.planning.program import Collective, CompiledStep, collectives
from t5x.kernels.choice import ops, use
from t5x.telemetry.devices import parse_topology
from tests.kernels.simulated import nvidia

# Adafactor, bfloat16, one device. GB: measured, except scanned layers without `full`, which XLA's compiler for the H200
# assigns without a GPU. Milliseconds: docs/performance.md; with rematerialization, of older commits.
H200 = {
    "base": (128, 512, 128, "none", False, 30.58, 132.3),
    "large": (64, 512, 128, "none", False, 43.06, 214.4),
    "large, scanned": (64, 512, 128, "none", True, 48.9, None),
    "xl": (64, 512, 128, "none", False, 90.41, 643.8),
    "xl, full": (64, 512, 128, "full", True, 39.28, 845.0),
    "xl, minimal": (64, 512, 128, "minimal", True, 84.55, 875.0),
    "base, long": (16, 4096, 512, "none", False, 27.68, 220.8),
}


@pytest.mark.parametrize("case", H200)
def test_one_h200(case):
    batch, inputs, targets, remat, scan, gigabytes, milliseconds = H200[case]
    work = Workload(case.partition(",")[0], batch, inputs, targets, dtype="bfloat16", remat=remat, scan=scan)
    run = estimates.PlannedRun(work.model, batch, inputs, targets)
    topology = parse_topology("h200x1")
    share = estimates.share_of(run, topology, (1, 1))
    layout = estimates.layout_of(run, "dp", 1)  # replicated: each device has all of it
    found = estimates.peak_memory(run, share, layout, "dp", remat)
    assert sum(found.values()) / 1e9 == pytest.approx(gigabytes, rel=0.1)
    seconds = estimates.step_seconds(run, share, topology, layout, remat)
    assert milliseconds is None or 1e3 * sum(seconds.values()) == pytest.approx(milliseconds, rel=0.25)


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("remat", ["none", "minimal", "full"])
def test_scanned_layers_keep_what_jax_saves(remat, kernels):
    """With `kernels`, the layers are traced as for an NVIDIA GPU."""
    layers, rows = 3, 40
    config = dataclasses.replace(
        SIZES["tiny"], dtype="bfloat16", scan_layers=True, remat_policy=remat, num_encoder_layers=layers,
        num_decoder_layers=layers, emb_dim=128, num_heads=2, head_dim=64, mlp_dim=192, attention_backend="xla",
    )  # fmt: skip
    work = Workload("tiny", rows, 48, 16)
    model = estimates.PlannedRun(work.model, rows, 48, 16).with_config(**dataclasses.asdict(config)).model
    shapes = model.input_shapes({"inputs": 48, "targets": 16})
    params = jax.eval_shape(lambda: model.get_initial_variables(jax.random.key(0), shapes))["params"]
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in next(work.batches()).items()}
    with use(nvidia() if kernels else ops()):
        traced = jax.make_jaxpr(jax.grad(lambda params, batch: model.loss_fn(params, batch)[0]))(params, batch)
    # Stacked results of the forward scans, without those of the weights, which have no batch dimension.
    kept = [
        out.aval for scan in scans(traced.jaxpr, layers) for out in scan.outvars
        if not scan.params["reverse"] and out.aval.shape[:2] == (layers, rows)
    ]  # fmt: skip
    expected = sum(x.size * x.dtype.itemsize for x in kept)
    share = Share(rows, inputs=48, targets=16, fused_attention=False, fused_layers=kernels)
    assert memory.saved_bytes(config, share, remat) == pytest.approx(expected, rel=0.06)


def scans(jaxpr, length):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and equation.params["length"] == length:
            yield equation
        else:
            for inner in jaxprs_in_params(equation.params):
                yield from scans(inner, length)


@pytest.mark.parametrize(
    ("device", "backend", "dtype", "fused"),
    [
        ("v5e-1", "auto", "bfloat16", False),
        ("v5e-1", "pallas", "bfloat16", True),
        ("h200x1", "auto", "bfloat16", True),
        ("h200x1", "auto", "float32", False),
        ("h200x1", "xla", "bfloat16", False),
    ],
)
def test_attention_weights_take_memory_without_fused_attention(device, backend, dtype, fused):
    work = Workload("base", 4, 4096, 512, dtype=dtype, attention=backend)
    run = estimates.PlannedRun(work.model, 4, 4096, 512)
    share = estimates.share_of(run, parse_topology(device), (1, 1))
    weights = 4 * 12 * 4096**2 * 12  # rows, heads, queries and keys, layers
    assert (memory.saved_bytes(run.config, share, "none") < 4 * weights) == fused


@pytest.mark.slow
def test_a_backend_that_a_cpu_lacks_can_be_planned():
    work = Workload("tiny", 2, 32, 16, dtype="bfloat16", attention="pallas")
    topology = parse_topology("v5e-1")
    found = estimates.estimate(estimates.PlannedRun(work.model, 2, 32, 16), topology, "dp", (1, 1))
    assert found.peak("none") > 0 and found.compiled.temporaries > 0


def test_caches_are_those_of_the_model():
    config = dataclasses.replace(SIZES["tiny"], dtype="bfloat16")
    module = Workload("tiny", 2, dtype="bfloat16").model.module
    tokens = lambda length: jnp.ones((2, length), jnp.int32)
    variables = jax.eval_shape(lambda: module.init(jax.random.key(0), tokens(24), tokens(8), tokens(8), decode=True))
    caches = [x for name in ("cache", "cross_cache") for x in jax.tree.leaves(variables[name]) if x.ndim == 4]
    expected = sum(x.size * x.dtype.itemsize for x in caches)
    assert memory.cache_bytes(config, Share(rows=2, inputs=24, targets=8)) == expected


def test_names_of_topologies():
    sizes = {"v2-8": 8, "v4-32": 16, "v5p-64": 32, "v4-256": 128, "v5litepod-16": 16, "v6e-8": 8, "h200x8": 8,
             "a100-40gbx2": 2, "rtx-4090x2": 2}  # fmt: skip
    for name, devices in sizes.items():
        assert parse_topology(name).devices == devices, name
    assert parse_topology("a100-40gbx2").chip.memory == 40
    assert parse_topology("a100x64").per_machine == 8


HLO = """
%layer (arg: f32[8]) -> f32[8] {
  %gather.1 = bf16[8,128]{1,0} all-gather(%arg), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
}
%condition (arg: f32[8]) -> pred[] {
}
ENTRY %main (arg: f32[8]) -> f32[8] {
  %loop = f32[8]{0} while(%arg), condition=%condition, body=%layer, backend_config={"known_trip_count":{"n":"24"}}
  %sum = (f32[256]{0}, f32[]) all-reduce-start(%a, %b), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %part = f32[16]{0} reduce-scatter(%a), replica_groups=mesh['data'=4,'model'=2] {'data'}, dimensions={0}
  %alone = f32[16]{0} all-reduce(%a), replica_groups=mesh['data'=8,'model'=1] {'model'}, to_apply=%add
}
"""


def test_collectives_of_a_program():
    found = {collective.kind: collective for collective in collectives(HLO, per_machine=4)}
    assert found["all-gather"] == Collective("all-gather", 24, 2 * 8 * 128, group=4, across=True)
    assert found["all-reduce"] == Collective("all-reduce", 1, 4 * 257, group=2, across=False)
    assert found["reduce-scatter"] == Collective("reduce-scatter", 1, 4 * 16 * 4, group=4, across=True)
    assert found["all-reduce"].traffic == 4 * 257  # twice, to the one other device
    assert CompiledStep(0, 0, list(found.values())).counts() == {"all-gather": 24, "all-reduce": 1, "reduce-scatter": 1}
