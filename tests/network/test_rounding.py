"""Every fast path in bfloat16 is within 1 % of plain float32, outputs and gradients, at random lengths and odd shapes.

Inputs and parameters are numbers that bfloat16 has, so that what is left is the rounding on the way. On a GPU the paths
are others than on a CPU: T5X_TEST_PLATFORM=cuda pytest -rP tests/network/test_rounding.py. `-rP` shows the errors.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x import decoding, losses
from t5x.network import CACHES, compute_params
from t5x.network.attention import Mask, attend, attend_cached, attend_folded, attend_xla
from t5x.network.blocks import DecoderLayer, EncoderLayer
from t5x.network.keys import Keys
from t5x.network.layers import MLP, join_kernels
from t5x.network.relative_position import RelativeBias
from tests import tiny

BOUND = 1e-2
NARROW = "bfloat16"
CONFIG = dataclasses.replace(
    tiny.T5_1_1, vocab_size=320, emb_dim=256, num_heads=4, head_dim=64, mlp_dim=512, num_encoder_layers=2,
    num_decoder_layers=2,
)  # fmt: skip


def rounded(tree):
    return jax.tree.map(lambda x: x.astype(NARROW).astype(jnp.float32), tree)


def arrays(*shapes: tuple[int, ...], scale: float = 0.5) -> list[jax.Array]:
    rng = np.random.default_rng(sum(map(sum, shapes)))
    return rounded([jnp.array(rng.normal(0, scale, shape), jnp.float32) for shape in shapes])


def lengths_as_segments(rows: int, length: int) -> jax.Array:
    """int [rows, length], one full row, the others of random lengths."""
    ends = [length, *np.random.default_rng(length).integers(1, length + 1, rows - 1)]
    return jnp.array(np.arange(length) < np.array(ends)[:, None], jnp.int32)


def exactly(function, *args):
    """In float32, whose factors a GPU rounds otherwise."""
    with jax.default_matmul_precision("highest"):
        return jax.jit(function)(*args)


def check(what: str, found, expected) -> None:
    """Within the bound, each array of a tree by itself."""
    expected, structure = jax.tree_util.tree_flatten_with_path(expected)
    errors = {}
    for one, (path, other) in zip(structure.flatten_up_to(found), expected, strict=True):
        one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
        errors[what + jax.tree_util.keystr(path)] = np.linalg.norm(one - other) / np.linalg.norm(other)
    worst = max(errors, key=lambda name: (np.isnan(errors[name]), errors[name]))
    print(f"{jax.default_backend()}: {what} {errors[worst]:.2e} ({worst}, of {len(errors)})")
    assert errors[worst] <= BOUND, {name: error for name, error in errors.items() if not error <= BOUND}


def check_with_gradients(what: str, fast, plain, parts) -> None:
    """`fast` and `plain` give an array; a random sum of it is differentiated by every part."""
    expected = exactly(plain, *parts)
    (weights,) = arrays(expected.shape)

    def of(function):
        total = lambda parts: jnp.sum(function(*parts).astype(jnp.float32) * weights)
        return jax.grad(total)

    check(what, jax.jit(fast)(*parts), expected)
    check(f"gradients of {what}", jax.jit(of(fast))(parts), exactly(of(plain), parts))


def narrow(*arrays: jax.Array) -> list[jax.Array]:
    return [x.astype(NARROW) for x in arrays]


@pytest.mark.parametrize(("q", "k", "causal"), [(37, 37, False), (21, 21, True), (7, 51, False)])
def test_attention(q: int, k: int, causal: bool):
    parts = arrays((3, q, 4, 64), (3, k, 4, 64), (3, k, 4, 64), (4, 32))
    segments = lengths_as_segments(3, k)
    mask, seen = Mask(key_segments=segments, causal=causal), segments[:, :, None, None] if q == k else 1
    bias = lambda table: RelativeBias(table, not causal) if q == k else None
    fast = lambda query, key, value, table: (
        seen * attend(*narrow(query, key, value), mask=mask, bias=bias(table))
    )  # fmt: skip
    plain = lambda query, key, value, table: seen * attend_xla(query, key, value, mask, bias(table))
    if q != k:  # no bias, no gradient of it
        fast, plain = (functools.partial(f, table=None) for f in (fast, plain))
        parts = parts[:3]
    check_with_gradients(f"attention {q}x{k}", fast, plain, parts)


@pytest.mark.parametrize("length", [37, 200])
def test_the_folded_query(length: int):
    parts = arrays((3, 1, 4, 64), (3, length, 256)) + arrays((256, 256), (256, 256), scale=1 / 16)
    mask = Mask(key_segments=lengths_as_segments(3, length))
    fast = lambda *parts: attend_folded(*narrow(*parts), mask=mask)

    def plain(query, source, key_kernel, value_kernel):
        key, value = ((source @ kernel).reshape(3, length, 4, 64) for kernel in (key_kernel, value_kernel))
        return attend_xla(query, key, value, mask, None)

    check_with_gradients(f"folded query {length}", fast, plain, parts)


@pytest.mark.parametrize(("beams", "length"), [(1, 37), (4, 51)])
def test_attention_to_a_cache(beams: int, length: int):
    query, key, value = arrays((3, beams, 4, 64), (3, length, 4, 64), (3, length, 4, 64))
    mask = Mask(key_segments=lengths_as_segments(3, length))
    heads_first = lambda x: jnp.swapaxes(x, 1, 2).astype(NARROW)
    found = attend_cached(query.astype(NARROW), heads_first(key), heads_first(value), mask=mask)
    check("cached attention", found, exactly(attend_xla, query, key, value, mask, None))


@pytest.mark.parametrize(
    ("batch", "length", "vocab", "options"),
    [
        (5, 37, 317, {}),
        (3, 101, 2048, {"z_loss": 1e-2, "scale": 0.25}),
        (9, 13, 640, {"label_smoothing": 0.1}),
    ],
)
def test_the_loss_without_all_logits(batch: int, length: int, vocab: int, options: dict, monkeypatch):
    monkeypatch.setattr(losses, "_CHUNK_BYTES", batch * length * vocab)  # four parts, the last one shorter
    hidden, kernel = arrays((batch, length, 64), (64, vocab))
    rng = np.random.default_rng(vocab)
    targets = jnp.array(rng.integers(0, vocab, (batch, length)))
    weights = lengths_as_segments(batch, length) / 17.0

    def plain(hidden, kernel):
        scale = options.get("scale", 1.0)
        others = {name: value for name, value in options.items() if name != "scale"}
        of_tokens = losses.cross_entropy(scale * (hidden @ kernel), targets, **others)[0]
        return jnp.sum(of_tokens * weights), of_tokens

    def at_once(hidden, kernel):
        total, of = losses.projected_cross_entropy(hidden.astype(NARROW), kernel, targets, weights, **options)
        return total, of.loss

    def anew(hidden, kernel):
        of_tokens = losses.projected_losses(hidden.astype(NARROW), kernel, targets, **options).loss
        return jnp.sum(of_tokens * weights), of_tokens

    of = lambda function: jax.value_and_grad(function, (0, 1), has_aux=True)
    expected = exactly(of(plain), hidden, kernel)
    check("loss and gradients", jax.jit(of(at_once))(hidden, kernel), expected)
    check("loss and gradients by tokens", jax.jit(of(anew))(hidden, kernel), expected)


@pytest.mark.parametrize(
    ("rows", "length", "activations"),
    [(3, 37, ("gelu", "linear")), (5, 1, ("gelu", "linear")), (9, 131, ("gelu", "linear")), (3, 21, ("relu",))],
)
def test_gates(rows: int, length: int, activations: tuple[str, ...]):
    """9 times 131 rows are many enough for a GPU to compute what goes in once."""
    module = MLP(384, activations, 0.0, NARROW)
    names = ["wi_0", "wi_1"] if len(activations) > 1 else ["wi"]
    (x,) = arrays((rows, length, 256), scale=1.0)
    *kernels, out = arrays(*[(256, 384)] * len(names), (384, 256), scale=1 / 16)

    def params(*kernels):
        return {name: {"kernel": kernel} for name, kernel in zip([*names, "wo"], kernels, strict=True)}

    def fast(x, *kernels, prepare=lambda params: params):
        return module.apply({"params": prepare(params(*kernels))}, x, Keys())

    def plain(x, *kernels):
        parts = [x @ kernel for kernel in kernels[:-1]]
        return (jax.nn.gelu(parts[0]) * parts[1] if len(parts) > 1 else jax.nn.relu(parts[0])) @ kernels[-1]

    check_with_gradients("gate", fast, plain, (x, *kernels, out))
    before = functools.partial(fast, prepare=join_kernels)
    check("gate joined before", jax.jit(before)(x, *kernels, out), exactly(plain, x, *kernels, out))


@pytest.mark.parametrize(("rows", "inputs", "targets"), [(3, 37, 21), (9, 151, 131), (2, 51, 7)])
def test_layers(rows: int, inputs: int, targets: int):
    """One of each tower: what goes in is many rows, or few, and of odd lengths."""
    x, encoded = arrays((rows, targets, 256), (rows, inputs, 256), scale=1.0)
    (table,) = arrays((4, 32))
    sources, ends = lengths_as_segments(rows, inputs), lengths_as_segments(rows, targets)
    cross, causal = Mask(key_segments=sources), Mask(key_segments=ends, causal=True)

    def encoder(config):
        def run(params, x, table):
            bias = RelativeBias(table, True)
            y, _ = EncoderLayer(config).apply({"params": params}, x.astype(config.dtype), 0, Keys(), bias, cross)
            return y * sources[..., None]

        return run

    def decoder(config):
        def run(params, x, table, encoded):
            x, encoded, bias = x.astype(config.dtype), encoded.astype(config.dtype), RelativeBias(table, False)
            shared = (bias, causal, encoded, cross, None)
            return DecoderLayer(config).apply({"params": params}, x, 0, Keys(), *shared)[0] * ends[..., None]

        return run

    params = rounded(tiny.initial_params(CONFIG))
    plain, fast = (dataclasses.replace(CONFIG, dtype=dtype) for dtype in ("float32", NARROW))
    plain = dataclasses.replace(plain, attention_backend="xla")
    for tower, of, parts in (("encoder", encoder, (encoded, table)), ("decoder", decoder, (x, table, encoded))):
        own = params[tower]["layers_0"]
        check_with_gradients(f"{tower} layer", of(fast), of(plain), (own, *parts))


def models(**changes):
    """The network in bfloat16, and in float32 with plain attention; and the parameters of both."""
    config = dataclasses.replace(CONFIG, **changes)
    fast = tiny.model(dataclasses.replace(config, dtype=NARROW))
    return fast, tiny.model(dataclasses.replace(config, attention_backend="xla")), rounded(tiny.initial_params(config))


LAYOUTS = pytest.mark.parametrize("changes", [{}, {"scan_layers": True, "logits_via_embedding": True}])


@LAYOUTS
def test_first_logits(changes: dict):
    fast, plain, params = models(**changes)
    batch = tiny.batch(1, 9, 151, 5, vocab=320)
    tokens = jnp.array(np.random.default_rng(0).integers(0, 320, (9, 2)))
    ready = compute_params(fast.module, params)
    found = jax.jit(fast.first_logits)(ready, batch["encoder_input_tokens"], tokens)
    logits = exactly(plain.compute_logits, params, batch)
    check("first logits", found, jnp.take_along_axis(logits[:, 0], tokens, axis=-1))


@LAYOUTS
@pytest.mark.parametrize("beams", [1, 4])
def test_logits_of_decoding_steps(changes: dict, beams: int):
    """Token by token from caches, several beams for each example; in float32 from whole rows."""
    fast, plain, params = models(**changes)
    batch = tiny.batch(1, 3, 37, 11, vocab=320)
    several = {name: jnp.repeat(value, beams, axis=0) for name, value in batch.items()}
    tokens = jnp.array(np.random.default_rng(0).integers(1, 320, (3 * beams, 11)), jnp.int32)
    whole = {**several, "decoder_input_tokens": tokens, "decoder_target_tokens": jnp.ones_like(tokens)}
    expected = exactly(plain.compute_logits, params, whole)

    variables = {"params": compute_params(fast.module, params)}
    inputs, module = batch["encoder_input_tokens"], fast.module
    options = {"enable_dropout": False, "decode": True, "method": module.decode}

    @jax.jit
    def run(variables):
        encoded = module.apply(variables, inputs, enable_dropout=False, method=module.encode)
        empty = jnp.zeros((3, 11), jnp.int32)
        _, caches = module.apply(variables, encoded, inputs, empty, empty, mutable=list(CACHES), **options)
        cache = decoding.repeat_rows(caches.pop("cache"), 3, beams, axis=int(fast.module.config.scan_layers))

        def step(cache, token):
            held = {**variables, **caches, "cache": cache}
            logits, changed = module.apply(held, encoded, inputs, token, token, mutable=["cache"], **options)
            return changed["cache"], logits[:, 0]

        return jnp.swapaxes(jax.lax.scan(step, cache, tokens.T[..., None])[1], 0, 1)

    check(f"steps of {beams} beams", run(variables), expected)


@pytest.mark.parametrize("beams", [1, 4])
def test_decoding(beams: int):
    """40 rows that end at different times, the last ones in a smaller loop: float32 gives what came out that score."""
    fast, plain, params = models()
    end = params["decoder"]["logits_dense"]["kernel"].at[:, 1].multiply(3.0)
    params = {**params, "decoder": {**params["decoder"], "logits_dense": {"kernel": end}}}
    batch = tiny.batch(1, 40, 37, 13, vocab=320)
    fast.decode_fn = decoding.greedy_decode if beams == 1 else decoding.beam_search
    decode = functools.partial(fast.predict_batch_with_aux, num_decodes=beams, return_all_decodes=True)
    if beams > 1:
        decode = functools.partial(decode, decoder_params={"alpha": 0.0})
    tokens, aux = jax.jit(decode)(params, batch)
    flat = tokens.reshape(-1, tokens.shape[-1])
    counted = jnp.cumsum(flat == 1, axis=1) - (flat == 1) == 0  # up to the end, and it
    assert (jnp.sum(counted, axis=1) < 13).sum() > len(flat) / 4, "rows do not end"
    whole = {
        "encoder_input_tokens": jnp.repeat(batch["encoder_input_tokens"], beams, axis=0),
        "decoder_input_tokens": jnp.pad(flat, ((0, 0), (1, 0)))[:, :-1],
        "decoder_target_tokens": jnp.ones_like(flat),  # all are seen
    }
    logits = exactly(plain.compute_logits, params, whole)
    of_tokens = jax.nn.log_softmax(logits)
    chosen = jnp.take_along_axis(of_tokens, flat[..., None], axis=-1)[..., 0]
    found = np.asarray(aux["scores"]).reshape(-1)
    there = found > decoding.NEG_INF / 2  # other beams have not ended
    check(f"scores of {beams} beams", found[there], jnp.sum(chosen * counted, axis=-1)[there])
    if beams == 1:
        lost = jnp.where(counted, jnp.max(of_tokens, axis=-1) - chosen, 0.0)
        assert jnp.max(lost) <= BOUND * jnp.max(jnp.abs(logits)), "a token was taken that is not the likeliest"
    else:
        plain.decode_fn = fast.decode_fn
        options = {"num_decodes": beams, "decoder_params": {"alpha": 0.0}}
        best, _ = exactly(functools.partial(plain.predict_batch_with_aux, **options), params, batch)
        agree = jnp.mean(jnp.all(tokens[:, -1] == best, axis=-1))
        print(f"{jax.default_backend()}: the best beam is the same for {agree:.0%}")
        assert agree >= 0.9  # others parted at a near tie


def test_scores_of_whole_targets():
    fast, plain, params = models()
    batch = tiny.batch(1, 5, 37, 21, vocab=320)
    ready = compute_params(fast.module, params)
    logits = exactly(plain.compute_logits, params, batch)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["decoder_target_tokens"][..., None], axis=-1)[..., 0]
    expected = jnp.sum(chosen * batch["decoder_loss_weights"], axis=-1)
    check("scores of targets", jax.jit(fast.score_batch)(ready, batch), expected)
