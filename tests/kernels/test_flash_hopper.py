"""The forward kernel for Hopper GPUs. On a CPU it is only lowered; T5X_TEST_PLATFORM=cuda pytest runs it on a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.kernels import flash_hopper as hopper
from t5x.kernels import flash_preparation
from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.choice import ops
from t5x.kernels.flash_kernels import MaskRules
from t5x.kernels.gpu_ops import HopperOps
from tests.kernels.test_flash_attention import packed
from tests.support.tiny import arrays, segments

RULES = [
    MaskRules(reach=(113, 113)),
    MaskRules(coded=True, reach=(113, 113)),
    MaskRules(coded=True, causal=True, prefix=True, reach=(113, 0)),
    MaskRules(causal=True),
    MaskRules(coded=True, window=100, softcap=50.0),
]


@pytest.mark.parametrize("rules", RULES, ids=str)
def test_it_lowers_for_a_gpu(rules: MaskRules):
    array = lambda *shape, dtype="int32": jax.ShapeDtypeStruct(shape, dtype)
    query, key = array(4, 512, 4, 64, dtype="bfloat16"), array(4, 256, 2, 64, dtype="bfloat16")
    q_codes, k_codes = (array(4, 512), array(4, 256)) if rules.coded else (None, None)

    def compute(query, key, values, q_codes, k_codes, ranges):
        strip = None if rules.reach is None else hopper.bias_strip(values, rules.reach)
        return hopper.forward(query, key, key, strip, q_codes, k_codes, ranges, rules)

    arguments = query, key, array(4, 601, dtype="float16"), q_codes, k_codes, array(4, 4, 4)
    lowered = jax.jit(compute).trace(*arguments).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@pytest.mark.parametrize("reach", [(113, 113), (1, 0), (128, 128), (65, 64), (64, 1), (0, 0), (250, 13)])
def test_the_strip_has_the_bias_of_every_block(reach: tuple[int, int]):
    extent = max(reach) + 5
    values = np.random.default_rng(0).normal(size=(1, 2 * extent + 1)).astype(np.float32)
    values[:, : extent - reach[0]], values[:, extent + reach[1] :] = values[:, extent - reach[0], None], values[0, -1]
    strip = np.asarray(jax.jit(hopper.bias_strip, static_argnums=1)(values, reach))[0]
    for first_query in range(0, 1024, 64):
        for first_key in range(0, 1024, hopper.BLOCK.k):
            column = int(hopper.strip_column(reach, first_key - first_query))
            distances = np.arange(hopper.BLOCK.k) + first_key - (np.arange(64)[:, None] + first_query)
            wanted = values[0, np.clip(distances, -extent, extent) + extent]
            np.testing.assert_array_equal(strip[:, column : column + hopper.BLOCK.k], wanted)


PREFIX = jnp.tile(jnp.arange(300) % 150 < 40, (40, 1))
CASES = {
    "full rows": ((512, 512), 4, "bfloat16", lambda: Mask(), True),
    "padding": ((512, 512), 4, "float16", lambda: Mask(key_segments=segments([512, 300, 1, 0] * 10, 512)), True),
    "packed": ((384, 384), 2, "bfloat16", lambda: Mask(packed(40, 384, 4), packed(40, 384, 4)), True),
    "prefix": ((300, 300), 4, "bfloat16", lambda: Mask(*[packed(40, 300, 2)] * 2, prefix=PREFIX, causal=True), False),
    "causal": ((300, 300), 4, "bfloat16", lambda: Mask(segments([300, 77] * 20, 300), causal=True), False),
    "cross": ((100, 700), 2, "float16", lambda: Mask(segments([700, 130] * 20, 700)), None),
    "window": ((600, 600), 1, "bfloat16", lambda: Mask(window=70), True),
    "long": ((2048, 2048), 4, "bfloat16", lambda: Mask(segments([2048, 1500] * 4, 2048)), True),
}


@pytest.mark.skipif(not isinstance(ops(), HopperOps), reason="needs a Hopper GPU, and T5X_TEST_PLATFORM=cuda")
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_agree_with_the_reference(case: str):
    (q, k), key_heads, dtype, mask, bidirectional = CASES[case]
    mask = mask()
    softcap = {"softcap": 2.0} if case == "window" else {}
    bias_of = lambda table: None if bidirectional is None else RelativeBias(table, bidirectional)
    plan = flash_preparation.make_plan((q, k), 64, mask, bias_of(jnp.zeros((4, 32))), target="hopper")
    assert plan.target == "hopper"
    rows = 40 if max(q, k) < 1000 else 8  # several items for each thread block
    shapes = [(rows, q, 4, 64), (rows, k, key_heads, 64), (rows, k, key_heads, 64), (rows, q, 4, 64), (4, 32)]
    query, key, value, weights, table = (x.astype(dtype) for x in arrays(*shapes, seed=q))
    query, table = 0.3 * query, 2 * table.astype(jnp.float32)
    allowed = mask.allowed(q, k)
    is_seen = 1.0 if allowed is None else jnp.broadcast_to(allowed, (rows, 1, q, k)).any(-1).swapaxes(1, 2)[..., None]

    def results(attend, *arguments):
        def compute(query, key, value, table):
            return attend(query, key, value, mask, bias_of(table), **softcap)

        out, backward = jax.vjp(compute, *arguments, table)
        return out, *backward(weights.astype(out.dtype))

    reference = lambda *x, **options: is_seen * ops().attend_xla(*x, **options)
    with jax.default_matmul_precision("highest"):
        found = jax.jit(lambda *x: results(ops().attend_pallas, *x))(query, key, value)
        wide = (x.astype(jnp.float32) for x in (query, key, value))
        wanted = jax.jit(lambda *x: results(reference, *x))(*wide)
    for name, one, other in zip(("out", "query", "key", "value", "table"), found, wanted, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= 1e-2 * np.linalg.norm(other), name
