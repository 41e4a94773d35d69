"""Our fused attention kernels, run by Pallas's interpreter, against the reference; on a GPU, compiled.

Those for TPUs are always interpreted; `make tpu` compiles them (test_tpu_programs.py).

Several devices are in test_prepared_attention.py.

T5X_TEST_PLATFORM=cuda pytest tests/kernels/test_flash_attention.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from t5x.kernels import flash_preparation as flash
from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.choice import ops
from t5x.kernels.flash_attention import flash_attention
from t5x.kernels.flash_kernels import Block, MaskRules, Tiles
from tests.support.marks import mark_slow
from tests.support.tiny import arrays, segments

ON_GPU = jax.default_backend() == "gpu"
SMALL = flash.Blocks(Block(32, 16), Block(16, 16), Block(16, 32), Block(32, 32))
TPU_INTERPRETER = tpu.InterpretParams(uninitialized_memory="nan", out_of_bounds_reads="raise")
FOR_TPU = flash.Blocks(Block(32, 16), Block(16, 32), Block(32, 16), Block(16, 32))
OTHER = flash.Blocks(Block(16, 32), Block(32, 16), Block(32, 16), Block(32, 16))


@pytest.fixture(autouse=True)
def _exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def packed(rows: int, length: int, examples: int, seed: int = 0) -> jax.Array:
    """int32 [rows, length]: segments of random lengths, padding behind them and in two places between."""
    rng = np.random.default_rng(seed)
    made = np.sort(rng.integers(1, examples + 1, (rows, length)), axis=1)
    made[np.arange(length) >= rng.integers(length // 2, length + 1, (rows, 1))] = 0
    made[:, [3, length // 3]] = 0
    return jnp.array(made, jnp.int32)


def check(
    q, k, mask, *, heads=2, key_heads=2, width=16, bidirectional=None, softcap=None, blocks=None, dtype="float32",
    for_tpu=False, buckets=32, max_distance=20,
):  # fmt: skip
    """Outputs and all gradients within 1 % of the float32 reference; float32 inputs within 0.1 %."""
    shapes = [
        (2, q, heads, width),
        (2, k, key_heads, width),
        (2, k, key_heads, width),
        (2, q, heads, width),
        (heads, buckets),
    ]
    *parts, weights, table = (jnp.asarray(np.asarray(x), dtype) for x in arrays(*shapes, seed=q))
    table = 2 * np.asarray(table, np.float32)
    bias_of = lambda table: None if bidirectional is None else RelativeBias(table, bidirectional, max_distance)

    def ours(query, key, value, table):
        return flash_attention(
            query, key, value, mask, bias_of(table), softcap=softcap, blocks=blocks,
            target="tpu" if for_tpu else ops().flash_target,
            interpret=TPU_INTERPRETER if for_tpu else not ON_GPU,
        )  # fmt: skip

    def reference(*args):
        *args, table = (x.astype(jnp.float32) for x in args)
        allowed = mask.allowed(q, k)
        is_seen = 1.0 if allowed is None else jnp.broadcast_to(allowed, (2, 1, q, k)).any(-1).swapaxes(1, 2)[..., None]
        return is_seen * ops().attend_xla(*args, mask, bias_of(table), softcap)

    def results(function):
        out, backward = jax.vjp(function, *parts, table)
        return out, *backward(weights.astype(out.dtype))

    found, wanted = jax.jit(lambda: [results(function) for function in (ours, reference)])()
    tolerance = 1e-2 if ON_GPU or dtype != "float32" else 1e-3
    for name, one, other in zip(("out", "query", "key", "value", "table"), found, wanted, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        assert np.linalg.norm(one - other) <= tolerance * np.linalg.norm(other), name


BOTH = pytest.mark.parametrize("for_tpu", [False, True], ids=["gpu", "tpu"])
GPU_EVERY_DAY = pytest.mark.parametrize("for_tpu", mark_slow({"gpu": False, "tpu": True}, slow=["tpu"]))


def on(for_tpu: bool, blocks: flash.Blocks) -> dict:
    """Return the options of `check` for a TPU, or for a GPU with these blocks."""
    return {"for_tpu": for_tpu, "blocks": FOR_TPU if for_tpu else blocks}


def dtype_here(dtype: str = "bfloat16") -> str:
    """float32 says most; a GPU's kernel does not take it."""
    return dtype if ON_GPU else "float32"


@pytest.mark.parametrize("blocks", [SMALL, *(pytest.param(x, marks=pytest.mark.slow) for x in (OTHER, FOR_TPU))])
def test_an_encoder_with_packed_rows_of_an_odd_length(blocks):
    ids = packed(2, 85, 3)
    mask = Mask(key_segments=ids, query_segments=ids)
    check(85, 85, mask, bidirectional=True, blocks=blocks, dtype=dtype_here(), for_tpu=blocks is FOR_TPU)


@pytest.mark.slow
@GPU_EVERY_DAY
@pytest.mark.parametrize("bidirectional", [False, True])
def test_other_numbers_of_buckets_and_a_larger_distance(for_tpu, bidirectional):
    mask = Mask(key_segments=packed(2, 330, 1), causal=not bidirectional)
    options = {"bidirectional": bidirectional, "buckets": 64, "max_distance": 256, "dtype": dtype_here()}
    check(330, 330, mask, for_tpu=for_tpu, width=64, **options)


@pytest.mark.slow
def test_packed_rows_on_a_tpu_in_bfloat16_with_the_blocks_that_are_chosen():
    ids = packed(2, 300, 3)
    check(300, 300, Mask(ids, ids), width=64, bidirectional=True, dtype="bfloat16", for_tpu=True)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_decoder_in_narrow_types_with_the_blocks_that_are_chosen(dtype):
    check(70, 70, Mask(key_segments=segments([70, 9], 70), causal=True), bidirectional=False, width=64, dtype=dtype)


@GPU_EVERY_DAY
def test_cross_attention_with_padding_and_shared_key_heads(for_tpu: bool):
    mask = Mask(key_segments=segments([53, 20], 53))
    check(37, 53, mask, heads=4, width=20, dtype=dtype_here(), **on(for_tpu, OTHER))


@BOTH
def test_full_rows_without_any_mask(for_tpu: bool):
    check(96, 96, Mask(), bidirectional=True, dtype=dtype_here(), **on(for_tpu, SMALL))


@GPU_EVERY_DAY
def test_a_prefix_in_packed_rows_sees_itself(for_tpu: bool):
    ids = packed(2, 80, 2)
    prefix = jnp.array(np.tile(np.arange(80) % 40 < 15, (2, 1)))
    mask = Mask(key_segments=ids, query_segments=ids, prefix=prefix, causal=True)
    check(80, 80, mask, bidirectional=False, dtype=dtype_here(), **on(for_tpu, SMALL))


@GPU_EVERY_DAY
def test_a_window_and_a_softcap_with_shared_key_heads(for_tpu: bool):
    mask = Mask(key_segments=packed(2, 80, 1), window=13)
    check(80, 80, mask, key_heads=1, bidirectional=True, softcap=0.7, dtype=dtype_here(), **on(for_tpu, OTHER))


def test_the_kernels_for_tpus_lower_with_the_blocks_that_are_chosen():
    ids = jax.ShapeDtypeStruct((2, 300), jnp.int32)
    array = lambda heads: jax.ShapeDtypeStruct((2, 300, heads, 64), jnp.bfloat16)

    def gradients(query, key, table, ids, prefix):
        mask = Mask(ids, ids, prefix=prefix, causal=True, window=200)
        compute = lambda query, key, table: flash_attention(
            query, key, key, mask, RelativeBias(table, False), softcap=50.0, target="tpu"
        )
        return jax.vjp(compute, query, key, table)[1](query)

    traced = jax.jit(gradients).trace(array(4), array(2), jax.ShapeDtypeStruct((4, 32), jnp.float32), ids, ids)
    assert traced.lower(lowering_platforms=("tpu",)).as_text().count("tpu_custom_call") == 3


@pytest.mark.parametrize("head_dim", [64, 128])
def test_chosen_blocks_fit_short_rows_and_one_another(head_dim: int):
    for q, k in [(1, 1), (7, 600), (40, 40), (128, 512), (512, 512), (4096, 4096), (600, 3)]:
        blocks = flash.choose_blocks(q, k, head_dim)
        for block in blocks:
            assert 16 <= block.q <= max(16, 2 * q) and 16 <= block.k <= max(16, 2 * k)
        assert blocks.bias.q % blocks.query.q == blocks.bias.k % blocks.query.k == blocks.bias.q % blocks.bias.k == 0
        assert blocks.key.k == min(64, max(16, pl.next_power_of_2(k)))  # short queries leave the keys' blocks whole


@pytest.mark.parametrize("seed", mark_slow(range(12), slow=[*range(1, 9), 10]))
def test_no_block_with_work_is_skipped(seed: int):
    rng = np.random.default_rng(seed)
    block = Block(*rng.choice([(4, 4), (8, 4), (4, 8)]))
    q, k = (int(n) * 8 for n in rng.integers(1, 6, 2))
    causal = bool(rng.integers(2))
    prefix = jnp.array(np.arange(k) < rng.integers(0, k, (2, 1))) if causal and q == k else None
    ids = [None, segments(rng.integers(0, k + 1, 2), k), packed(2, k, 3, seed)][rng.integers(3)]
    mask = Mask(ids, ids if q == k else None, prefix=prefix, causal=causal, window=[None, 5][rng.integers(2)])
    codes_of = lambda: flash._codes((2, q), mask.key_segments, mask.query_segments, mask.prefix)
    rules = MaskRules(jax.eval_shape(codes_of)[0] is not None, causal, prefix is not None, mask.window)
    ranges = lambda of_keys: flash.block_ranges(rules, block, (q, k), *codes_of(), of_keys=of_keys)
    allowed, *ranges = jax.jit(lambda: (mask.allowed(q, k), ranges(False), ranges(True)))()
    allowed = np.broadcast_to(True if allowed is None else np.asarray(allowed), (2, 1, q, k))[:, 0]
    blocks = allowed.reshape(2, q // block.q, block.q, k // block.k, block.k)
    some, every = blocks.any((2, 4)), blocks.all((2, 4))
    for of_keys, found in enumerate(map(np.asarray, ranges)):
        first, whole_first, whole_last, last = np.moveaxis(found, 1, 0)[..., None]
        at = np.arange((q // block.q) if of_keys else (k // block.k))
        is_visited, is_whole = (at >= first) & (at < last), (at >= whole_first) & (at < whole_last)
        work, full = (np.swapaxes(x, 1, 2) if of_keys else x for x in (some, every))
        assert (work <= is_visited).all()
        assert ((is_whole & is_visited) <= full).all()
        if rules == MaskRules():
            assert is_whole.all()


def test_blocks_of_examples_that_share_no_segment_are_skipped():
    ids = jnp.array(np.repeat(np.arange(1, 5, dtype=np.int32), 8)[None])
    ranges = jax.jit(lambda ids: flash.block_ranges(MaskRules(coded=True), Block(8, 8), (32, 32), ids, ids))(ids)
    np.testing.assert_array_equal(ranges[0], [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]])


@pytest.mark.parametrize("block", [Block(8, 8), Block(16, 8), Block(8, 16)])
@pytest.mark.parametrize("reach", [(18, 18), (20, 0), (1, 7)])
def test_near_blocks_are_those_whose_bias_is_not_constant(block: Block, reach: tuple[int, int]):
    tiles, seen = Tiles(block, reach), set()
    near_keys, near_queries = (
        [range(*map(int, of(n))) for n in range(12)] for of in (tiles.near_keys, tiles.near_queries)
    )
    for i in range(12):
        for j in range(12):
            distance = np.arange(block.k) + j * block.k - (np.arange(block.q) + i * block.q)[:, None]
            is_near = ((distance > -reach[0]) & (distance < reach[1])).any()
            assert is_near == (j in near_keys[i]) == (i in near_queries[j])
            if is_near:
                seen.add(number := tiles.number(i, j))
                assert 0 <= number < tiles.count and (number + tiles.first) * tiles.unit == distance[0, 0]
    assert len(seen) == tiles.count
