"""The cost of a step, compared with XLA's own count for the real network."""

from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from t5x.network import DecoderWrapper, T5Config, Transformer, TransformerConfig
from t5x.network.flops import StepCost, forward_flops, generation_flops, scoring_flops
from t5x.telemetry.devices import peak_flops

SHAPE = {"emb_dim": 128, "num_heads": 4, "head_dim": 32, "mlp_dim": 256, "dropout_rate": 0.0}
GATED = T5Config(
    vocab_size=512, num_encoder_layers=2, num_decoder_layers=1, mlp_activations=("gelu", "linear"), **SHAPE
)
PLAIN = T5Config(
    vocab_size=96, num_encoder_layers=1, num_decoder_layers=2, logits_via_embedding=True,
    **SHAPE | {"num_heads": 6, "head_dim": 64, "mlp_dim": 512},
)  # fmt: skip
ALONE = TransformerConfig(vocab_size=384, num_layers=2, mlp_activations=("gelu", "linear"), **SHAPE)


def batch(rows, inputs, targets):
    tokens = lambda length: jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return {"decoder_target_tokens": tokens(targets)} | ({"encoder_input_tokens": tokens(inputs)} if inputs else {})


def step_counted_by_xla(module, features):
    tokens = [features[name] for name in ("encoder_input_tokens",) if name in features]
    tokens += [features["decoder_target_tokens"]] * 2
    params = jax.eval_shape(lambda *t: module.init(jax.random.key(0), *t, enable_dropout=False)["params"], *tokens)
    total = lambda p, *t: module.apply({"params": p}, *t, enable_dropout=False).sum()
    return jax.jit(jax.value_and_grad(total)).lower(params, *tokens).cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("module", "shape"),
    [(Transformer(GATED), (2, 64, 128)), (Transformer(PLAIN), (2, 160, 80)), (DecoderWrapper(ALONE), (2, 0, 256))],
    ids=["gated, untied", "plain, tied, wide heads", "decoder-only"],
)
def test_flops_are_those_that_xla_counts(module, shape):
    features = batch(*shape)
    cost = StepCost.of(module, features, rows=shape[0], devices=jax.devices())
    # XLA also counts norms, softmax and activations: 2 % at these sizes.
    assert cost.flops == pytest.approx(step_counted_by_xla(module, features), rel=0.03)


def test_rows_of_all_processes_count():
    one = forward_flops(Transformer(GATED), batch(4, 64, 32), rows=4)
    assert forward_flops(Transformer(GATED), batch(4, 64, 32), rows=12) == 3 * one


def test_recomputation_and_scanning_change_nothing():
    thrifty = Transformer(T5Config(**vars(GATED) | {"remat_policy": "full", "scan_layers": True}))
    assert forward_flops(thrifty, batch(4, 64, 32), 4) == forward_flops(Transformer(GATED), batch(4, 64, 32), 4)


class OwnTransformer(Transformer):
    """A third-party network, whose cost is unknown."""


class Own(nn.Module):
    config: T5Config


@pytest.mark.parametrize("module", [OwnTransformer(GATED), Own(GATED)])
def test_a_third_party_module_has_no_cost(module):
    cost = StepCost.of(module, batch(4, 64, 32), rows=4, devices=[device("TPU v4")])
    assert cost.flops is None
    assert cost.scalars(10.0) == {}
    assert type(module).__name__ in str(cost)


def device(kind):
    return SimpleNamespace(device_kind=kind)


def test_mfu_is_relative_to_the_peak_of_all_devices():
    cost = StepCost.of(Transformer(GATED), batch(4, 64, 32), rows=4, devices=[device("TPU v5e")] * 4)
    assert cost.peak == 4 * 197e12
    steps_per_second = 4 * 197e12 / cost.flops / 2
    assert cost.scalars(steps_per_second) == {"timing/mfu": pytest.approx(0.5)}
    assert "788 TFLOP/s" in str(cost)


def test_a_cpu_has_a_cost_but_no_mfu():
    cost = StepCost.of(Transformer(GATED), batch(4, 64, 32), rows=4, devices=jax.devices("cpu"))
    assert cost.flops > 0
    assert cost.scalars(10.0) == {}
    assert "timing/mfu" in str(cost)


@pytest.mark.parametrize(
    ("kind", "tera"),
    [
        ("TPU v3", 61.5),  # a core, which is half a chip
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v6 lite", 918),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA GH200 480GB", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_peaks_of_known_devices(kind, tera):
    assert peak_flops(device(kind)) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        "TPU v9",
        "NVIDIA A10G",
        "Tesla V100-SXM2-16GB",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA A40-48Q",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
    ],
)
def test_unknown_devices_have_no_peak(kind):
    assert peak_flops(device(kind)) is None


def kernels(tower, *, among=("kernel",), but=()):
    """Return the number of elements of the matrices that a token is multiplied by."""
    found = jax.tree_util.tree_leaves_with_path(tower)
    paths = [([key.key for key in path], leaf) for path, leaf in found]
    return sum(x.size for path, x in paths if path[-1] in among and not any("/".join(path).count(b) for b in but))


def test_generation_and_scoring_against_the_matrices_of_the_network():
    tokens = jnp.ones((1, 4), jnp.int32)
    params = jax.eval_shape(
        lambda t: Transformer(GATED).init(jax.random.key(0), t, t, t, enable_dropout=False)["params"], tokens
    )
    rows, inputs, targets, beams, width = 3, 64, 32, 4, 4 * 32
    cross = [f"encoder_decoder_attention/{name}" for name in ("key", "value")]
    encoder = inputs * kernels(params["encoder"]) + 2 * (2 * inputs * inputs * width)
    once = inputs * (kernels(params["decoder"]) - kernels(params["decoder"], but=cross))
    logits = kernels({"logits_dense": params["decoder"]["logits_dense"]})
    layer = kernels(params["decoder"], but=[*cross, "logits_dense"])
    beam = targets * (layer + logits) + 2 * targets * (targets + inputs) * width
    found = generation_flops(GATED, rows=rows, inputs=inputs, targets=targets, beams=beams)
    assert found == 2 * rows * (encoder + once + beams * beam)
    step = layer + 2 * GATED.emb_dim + 2 * (1 + inputs) * width
    assert scoring_flops(GATED, rows=rows, inputs=inputs, labels=2) == 2 * rows * (encoder + once + step)
