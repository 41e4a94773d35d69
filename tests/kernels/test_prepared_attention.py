"""Attention that a tower prepares once for its layers: the same results, and no work repeated in layers."""

import dataclasses
import os
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.choice import ops, use
from t5x.network import DecoderWrapper, Transformer, TransformerConfig, attention
from tests.kernels.simulated import InterpretedAttention
from tests.support import tiny
from tests.support.marks import mark_slow
from tests.support.paths import REPO
from tests.support.programs import run_python
from tests.support.tiny import arrays, segments

ON_GPU = jax.default_backend() == "gpu"
DTYPE = "bfloat16" if ON_GPU else "float32"
TOLERANCE = {"rtol": 5e-2, "atol": 5e-2} if ON_GPU else {"rtol": 2e-3, "atol": 2e-3}
IDS = jnp.array([[1] * 9 + [2] * 14 + [0] * 10, [1] * 20 + [2] * 6 + [3] * 7], jnp.int32)
PREFIX = jnp.tile(jnp.arange(33) % 20 < 8, (2, 1))


@pytest.fixture(autouse=True)
def _kernel_everywhere():
    """Let `attention_backend="pallas"` use the interpreter on a CPU."""
    with jax.default_matmul_precision("highest"), use(ops() if ON_GPU else InterpretedAttention()):
        yield


def results(mask: Mask, bidirectional: bool | None, *, is_prepared: bool, key_heads: int = 2, **options):
    """Return the output and all gradients of one attention."""
    shapes = [(2, 33, 2, 16), (2, 33, key_heads, 16), (2, 33, key_heads, 16)]
    *parts, weights = (x.astype(DTYPE) for x in arrays(*shapes, shapes[0]))
    (table,) = arrays((2, 32))

    def compute(query, key, value, table):
        bias, seen = None if bidirectional is None else RelativeBias(table, bidirectional), mask
        if is_prepared:
            like = jax.ShapeDtypeStruct(query.shape, query.dtype)
            seen, bias = attention.prepare(like, like, mask, bias, "pallas")
            assert seen.prepared is not None and (bias is None or bias.prepared is not None)
        return attention.attend(query, key, value, mask=seen, bias=bias, backend="pallas", **options)

    out, backward = jax.jit(lambda *args: jax.vjp(compute, *args))(*parts, table)
    return out, *jax.jit(backward)(weights.astype(out.dtype))


CASES = {
    "packed": (Mask(IDS, IDS), True, {}),
    "causal with a prefix": (Mask(IDS, IDS, prefix=PREFIX, causal=True), False, {}),
    "without a bias": (Mask(segments([33, 5], 33)), None, {}),
    "full rows": (Mask(causal=True), False, {}),
    # These are not what was prepared for.
    "softcap": (Mask(window=5), True, {"softcap": 0.7}),
    "shared key heads": (Mask(IDS, IDS), True, {"key_heads": 1}),
}


@pytest.mark.parametrize("case", mark_slow(list(CASES), slow=CASES.keys() - {"packed"}))
def test_prepared_attention_is_bitwise_the_same(case):
    mask, bidirectional, options = CASES[case]
    found, wanted = (results(mask, bidirectional, is_prepared=made, **options) for made in (True, False))
    for name, one, other in zip(("out", "query", "key", "value", "table"), found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other), err_msg=name)


def test_prepared_attention_is_not_used_for_other_fields():
    like = jax.ShapeDtypeStruct((2, 33, 2, 16), jnp.dtype(DTYPE))
    prepare = lambda *parts: attention.prepare(like, like, *parts, "pallas")
    mask, bias = jax.jit(prepare)(Mask(IDS, IDS), RelativeBias(arrays((2, 32))[0], True))
    assert mask.prepared is not None and bias.prepared is not None
    assert mask.replace(key_segments=IDS[::-1]).prepared is None
    assert bias.replace(table=2 * bias.table).prepared is None
    # A user's layer that attends to something shorter with the same bias.
    query, key, value = (x.astype(DTYPE) for x in arrays(*[(2, 20, 2, 16)] * 3))
    plain = RelativeBias(bias.table, True)
    attend = jax.jit(lambda bias: attention.attend(query, key, value, mask=Mask(), bias=bias, backend="pallas"))
    found, wanted = attend(bias), attend(plain)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


@pytest.mark.parametrize(
    "mask", mark_slow({"full rows": Mask(), "padding": Mask(segments([33, 5, 20, 33], 33))}, slow=["padding"])
)
@pytest.mark.slow
def test_a_layer_may_attend_with_some_of_the_rows(mask):
    query, key, value, weights = (x.astype(DTYPE) for x in arrays(*[(4, 33, 2, 16)] * 4))
    some = lambda tree: jax.tree.map(lambda x: x[:2], tree)

    def gradient(table, is_prepared):
        seen, bias = mask, RelativeBias(table, True)
        if is_prepared:
            seen, bias = attention.prepare(query, key, mask, bias, "pallas")
        seen = dataclasses.replace(seen, key_segments=some(mask.key_segments))  # keeps what was prepared
        out = attention.attend(*map(some, (query, key, value)), mask=seen, bias=bias, backend="pallas")
        return (some(weights) * out).sum()

    found, wanted = (jax.jit(jax.grad(lambda t, made=made: gradient(t, made)))(arrays((2, 32))[0]) for made in (1, 0))
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


def test_other_backends_get_nothing_prepared():
    like = jax.ShapeDtypeStruct((2, 33, 2, 16), jnp.dtype(DTYPE))
    mask, bias = Mask(IDS, IDS), RelativeBias(jnp.zeros((2, 32)), True)
    one_key = jax.ShapeDtypeStruct((2, 1, 2, 16), like.dtype)
    for key, backend in ((like, "xla"), (one_key, "pallas")):
        made = attention.prepare(like, key, mask, bias, backend)
        assert made[0] is mask and made[1] is bias
    with attention.by_reference():
        assert attention.prepare(like, like, mask, bias, "pallas")[0] is mask


CONFIG = dataclasses.replace(
    tiny.T5_1_1, num_encoder_layers=2, num_decoder_layers=1, num_heads=2, head_dim=16, attention_backend="pallas",
    dtype=DTYPE,
)  # fmt: skip


def network_and_params(config, batch):
    """Return the logits as a function of parameters and options, and random parameters."""
    network = Transformer(config)
    inputs = [batch[f"{name}_tokens"] for name in ("encoder_input", "decoder_input", "decoder_target")]
    ids = {name: batch[name] for name in ("encoder_segment_ids", "decoder_segment_ids") if name in batch}
    params = tiny.random_params(dataclasses.replace(config, attention_backend="xla"))

    def logits(params, enable_dropout=False):
        return network.apply(
            {"params": params}, *inputs, **ids, enable_dropout=enable_dropout, rngs={"dropout": jax.random.key(1)}
        )

    return logits, params


def logits_and_gradients(config, batch, enable_dropout=False):
    logits, params = network_and_params(config, batch)
    weights = batch["decoder_loss_weights"][..., None]

    def loss(params):
        made = logits(params, enable_dropout) * weights
        return made.var(), made

    return jax.jit(jax.grad(loss, has_aux=True)), params


NETWORKS = {
    "unrolled": ({}, False),
    "dropout": ({"dropout_rate": 0.2}, True),
    "scanned": ({"scan_layers": True}, True),
    "remat": ({"remat_policy": "full"}, True),
    "a bias per layer": ({"per_layer_relative_position_bias": True}, False),
}


@pytest.mark.parametrize("case", list(NETWORKS))
@pytest.mark.slow
def test_networks_that_prepare_have_the_logits_and_gradients_of_the_reference(case):
    changes, enable_dropout = NETWORKS[case]
    config = dataclasses.replace(CONFIG, **changes)

    def results(backend):
        made = dataclasses.replace(config, attention_backend=backend)
        step, params = logits_and_gradients(made, tiny.packed_batch(), enable_dropout)
        return step(params)

    (found, found_logits), (wanted, wanted_logits) = map(results, ("pallas", "xla"))
    np.testing.assert_allclose(found_logits, wanted_logits, **TOLERANCE)
    found, wanted = map(jax.tree.leaves_with_path, (found, wanted))
    for (path, one), (_, other) in zip(found, wanted, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        scale = np.linalg.norm(other)
        assert scale > 0 and np.linalg.norm(one - other) <= (5e-2 if ON_GPU else 5e-3) * scale, path


@pytest.mark.slow  # the logits of networks[dropout], and a decoder alone without gradients
def test_inference_prepares_and_computes_the_same_as_the_reference():
    found, wanted = (
        jax.jit(logits)(params)
        for logits, params in (
            network_and_params(dataclasses.replace(CONFIG, attention_backend=backend), tiny.batch())
            for backend in ("pallas", "xla")
        )
    )
    np.testing.assert_allclose(found, wanted, **TOLERANCE)


@pytest.mark.slow
def test_a_decoder_alone_prepares_its_prefix():
    config = TransformerConfig(
        vocab_size=31, emb_dim=12, num_heads=2, head_dim=16, mlp_dim=20, num_layers=1, dropout_rate=0.0, dtype=DTYPE
    )
    tokens = jnp.array(tiny.batch()["encoder_input_tokens"])
    prefix = (jnp.arange(tokens.shape[1]) < 4)[None] * (tokens > 0)
    wrapped = lambda backend: DecoderWrapper(dataclasses.replace(config, attention_backend=backend))
    abstract = jax.eval_shape(lambda: wrapped("xla").init(jax.random.key(0), tokens, tokens, enable_dropout=False))
    rng = np.random.default_rng(0)
    params = {"params": jax.tree.map(lambda x: 0.3 * rng.normal(size=x.shape).astype(x.dtype), abstract["params"])}

    def logits(backend):
        compute = lambda: wrapped(backend).apply(
            params, tokens, tokens, decoder_causal_attention=prefix, enable_dropout=False
        )  # fmt: skip
        return jax.jit(compute)()

    np.testing.assert_allclose(logits("pallas"), logits("xla"), **TOLERANCE)


def count_primitives(jaxpr) -> Counter:
    """Count the primitives of a program; a function that is called twice counts twice."""
    counts = Counter()
    for equation in jaxpr.eqns:
        counts[equation.primitive.name] += 1
        if equation.primitive.name != "pallas_call":
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    counts += count_primitives(getattr(inner, "jaxpr", inner))
    return counts


@pytest.mark.slow
def test_layers_do_not_repeat_the_preparation():
    def counts(layers):
        config = dataclasses.replace(CONFIG, num_encoder_layers=layers, num_decoder_layers=layers)
        step, params = logits_and_gradients(config, tiny.packed_batch())
        return count_primitives(step.trace(params).jaxpr.jaxpr)

    one, two = counts(1), counts(2)
    assert two["pallas_call"] == 2 * one["pallas_call"]
    # Lists of visits are sorted, tiles are gathered, ranges of blocks are minima.
    for primitive in ("sort", "gather", "reduce_min", "argsort"):
        assert two[primitive] == one[primitive], primitive
    assert one["sort"] == 2 and one["reduce_min"] > 0


# Run with four devices, two for rows and two for heads.
DIVIDED = """
import jax, jax.numpy as jnp, numpy as np
from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.choice import use
from t5x.network import attention
from t5x.partitioning import PjitPartitioner
from t5x.partitioning.logical import axis_rules
from tests.kernels.simulated import InterpretedAttention
from tests.support.tiny import arrays
partitioner = PjitPartitioner(preset="tp", num_partitions=2)
def check(rows, segmented, ways):
    query, key, value, weights = arrays(*[(rows, 40, 2, 16)] * 4)
    (table,) = arrays((2, 32))
    ids = jnp.sort(jax.random.randint(jax.random.key(0), (rows, 40), 0, 4))[:, ::-1] if segmented else None
    def gradients(is_prepared, backend):
        def loss(query, key, value, table):
            mask, bias = Mask(ids, ids, causal=True), RelativeBias(table, False)
            if is_prepared:
                mask, bias = attention.prepare(query, key, mask, bias, "pallas")
            made = attention.attend(query, key, value, mask=mask, bias=bias, backend=backend)
            return (weights * made * (1 if ids is None else (ids > 0)[..., None, None])).sum()
        def traced(*args):
            with axis_rules(partitioner.mesh, partitioner.rules), use(InterpretedAttention(TARGET)):
                return jax.value_and_grad(loss, (0, 1, 2, 3))(*args)
        lowered = jax.jit(traced).lower(query, key, value, table)
        assert backend == "xla" or "sdy.manual_computation" in lowered.as_text() or "shard_map" in lowered.as_text()
        return jax.tree.leaves(lowered.compile()(query, key, value, table))
    exact = gradients(False, "xla")
    for is_prepared in ways:
        for one, other in zip(gradients(is_prepared, "pallas"), exact, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)
for rows, segmented, ways in CASES:
    check(rows, segmented, ways)
print(dict(partitioner.mesh.shape))
"""


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="has the devices that there are")
@pytest.mark.parametrize(
    ("case", "target"),
    [
        ("(4, True, (1, 0)), (4, False, (1,))", "triton"),
        ("(3, True, (1,)),", "triton"),
        ("(4, True, (1, 0)), (4, False, (1,))", "tpu"),
    ],
    ids=["even", "uneven", "tpu"],
)
def test_devices_prepare_and_compute_their_own_rows_and_heads(case, target):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=4"
    program = f"TARGET = {target!r}\nCASES = {case}\n{DIVIDED}"
    done = run_python("-c", program, env=os.environ | {"XLA_FLAGS": flags}, cwd=REPO)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{'data': 2, 'model': 2}"
