"""Decoding with networks: properties of models with every decoding function."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x import decoding
from t5x.data import PassThroughVocabulary
from t5x.kernels.ops import CpuOps
from t5x.models import DecoderOnlyModel, EncoderDecoderModel
from t5x.network import DecoderWrapper, TransformerConfig
from t5x.partitioning import PjitPartitioner
from t5x.partitioning.devices import on_nvidia_gpu
from t5x.partitioning.partitioner import compiler_options
from tests.support import tiny
from tests.support.marks import mark_slow

BATCH = tiny.batch(3, rows=6, inputs=9, targets=8)


@functools.cache
def params(scan: bool):
    return with_frequent_eos(tiny.random_params(dataclasses.replace(tiny.T5_1_1, scan_layers=scan), seed=4))


def with_frequent_eos(made):
    head = (5 * made["decoder"]["logits_dense"]["kernel"]).at[:, 1].multiply(1.5)
    return {**made, "decoder": {**made["decoder"], "logits_dense": {"kernel": head}}}


def model(decode_fn, scan=False, **options):
    return tiny.model(dataclasses.replace(tiny.T5_1_1, scan_layers=scan), decode_fn=decode_fn, **options)


def decode(of, batch=BATCH, **options):
    run = jax.jit(functools.partial(of.predict_batch_with_aux, return_all_decodes=True, **options))
    tokens, aux = run(params(of.module.config.scan_layers), batch)
    return np.asarray(tokens), np.asarray(aux["scores"])


@functools.cache
def beams(scan=False):
    """Return four beams of each example: tokens and scores."""
    return decode(model(decoding.beam_search, scan), num_decodes=4)


@jax.jit
def all_log_probs(weights, inputs, shifted):
    inside = jnp.ones_like(shifted)  # a generated 0 is not padding
    return jax.nn.log_softmax(
        tiny.model().module.apply({"params": weights}, inputs, shifted, inside, enable_dropout=False)
    )


def log_probs_of(tokens, batch=BATCH):
    """Return log probabilities and lengths of decodes [batch, decodes, length] by teacher forcing, up to EOS."""
    rows, decodes, length = tokens.shape
    targets = tokens.reshape(-1, length)
    counted = np.cumsum(targets == 1, axis=1) - (targets == 1) == 0
    inputs, shifted = np.repeat(batch["encoder_input_tokens"], decodes, 0), np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    log_probs = np.asarray(all_log_probs(params(False), inputs, shifted))
    found = np.take_along_axis(log_probs, targets[..., None], -1)[..., 0]
    return (found * counted).sum(-1).reshape(rows, decodes), counted.sum(-1).reshape(rows, decodes)


@pytest.mark.parametrize("scan", mark_slow({"unrolled": False, "scanned": True}, slow=["scanned"]))
@pytest.mark.slow
def test_scores_of_beams_are_those_of_their_sequences(scan):
    """So caches follow their beams, and beams share the encoder's output."""
    tokens, scores = beams(scan)
    there = scores > decoding.NEG_INF
    log_probs, lengths = log_probs_of(tokens)
    ended = (tokens == 1).any(-1)
    assert ended.any() and (np.diff(scores, axis=1) >= 0).all()
    expected = np.where(ended, log_probs / ((5 + lengths) / 6) ** 0.6, log_probs)
    np.testing.assert_allclose(scores[there], expected[there], rtol=1e-4)
    for row in range(len(tokens)):
        output = [tuple(one) for one in tokens[row][there[row]].tolist()]
        assert len(output) == len(set(output)) >= 1


def test_scores_of_samples_are_those_of_their_sequences():
    of = model(decoding.temperature_sample, default_decoder_params={"topk": 0, "rescale_log_probs": False})
    tokens, scores = decode(of, num_decodes=4, rng=jax.random.key(0))
    np.testing.assert_allclose(scores, log_probs_of(tokens)[0], rtol=1e-4)


@pytest.mark.parametrize(
    "decode_fn", mark_slow([decoding.beam_search, decoding.temperature_sample], slow=[decoding.temperature_sample])
)
def test_the_batch_and_its_padding_change_nothing(decode_fn):
    sampling = decode_fn is decoding.temperature_sample
    of = model(decode_fn, default_decoder_params={"topk": 0} if sampling else None)
    batch = BATCH | {"example_index": np.arange(10, 16, dtype=np.int32)}
    options = {"num_decodes": 4, "rng": jax.random.key(2)}
    tokens, scores = decode(of, batch, **options) if sampling else beams()
    order = np.array([5, 0, 3])
    other = {name: value[order] for name, value in batch.items()}
    other["encoder_input_tokens"] = np.pad(other["encoder_input_tokens"], ((0, 2), (0, 5)))
    other["decoder_input_tokens"] = np.pad(other["decoder_input_tokens"], ((0, 2), (0, 0)))
    other["example_index"] = np.pad(other["example_index"], (0, 2))
    some, some_scores = decode(of, other, **options)
    np.testing.assert_array_equal(some[:3], tokens[order])
    np.testing.assert_allclose(some_scores[:3], scores[order], rtol=1e-5)


@pytest.mark.slow
def test_new_numbers_do_not_recompile():
    for decode_fn, calls in (
        (decoding.beam_search, [{"alpha": 0.0, "eos_id": 1}, {"alpha": 3.0, "eos_id": 1}, {"alpha": 0.0, "eos_id": 7}]),
        (
            decoding.temperature_sample,
            [
                {"temperature": t, "topk": k, "topp": p, "eos_id": 1, "decode_rng": jax.random.key(seed)}
                for t, k, p, seed in [
                    (1.0, 0, 0.0, 0),
                    (3.0, 0, 0.0, 0),
                    (1.0, 5, 0.0, 0),
                    (1.0, 0, 0.5, 0),
                    (1.0, 0, 0.0, 1),
                ]
            ],
        ),
    ):
        of = model(decode_fn)
        run = jax.jit(lambda p, b, options, of=of: of.predict_batch_with_aux(p, b, decoder_params=options))
        results = [str(run(params(False), BATCH, options)) for options in calls]
        assert run._cache_size() == 1
        assert len(set(results)) == len(calls)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices prepare kernels differently")
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_a_step_uses_the_kernels_prepared_before_the_loop(monkeypatch, scan):
    used = []
    few_rows = CpuOps.few_rows
    monkeypatch.setattr(CpuOps, "few_rows", lambda *arguments: used.append(arguments) or few_rows(*arguments))
    of = model(decoding.greedy_decode, scan)
    jax.make_jaxpr(of.predict_batch_with_aux)(params(scan), BATCH)
    shapes = {kernel.shape for _, _, kernel, _ in used}
    cfg = of.module.config
    inner = cfg.num_heads * cfg.head_dim, cfg.mlp_dim
    assert shapes >= {(size, cfg.emb_dim) for size in inner} | {(cfg.emb_dim, size) for size in inner}


@pytest.mark.skipif(not on_nvidia_gpu(), reason="needs an NVIDIA GPU, and T5X_TEST_PLATFORM=cuda")
@pytest.mark.parametrize("decode_fn", [decoding.beam_search, decoding.temperature_sample, decoding.greedy_decode])
def test_loops_in_cuda_graphs_give_the_same_tokens(decode_fn):
    """Rows end at different steps, and most before the limit, so that the loop continues with fewer of them."""
    config = dataclasses.replace(tiny.WIDE, dtype="bfloat16")
    of = tiny.model(config, decode_fn=decode_fn)
    weights = with_frequent_eos(tiny.random_params(config, seed=4))
    batch = {name: jnp.array(x) for name, x in tiny.batch(3, rows=64, inputs=128, targets=64, vocab=128).items()}
    run = functools.partial(of.predict_batch_with_aux, rng=jax.random.key(0))
    assert "xla_gpu_enable_command_buffer" in compiler_options(large_matmuls=False, decodes=True)
    program = PjitPartitioner().partition(run, None, None, decodes=True)
    (tokens, _), (wanted, _) = program(weights, batch), jax.jit(run)(weights, batch)
    np.testing.assert_array_equal(tokens, wanted)
    lengths = np.count_nonzero(wanted, axis=1)
    assert len(set(lengths.tolist())) > 3 and np.mean(lengths < 64) > 0.75, lengths


def test_prompts_of_targets():
    of = model(decoding.beam_search)
    prompts = np.zeros((6, 8), np.int32)
    prompts[:4, 1:4] = [7, 9, 1]  # EOS is not part of the prompt
    tokens, _ = decode(of, BATCH | {"decoder_input_tokens": prompts}, num_decodes=4, prompt_with_targets=True)
    free, _ = beams()
    assert (tokens[:4, :, :2] == [7, 9]).all() and (tokens[:4] != free[:4]).any()
    np.testing.assert_array_equal(tokens[4:], free[4:])


def test_defaults_are_those_of_t5x():
    """Beam search with one beam and a brevity penalty, and greedy sampling."""
    vocabulary = PassThroughVocabulary(31, eos_id=1)
    of = EncoderDecoderModel(tiny.model().module, vocabulary, vocabulary, None)
    tokens, scores = decode(of)
    expected = decode(model(decoding.beam_search), num_decodes=1, decoder_params={"alpha": 0.6})
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_array_equal(scores, expected[1])
    config = TransformerConfig(vocab_size=31, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=8, num_layers=1)
    alone = DecoderOnlyModel(DecoderWrapper(config), vocabulary, None)
    assert alone.decode_fn is decoding.temperature_sample


def test_beams_of_a_decoder_only_model():
    """With prompts of different lengths, against exhaustive search of each example."""
    config = TransformerConfig(
        vocab_size=5, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=8, num_layers=2, dropout_rate=0.0, scan_layers=True
    )
    of = DecoderOnlyModel(DecoderWrapper(config), PassThroughVocabulary(5, eos_id=1), None, decoding.beam_search)
    shapes = of.input_shapes({"inputs": 3, "targets": 3})
    weights = tiny.random_params_of(of, shapes)
    inside = np.array([[1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]], np.int32)
    shifted = np.array([[0, 3, 4, 0, 0], [0, 0, 0, 0, 0], [0, 2, 0, 0, 0]], np.int32)
    batch = {"decoder_input_tokens": shifted, "decoder_causal_attention": inside}
    options = {"num_decodes": 100, "return_all_decodes": True, "decoder_params": {"max_decode_step": 3, "alpha": 0.0}}
    tokens, aux = jax.jit(functools.partial(of.predict_batch_with_aux, **options))(weights, batch)
    every = np.array([(a, b, c) for a in range(5) for b in range(5) for c in range(5)], np.int32)
    log_probs_of_all = jax.jit(
        lambda whole: jax.nn.log_softmax(
            of.module.apply({"params": weights}, whole, whole * 0 + 1, enable_dropout=False)
        )
    )
    for row, start in enumerate(inside.sum(1) - 1):
        whole = np.zeros((125, 6), np.int32)
        whole[:, : start + 1] = shifted[row, : start + 1]
        whole[:, start + 1 : start + 4] = every
        log_probs = np.asarray(log_probs_of_all(whole))
        found = {}
        for n, output in enumerate(every.tolist()):
            if 1 in output:
                end = output.index(1) + 1
                total = sum(float(log_probs[n, start + i, output[i]]) for i in range(end))
                found[tuple(output[:end] + [0] * (5 - end))] = total
        best = sorted(found, key=found.get)[-20:]
        assert [tuple(one) for one in np.asarray(tokens)[row, -20:].tolist()] == best
        np.testing.assert_allclose(aux["scores"][row, -20:], [found[one] for one in best], rtol=1e-4)


def test_scores_with_intermediates():
    class Sows(nn.Module):
        """Our network, with a sown value."""

        inner: nn.Module

        def __call__(self, *args, **kwargs):
            logits = self.inner(*args, **kwargs)
            self.sow("intermediates", "seen", logits.sum())
            return logits

    of = tiny.model()
    of.module = Sows(of.module)
    weights = {"inner": params(False)}
    scores, sown = jax.jit(functools.partial(of.score_batch, return_intermediates=True))(weights, BATCH)
    np.testing.assert_allclose(scores, jax.jit(of.score_batch)(weights, BATCH), rtol=1e-5)
    decoder = sown["decoder"]
    np.testing.assert_array_equal(decoder["target_tokens"][0], BATCH["decoder_target_tokens"])
    np.testing.assert_array_equal(decoder["loss_weights"][0], BATCH["decoder_loss_weights"])
    np.testing.assert_allclose(decoder["token_scores"][0].sum(-1), scores, rtol=1e-5)
    assert (np.asarray(decoder["token_scores"][0])[BATCH["decoder_target_tokens"] == 0] == 0).all()
    assert np.shape(sown["seen"][0]) == ()


@pytest.mark.parametrize("config", mark_slow({"tied": tiny.T5_1_0, "untied": tiny.T5_1_1}, slow=["tied"]))
def test_first_logits(config):
    of, weights = tiny.model(config), tiny.random_params(config)
    wanted = np.random.default_rng(0).integers(0, 31, (6, 3)).astype(np.int32)
    whole = jax.jit(of.compute_logits)(
        weights, {name: v[:, :1] if "decoder" in name else v for name, v in BATCH.items()}
    )
    first = jax.jit(functools.partial(of.score_batch, first_logits=True))
    given = {"encoder_input_tokens": BATCH["encoder_input_tokens"], "decoder_target_tokens": wanted}
    np.testing.assert_allclose(first(weights, given), np.take_along_axis(whole[:, 0], wanted, -1), rtol=1e-4, atol=1e-5)
