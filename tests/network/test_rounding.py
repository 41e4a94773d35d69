"""The fast ways of computing in bfloat16 are within 1 % of plain float32, at random lengths and odd shapes.

Inputs and parameters are numbers that bfloat16 has, so that what is left is the rounding on the way. A GPU takes other
ways than a CPU: T5X_TEST_PLATFORM=cuda pytest -rP tests/network; `-rP` shows the errors. cuDNN's attention is in
test_attention.py, the gradient of embeddings in test_layers.py.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x import decoding
from t5x.kernels.attention_inputs import Mask, RelativeBias
from t5x.kernels.choice import ops
from t5x.models import losses
from t5x.network import CACHES, compute_params
from t5x.network.attention import attend_cached, attend_folded
from t5x.network.blocks import DecoderLayer, EncoderLayer
from t5x.network.keys import Keys
from t5x.network.layers import MLP, RMSNorm, join_kernels
from t5x.partitioning.partitioner import compiler_options
from tests.support import tiny
from tests.support.marks import mark_slow

BOUND = 1e-2
NARROW = "bfloat16"
EOS = 1
CONFIG = dataclasses.replace(
    tiny.T5_1_1, vocab_size=320, emb_dim=128, num_heads=2, head_dim=64, mlp_dim=256, num_encoder_layers=1,
    num_decoder_layers=2,
)  # fmt: skip


def arrays(*shapes: tuple[int, ...], scale: float = 0.5, seed: int = 0) -> list[jax.Array]:
    return tiny.as_bfloat16_has(tiny.arrays(*shapes, scale=scale, seed=seed))


def random_lengths(rows: int, size: int) -> jax.Array:
    """Segments [rows, size] of a full row, one of a single token, and others."""
    rng = np.random.default_rng(size)
    return tiny.segments([size, 1, *rng.integers(1, size + 1, rows - 2)], size)


def exactly(function, *args):
    """Of float32 factors; a GPU would round them otherwise."""
    with jax.default_matmul_precision("highest"):
        return jax.jit(function)(*args)


def distance(found, expected) -> float:
    found, expected = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)]) for tree in (found, expected)
    )
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def check(what: str, found, expected, bound: float = BOUND) -> None:
    """Every array of a tree by itself is within the bound."""
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
    errors = jax.tree_util.tree_leaves_with_path(jax.tree.map(distance, found, expected))
    path, worst = max(errors, key=lambda error: (np.isnan(error[1]), error[1]))
    message = f"{jax.default_backend()}: {what}{jax.tree_util.keystr(path)} {worst:.2e}"
    print(message)
    assert worst <= bound, message


def with_gradients(function, parts: dict, weights: jax.Array):
    """The array that it gives, and the gradients of a weighted sum of it by every part."""

    def of(parts):
        out = function(**parts)
        return jnp.sum(out.astype(jnp.float32) * weights), out

    (_, out), gradients = jax.value_and_grad(of, has_aux=True)(parts)
    return {"out": out, "gradient": gradients}


def both_with_gradients(fast, plain, parts: dict):
    (weights,) = arrays(jax.eval_shape(lambda parts: plain(**parts), parts).shape, seed=1)
    fast, plain = (functools.partial(with_gradients, function) for function in (fast, plain))
    options = compiler_options(gradients_on_cpu=jax.default_backend() == "cpu")
    return jax.jit(fast, compiler_options=options)(parts, weights), exactly(plain, parts, weights)


def narrow(*wide: jax.Array) -> list[jax.Array]:
    return [x.astype(NARROW) for x in wide]


@pytest.mark.parametrize("length", [37, 200])
def test_the_folded_query(length: int):
    query, source = arrays((5, 1, 4, 64), (5, length, 256))
    key_kernel, value_kernel = arrays((256, 256), (256, 256), scale=1 / 16)
    mask = Mask(key_segments=random_lengths(5, length))

    def fast(query, source, key_kernel, value_kernel):
        return attend_folded(*narrow(query, source, key_kernel, value_kernel), mask=mask)

    def plain(query, source, key_kernel, value_kernel):
        key, value = ((source @ kernel).reshape(5, length, 4, 64) for kernel in (key_kernel, value_kernel))
        return ops().attend_xla(query, key, value, mask, None)

    parts = {"query": query, "source": source, "key_kernel": key_kernel, "value_kernel": value_kernel}
    check(f"folded query, {length} keys: ", *both_with_gradients(fast, plain, parts))


@pytest.mark.parametrize(("beams", "length"), [(1, 37), (4, 51)])
def test_attention_to_a_cache(beams: int, length: int):
    query, key, value = arrays((5, beams, 4, 64), (5, length, 4, 64), (5, length, 4, 64))
    mask = Mask(key_segments=random_lengths(5, length))
    heads_first = lambda x: jnp.swapaxes(x, 1, 2).astype(NARROW)
    fast = lambda query, key, value: attend_cached(
        query.astype(NARROW), heads_first(key), heads_first(value), mask=mask
    )  # fmt: skip
    plain = lambda query, key, value: ops().attend_xla(query, key, value, mask, None)
    check("cached attention", jax.jit(fast)(query, key, value), exactly(plain, query, key, value))


@pytest.mark.parametrize(
    ("batch", "length", "vocab", "options"),
    [
        (5, 37, 317, {}),
        pytest.param(4, 19, 300, {"scale": 0.25}, marks=pytest.mark.slow),
        (3, 101, 2048, {"z_loss": 1e-2, "scale": 0.25}),
        pytest.param(9, 13, 640, {"label_smoothing": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_the_loss_without_all_logits(batch: int, length: int, vocab: int, options: dict, monkeypatch):
    monkeypatch.setattr(losses, "_CHUNK_BYTES", batch * length * vocab)  # four parts, the last one shorter
    hidden, kernel = arrays((batch, length, 64), (64, vocab))
    targets = jnp.array(np.random.default_rng(vocab).integers(0, vocab, (batch, length)))
    weights = random_lengths(batch, length) / 17.0

    def plain(hidden, kernel):
        others = {name: value for name, value in options.items() if name != "scale"}
        logits = options.get("scale", 1.0) * (hidden @ kernel)
        of_tokens = losses.cross_entropy(logits, targets, **others)[0]
        return jnp.sum(of_tokens * weights), of_tokens

    def with_its_gradients(hidden, kernel):
        total, of = losses.projected_cross_entropy(hidden.astype(NARROW), kernel, targets, weights, **options)
        return total, of.loss

    def by_tokens(hidden, kernel):
        of_tokens = losses.projected_losses(hidden.astype(NARROW), kernel, targets, options.get("scale", 1.0)).loss
        return jnp.sum(of_tokens * weights), of_tokens

    def of(function, hidden, kernel):
        (total, of_tokens), gradients = jax.value_and_grad(function, (0, 1), has_aux=True)(hidden, kernel)
        return {"sum": total, "losses": of_tokens, "gradient": dict(zip(("hidden", "kernel"), gradients, strict=True))}

    expected = exactly(functools.partial(of, plain), hidden, kernel)
    check("loss", jax.jit(functools.partial(of, with_its_gradients))(hidden, kernel), expected)
    if options.keys() <= {"scale"}:
        check("losses of tokens", jax.jit(functools.partial(of, by_tokens))(hidden, kernel), expected)


@pytest.mark.parametrize("rows", [3, 51])
def test_norms(rows: int):
    """The gradient of the scale is a sum over rows times 101 positions."""
    x, scale = arrays((rows, 101, 256), (256,), scale=1.0)

    def plain(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6) * scale

    fast = lambda x, scale: RMSNorm(NARROW).apply({"params": {"scale": scale}}, x.astype(NARROW))
    check(f"norm of {rows} rows: ", *both_with_gradients(fast, plain, {"x": x, "scale": scale}))


@pytest.mark.parametrize(
    ("rows", "length", "activations"),
    [
        (3, 37, ("gelu", "linear")),
        (5, 1, ("gelu", "linear")),
        pytest.param(9, 131, ("gelu", "linear"), marks=pytest.mark.slow),
        (3, 21, ("relu",)),
    ],
)
def test_gates(rows: int, length: int, activations: tuple[str, ...]):
    """9 times 131 positions are many enough for a GPU to compute what goes in once."""
    module = MLP(384, activations, 0.0, NARROW)
    names = ["wi_0", "wi_1"] if len(activations) > 1 else ["wi"]
    (x,) = arrays((rows, length, 256), scale=1.0)
    made = arrays(*[(256, 384)] * len(names), (384, 256), scale=1 / 16)
    params = {name: {"kernel": kernel} for name, kernel in zip([*names, "wo"], made, strict=True)}

    fast = lambda x, params: module.apply({"params": params}, x, Keys())

    def plain(x, params):
        parts = [x @ params[name]["kernel"] for name in names]
        hidden = jax.nn.gelu(parts[0]) * parts[1] if len(parts) > 1 else jax.nn.relu(parts[0])
        return hidden @ params["wo"]["kernel"]

    check("gate: ", *both_with_gradients(fast, plain, {"x": x, "params": params}))
    check("gate joined before", jax.jit(fast)(x, join_kernels(params)), exactly(plain, x, params))


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "inputs", "targets"), [(3, 37, 21), (9, 151, 131)])
def test_layers(rows: int, inputs: int, targets: int):
    """One of each tower; its roundings add up, so that all gradients are taken together."""
    x, encoded = arrays((rows, targets, CONFIG.emb_dim), (rows, inputs, CONFIG.emb_dim), scale=1.0)
    (table,) = arrays((CONFIG.num_heads, 32))
    sources, ends = random_lengths(rows, inputs), random_lengths(rows, targets)
    cross, causal = Mask(key_segments=sources), Mask(key_segments=ends, causal=True)

    def encoder(config, params, table, encoded):
        bias = RelativeBias(table, True)
        y, _ = EncoderLayer(config).apply({"params": params}, encoded.astype(config.dtype), Keys(), bias, cross)
        return y * sources[..., None]

    def decoder(config, params, table, encoded, x):
        x, encoded, bias = x.astype(config.dtype), encoded.astype(config.dtype), RelativeBias(table, False)
        shared = (bias, causal, encoded, cross, None)
        return DecoderLayer(config).apply({"params": params}, x, Keys(), *shared)[0] * ends[..., None]

    plain = dataclasses.replace(CONFIG, attention_backend="xla")
    fast = dataclasses.replace(CONFIG, dtype=NARROW)
    towers = tiny.bfloat16_params(CONFIG)
    inputs_of = {"encoder": {"encoded": encoded}, "decoder": {"encoded": encoded, "x": x}}
    for tower, layer in (("encoder", encoder), ("decoder", decoder)):
        parts = {"params": towers[tower]["layers_0"], "table": table, **inputs_of[tower]}
        found, expected = both_with_gradients(*(functools.partial(layer, config) for config in (fast, plain)), parts)
        check(f"{tower} layer", found["out"], expected["out"])
        together = distance(found["gradient"], expected["gradient"])
        print(f"{jax.default_backend()}: {tower} layer's gradients {together:.2e}")
        assert together <= BOUND
        check(f"{tower} layer's ", found["gradient"], expected["gradient"], bound=2 * BOUND)


@functools.cache
def exact_logits(config):
    """The logits of the network in float32 with plain attention, as a function; compiled once for a shape."""
    compiled = jax.jit(tiny.model(dataclasses.replace(config, attention_backend="xla")).compute_logits)

    def logits(params, batch):
        with jax.default_matmul_precision("highest"):
            return compiled(params, {name: x for name, x in batch.items() if name.endswith("_tokens")})

    return logits


def models(decode_fn=decoding.beam_search, **changes):
    """The network in bfloat16, the logits in float32, and the parameters of both."""
    config = dataclasses.replace(CONFIG, **changes)
    fast = tiny.model(dataclasses.replace(config, dtype=NARROW), decode_fn=decode_fn)
    return fast, exact_logits(config), tiny.bfloat16_params(config)


SCANNED = {"scan_layers": True, "logits_via_embedding": True}


@pytest.mark.parametrize("changes", [{}, pytest.param(SCANNED, marks=pytest.mark.slow)])
def test_first_logits(changes: dict):
    fast, logits_of, params = models(**changes)
    batch = tiny.batch(1, 9, 151, 5, vocab=320)
    tokens = jnp.array(np.random.default_rng(0).integers(0, 320, (9, 64)))
    ready = compute_params(fast.module, params)
    found = jax.jit(fast.first_logits)(ready, batch["encoder_input_tokens"], tokens)
    logits = logits_of(params, batch)
    check("first logits", found, jnp.take_along_axis(logits[:, 0], tokens, axis=-1))


@pytest.mark.parametrize(
    "beams, changes",
    mark_slow(
        {"1-changes0": (1, {}), "1-changes1": (1, SCANNED), "4-changes0": (4, {}), "4-changes1": (4, SCANNED)},
        slow=["1-changes0", "4-changes0", "4-changes1"],
    ),
)
def test_logits_of_decoding_steps(changes: dict, beams: int):
    """Token by token from caches, several beams for each example; in float32 from whole rows."""
    fast, logits_of, params = models(**changes)
    batch = tiny.batch(1, 3, 37, 11, vocab=320)
    tokens = jnp.array(np.random.default_rng(0).integers(1, 320, (3 * beams, 11)), jnp.int32)
    inputs, module = batch["encoder_input_tokens"], fast.module
    options = {"enable_dropout": False, "decode": True, "method": module.decode}

    @jax.jit
    def steps(variables):
        encoded = module.apply(variables, inputs, enable_dropout=False, method=module.encode)
        empty = jnp.zeros((3, 11), jnp.int32)
        _, caches = module.apply(variables, encoded, inputs, empty, empty, mutable=list(CACHES), **options)
        cache = decoding.repeat_rows(caches.pop("cache"), 3, beams, axis=int(module.config.scan_layers))

        def step(cache, token):
            held = {**variables, **caches, "cache": cache}
            logits, changed = module.apply(held, encoded, inputs, token, token, mutable=["cache"], **options)
            return changed["cache"], logits[:, 0]

        return jnp.swapaxes(jax.lax.scan(step, cache, tokens.T[..., None])[1], 0, 1)

    found = steps({"params": compute_params(module, params)})
    check(f"steps of {beams} beams", found, logits_of(params, given(inputs, tokens, beams)))


def log_softmax(logits: jax.Array) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    return logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)


def given(inputs: np.ndarray, tokens: jax.Array, beams: int) -> dict[str, jax.Array]:
    """A batch in which the decoder sees `tokens`, [rows * beams, length], all of them."""
    return {
        "encoder_input_tokens": np.repeat(inputs, beams, axis=0),
        "decoder_input_tokens": tokens,
        "decoder_target_tokens": np.ones_like(tokens),
    }


@pytest.mark.parametrize(
    ("beams", "lengths"),
    [(1, (37, 13)), (4, (37, 13)), (4, (48, 16))],
)
@pytest.mark.slow
def test_decoding(beams: int, lengths: tuple[int, int]):
    """40 rows that end at different times, the last in a smaller loop: what comes out has that score in float32."""
    fast, logits_of, params = models(decoding.greedy_decode if beams == 1 else decoding.beam_search)
    kernel = params["decoder"]["logits_dense"]["kernel"]
    likely_end = {"kernel": kernel.at[:, EOS].multiply(4)}
    params = {**params, "decoder": {**params["decoder"], "logits_dense": likely_end}}
    batch = tiny.batch(1, 40, *lengths, vocab=320)
    options = {} if beams == 1 else {"alpha": 0.0}
    decode = functools.partial(
        fast.predict_batch_with_aux, num_decodes=beams, return_all_decodes=True, decoder_params=options
    )  # fmt: skip
    tokens, aux = jax.device_get(jax.jit(decode)(params, batch))

    tokens = tokens.reshape(-1, tokens.shape[-1])
    is_end = tokens == EOS
    counted = np.cumsum(is_end, axis=1) - is_end == 0  # up to the end, and it
    lengths = np.sum(counted, axis=1)
    assert len(set(lengths)) > 3 and 0 < np.mean(lengths > 8) < 0.25, lengths
    seen = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    logits = logits_of(params, given(batch["encoder_input_tokens"], seen, beams))
    of_tokens = log_softmax(logits)
    chosen = np.take_along_axis(of_tokens, tokens[..., None], axis=-1)[..., 0]
    found = aux["scores"].reshape(-1)
    there = found > decoding.NEG_INF / 2  # other beams have not ended
    check(f"scores of {beams} beams", found[there], np.sum(chosen * counted, axis=-1)[there])
    if beams == 1:
        lost = np.where(counted, np.max(of_tokens, axis=-1) - chosen, 0.0)
        assert np.max(lost) <= BOUND * np.max(np.abs(logits)), "a token was taken that is not the likeliest"


def test_scores_of_whole_targets():
    """Without what tokens that are all alike would score, which says nothing; a few rows are beyond it by chance."""
    fast, logits_of, params = models()
    batch = tiny.batch(1, 160, 48, 16, vocab=320)  # a shape whose logits another test computes too
    ready = compute_params(fast.module, params)
    logits = logits_of(params, batch)
    chosen = np.take_along_axis(log_softmax(logits), batch["decoder_target_tokens"][..., None], axis=-1)[..., 0]
    weights = batch["decoder_loss_weights"]
    expected = np.sum(chosen * weights, axis=-1)
    alike = weights.sum(axis=-1) * np.log(320)
    check("scores of targets", jax.jit(fast.score_batch)(ready, batch) + alike, expected + alike)
