"""The decoder-only network and its model against an independent float64 NumPy implementation of the contract."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from t5x.data import PassThroughVocabulary
from t5x.decoding import greedy_decode
from t5x.models import DecoderOnlyModel
from t5x.network import DecoderWrapper, TransformerConfig
from tests.reference import decoder_only_numpy as reference
from tests.reference import t5_torch
from tests.support import tiny
from tests.support.marks import mark_slow

TIED = TransformerConfig(
    vocab_size=31, emb_dim=12, num_heads=3, head_dim=5, mlp_dim=20, num_layers=2, mlp_activations=("relu",),
    logits_via_embedding=True, dropout_rate=0.0,
)  # fmt: skip
UNTIED = dataclasses.replace(
    TIED, num_heads=1, head_dim=7, num_layers=3, mlp_activations=("gelu", "linear"), logits_via_embedding=False
)
PER_LAYER = dataclasses.replace(
    UNTIED, num_heads=5, head_dim=2, emb_dim=11, num_layers=2, per_layer_relative_position_bias=True
)
CASES = {
    "tied": (TIED, False),
    "tied, scanned": (TIED, True),
    "untied": (UNTIED, False),
    "bias in every layer, scanned": (PER_LAYER, True),
}


def model(config: TransformerConfig, prefix: bool = False, **options) -> DecoderOnlyModel:
    vocabulary = PassThroughVocabulary(config.vocab_size, eos_id=1)
    return DecoderOnlyModel(DecoderWrapper(config), vocabulary, None, inputs_bidirectional_attention=prefix, **options)


def batch_of(rows: list[list[tuple[int, int]]], length: int, *, packed: bool) -> dict[str, np.ndarray]:
    """Rows of examples, each of so many input and so many target tokens; the loss is on the targets."""
    rng = np.random.default_rng(0)
    names = ("input_tokens", "target_tokens", "segment_ids", "positions", "causal_attention", "loss_weights")
    out = {f"decoder_{name}": np.zeros((len(rows), length), np.int32) for name in names}
    inputs, targets, segments, positions, prefix, weights = out.values()
    for row, examples in enumerate(rows):
        start = 0
        for segment, (num_inputs, num_targets) in enumerate(examples, start=1):
            end = start + num_inputs + num_targets
            targets[row, start:end] = rng.integers(1, 31, end - start)
            inputs[row, start + 1 : end] = targets[row, start : end - 1]
            segments[row, start:end] = segment
            positions[row, start:end] = np.arange(end - start)
            prefix[row, start : start + num_inputs + 1] = 1
            weights[row, start + num_inputs : end] = 1
            start = end
    if not packed:
        del out["decoder_segment_ids"], out["decoder_positions"]
    return out


PACKED_EXAMPLES = [[(5, 60), (70, 10)], [(0, 3), (4, 1), (20, 30)]]
BATCHES = {
    "padded": batch_of([[(5, 145)], [(138, 6)], [(0, 9)], [(3, 1)]], 150, packed=False),
    "packed": batch_of(PACKED_EXAMPLES, 150, packed=True),
}


def reference_logits(params: dict, config: TransformerConfig, batch: dict, prefix: bool) -> np.ndarray:
    tokens = batch["decoder_input_tokens"], batch["decoder_target_tokens"]
    seen = batch["decoder_causal_attention"] if prefix else None
    return reference.forward(params, config, *tokens, batch.get("decoder_segment_ids"), seen)


def stacked(params: dict, axis: int = 1) -> dict:
    """The unrolled tree as the scanned network holds it."""
    decoder = params["decoder"]
    names = sorted(name for name in decoder if name.startswith("layers_"))
    stack = jax.tree.map(lambda *x: np.stack(x, axis), *(decoder[name] for name in names))
    return {"decoder": {name: decoder[name] for name in decoder if name not in names} | {"decoder": stack}}


def as_ours(params: dict, scan: bool) -> dict:
    params = tiny.as_float32(params)
    return stacked(params) if scan else params


# --- The network -----------------------------------------------------------------------------------------------------


@functools.cache
def every_logits(config: TransformerConfig, scan: bool) -> dict[tuple[str, bool], np.ndarray]:
    """By (kind of batch, prefix), from one compiled program."""
    params = as_ours(reference.random_params(config, seed=3), scan)
    config = dataclasses.replace(config, scan_layers=scan)
    kinds = [(kind, prefix) for kind in BATCHES for prefix in (False, True)]
    compute = lambda params: [model(config, prefix).compute_logits(params, BATCHES[kind]) for kind, prefix in kinds]
    return dict(zip(kinds, jax.jit(compute)(params), strict=True))


LOGITS = {
    f"{name}-{'prefix' if prefix else 'causal'}-{kind}": (*CASES[name], prefix, kind)
    for name, prefix, kind in itertools.product(CASES, (False, True), BATCHES)
}
# Each configuration, and each batch with and without a prefix.
QUICK_LOGITS = [
    "tied-prefix-padded", "tied, scanned-causal-packed", "untied-prefix-packed", "untied-causal-packed",
    "bias in every layer, scanned-causal-padded", "bias in every layer, scanned-prefix-packed",
]  # fmt: skip


@pytest.mark.parametrize(
    "config, scan, prefix, kind", mark_slow(LOGITS, slow=[name for name in LOGITS if name not in QUICK_LOGITS])
)
def test_logits(config, scan, prefix, kind):
    batch = BATCHES[kind]
    expected = reference_logits(reference.random_params(config, seed=3), config, batch, prefix)
    real = batch["decoder_target_tokens"] > 0
    np.testing.assert_allclose(every_logits(config, scan)[kind, prefix][real], expected[real], atol=1e-4)


def test_packed_examples_equal_the_same_examples_alone():
    together, logits = BATCHES["packed"], []
    alone = {name: [] for name in ("decoder_input_tokens", "decoder_target_tokens", "decoder_causal_attention")}
    for row, examples in enumerate(PACKED_EXAMPLES):
        for segment in range(1, len(examples) + 1):
            inside = together["decoder_segment_ids"][row] == segment
            logits.append(every_logits(UNTIED, False)["packed", True][row, inside])
            for name, rows in alone.items():
                rows.append(np.pad(together[name][row, inside], (0, 80 - inside.sum())))
    alone = {name: np.stack(rows) for name, rows in alone.items()}
    params = as_ours(reference.random_params(UNTIED, seed=3), scan=False)
    expected = jax.jit(model(UNTIED, prefix=True).compute_logits)(params, alone)
    np.testing.assert_allclose(np.concatenate(logits), expected[alone["decoder_target_tokens"] > 0], atol=1e-5)


@pytest.mark.parametrize(
    "width, heads, mlp_dim, depth, expected",
    [
        (768, 12, 2048, 12, 109_628_544),
        (1024, 16, 2816, 24, 341_231_104),
        (2048, 32, 5120, 24, 1_223_527_424),
        (4096, 64, 10240, 24, 4_762_310_656),
    ],
    ids=["base", "large", "xl", "xxl"],
)
def test_parameter_counts_are_those_of_t5x(width, heads, mlp_dim, depth, expected):
    config = TransformerConfig(
        vocab_size=32128, emb_dim=width, num_heads=heads, head_dim=64, mlp_dim=mlp_dim, num_layers=depth,
        mlp_activations=("gelu", "linear"), logits_via_embedding=True, scan_layers=True,
    )  # fmt: skip
    of = model(config)
    shapes = of.input_shapes({"inputs": 3, "targets": 3})
    variables = jax.eval_shape(lambda: of.get_initial_variables(jax.random.key(0), shapes))
    assert sum(leaf.size for leaf in jax.tree.leaves(variables["params"])) == expected


@functools.cache
def initial_params(config: TransformerConfig) -> dict:
    of = model(config)
    shapes = of.input_shapes({"inputs": 3, "targets": 3})
    return jax.jit(lambda: of.get_initial_variables(jax.random.key(0), shapes)["params"])()


@pytest.mark.slow  # test_initial.py: the same stacks, for T5
def test_scanned_layers_start_from_the_same_values():
    scanned = initial_params(dataclasses.replace(PER_LAYER, scan_layers=True))
    jax.tree.map(np.testing.assert_array_equal, stacked(initial_params(PER_LAYER)), scanned)


def test_dropout_is_the_same_for_scanned_layers_and_belongs_to_the_row():
    config = dataclasses.replace(PER_LAYER, dropout_rate=0.3)
    batch = batch_of([[(4, 5)], [(0, 9)], [(2, 3)]], 10, packed=False) | {"row_index": np.arange(3)}
    params = tiny.random_params_of(model(PER_LAYER), {"decoder_input_tokens": (1, 3), "decoder_target_tokens": (1, 3)})
    key = jax.random.key(7)
    plain = jax.jit(model(config, prefix=True).compute_logits)
    scanned = jax.jit(model(dataclasses.replace(config, scan_layers=True), prefix=True).compute_logits)
    expected = plain(params, batch, key)
    np.testing.assert_allclose(scanned(stacked(params), batch, key), expected, atol=1e-5)
    moved = np.array([2, 0, 1])
    elsewhere = {name: value[moved] for name, value in batch.items()}
    np.testing.assert_allclose(plain(params, elsewhere, key), expected[moved], atol=1e-5)
    assert np.abs(plain(params, batch, jax.random.key(8)) - expected).max() > 0.01


# --- Loss and scores -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, scan, prefix", [(TIED, True, False), (PER_LAYER, False, True)], ids=["tied, scanned", "untied, prefix"]
)
def test_loss_gradients_and_scores(config, scan, prefix):
    """Derivatives along single parameters and random directions of every array, by central differences in float64."""
    options = {"z_loss": 0.01, "label_smoothing": 0.1, "loss_normalizing_factor": "NUM_REAL_TARGET_TOKENS"}
    batch = batch_of([[(5, 4), (2, 7)], [(3, 9), (0, 2)]], 20, packed=True)
    params = reference.random_params(config, seed=4)
    of = model(dataclasses.replace(config, scan_layers=scan), prefix, **options)

    @jax.jit
    def ours(params, batch):
        return jax.value_and_grad(of.loss_fn, has_aux=True)(params, batch), of.score_batch(params, batch)

    ((loss, metrics), gradients), scores = ours(as_ours(params, scan), batch)
    targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]

    def expected_loss() -> float:
        logits = torch.from_numpy(reference_logits(params, config, batch, prefix))
        return float(t5_torch.loss(logits, targets, weights, **options)[0])

    np.testing.assert_allclose(loss, expected_loss(), rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"].compute(), loss, rtol=1e-6)
    logits = reference_logits(params, config, batch, prefix)
    log_probs = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    expected = np.take_along_axis(log_probs, targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(scores, (expected * weights).sum(axis=1), rtol=1e-5)

    rng, small = np.random.default_rng(0), 1e-6
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name, gradient = jax.tree_util.keystr(path), _leaf(gradients, path, scan)
        directions = [rng.normal(size=leaf.shape) for _ in range(2)]
        for index in (np.abs(gradient).argmax(), *rng.integers(0, leaf.size, 3)):
            directions.append(np.eye(1, leaf.size, index).reshape(leaf.shape))
        for direction in directions:
            direction /= np.linalg.norm(direction)
            kept = leaf.copy()
            leaf += small * direction
            up = expected_loss()
            leaf -= 2 * small * direction
            slope = (up - expected_loss()) / (2 * small)
            leaf[:] = kept
            tolerance = 1e-4 * np.linalg.norm(gradient)
            np.testing.assert_allclose(np.vdot(gradient, direction), slope, rtol=0, atol=tolerance, err_msg=name)


def _leaf(tree: dict, path: tuple, scan: bool) -> np.ndarray:
    """The array at the path of the unrolled tree, in float64."""
    names = [key.key for key in path]
    layer = names[1].removeprefix("layers_") if names[1].startswith("layers_") else None
    if scan and layer is not None:
        names[1] = "decoder"
    for name in names:
        tree = tree[name]
    leaf = np.asarray(tree, np.float64)
    return leaf[:, int(layer)] if scan and layer is not None else leaf


# --- Decoding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config, scan, prefix",
    [(UNTIED, False, False), pytest.param(UNTIED, False, True, marks=pytest.mark.slow), (TIED, True, True)],
    ids=["causal", "prefix", "prefix, scanned"],
)
def test_greedy_decoding_continues_after_prefixes_of_different_lengths(config, scan, prefix):
    length = 24
    batch = batch_of([[(n, length - n)] for n in (5, 0, 23, 1, 12, 8, 3, 17)], length, packed=False)
    tokens, inside = batch["decoder_input_tokens"], batch["decoder_causal_attention"]
    tokens[0, 2] = 1  # an EOS among the inputs ends nothing
    params = reference.random_params(config, seed=15)
    decoder = params["decoder"]
    head = (
        decoder["token_embedder"]["embedding"].T if config.logits_via_embedding else decoder["logits_dense"]["kernel"]
    )
    head[:, 1] *= 2  # some rows end early
    expected, scores = reference.greedy(params, config, tokens, inside, bidirectional=prefix)
    other, _ = reference.greedy(params, config, tokens, inside, bidirectional=not prefix)
    ended = (expected == 1).any(axis=1)
    assert ended.any() and not ended.all() and (other != expected).any(), "choose a seed that tells more"
    # A row of padding, as it fills up a last batch, disturbs nobody.
    padded = {"decoder_input_tokens": tokens, "decoder_causal_attention": inside}
    padded = {name: np.pad(value, ((0, 1), (0, 0))) for name, value in padded.items()}
    of = model(dataclasses.replace(config, scan_layers=scan), prefix, decode_fn=greedy_decode)
    said, aux = jax.jit(of.predict_batch_with_aux)(as_ours(params, scan), padded)
    np.testing.assert_array_equal(said[:-1], expected)
    np.testing.assert_allclose(aux["scores"][:-1], scores, rtol=1e-4)


def test_without_inputs_decoding_starts_from_the_start_token():
    params = reference.random_params(TIED, seed=5)
    empty = np.zeros((2, 10), np.int32)
    expected, _ = reference.greedy(params, TIED, empty, np.eye(1, 10, dtype=np.int32).repeat(2, 0), bidirectional=False)
    said = jax.jit(model(TIED).predict_batch)(as_ours(params, False), {"decoder_input_tokens": empty})
    np.testing.assert_array_equal(said, expected)


@pytest.mark.parametrize(
    "config, scan, prefix", [(TIED, False, False), (PER_LAYER, True, True)], ids=["causal", "prefix, scanned"]
)
def test_prefill_and_single_steps_equal_the_full_pass(config, scan, prefix):
    """Up to distances in the last bucket. Every row is read up to a position of its own and goes on from there."""
    length = 150
    tokens = np.random.default_rng(0).integers(1, 31, (4, length)).astype(np.int32)
    lengths = np.array([1, 40, 149, 135], np.int32)
    inside = (np.arange(length) < lengths[:, None]).astype(np.int32)
    seen = inside if prefix else None
    module = DecoderWrapper(dataclasses.replace(config, scan_layers=scan))
    apply = functools.partial(module.apply, enable_dropout=False, mutable=["cache"])

    @jax.jit
    def incremental(params):
        params = {"params": params}
        read, filled = apply(
            params, tokens * inside, inside, decoder_causal_attention=seen, prefill=True, prefill_lengths=lengths
        )

        def step(cache, t):
            token = jnp.take_along_axis(tokens, jnp.minimum(lengths + t, length - 1)[:, None], axis=1)
            logits, changed = apply({**params, "cache": cache}, token, token, decode=True)
            return changed["cache"], logits[:, 0]

        return read, jax.lax.scan(step, filled["cache"], jnp.arange(length))[1]

    params = reference.random_params(config, seed=6)
    full = reference.forward(params, config, tokens, np.ones_like(tokens), None, seen)
    read, steps = incremental(as_ours(params, scan))
    for row, start in enumerate(lengths):
        np.testing.assert_allclose(read[row, :start], full[row, :start], atol=1e-4)
        np.testing.assert_allclose(steps[: length - start, row], full[row, start:], atol=1e-4)


def test_a_cache_without_prefill_starts_at_the_first_position():
    tokens = np.random.default_rng(0).integers(1, 31, (2, 140)).astype(np.int32)
    params = reference.random_params(TIED, seed=6)
    apply = functools.partial(DecoderWrapper(TIED).apply, enable_dropout=False, decode=True, mutable=["cache"])

    @jax.jit
    def incremental(params):
        _, made = apply({"params": params}, tokens, tokens)

        def step(cache, token):
            logits, changed = apply({"params": params, "cache": cache}, token, token)
            return changed["cache"], logits[:, 0]

        return jax.lax.scan(step, made["cache"], tokens.T[:, :, None])[1].swapaxes(0, 1)

    full = reference.forward(params, TIED, tokens, np.ones_like(tokens))
    np.testing.assert_allclose(incremental(as_ours(params, False)), full, atol=1e-4)
