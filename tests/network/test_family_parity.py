"""Every encoder-decoder of the T5 family against Hugging Face's own models, of random sizes, scanned and unrolled.

Each case carries the random weights of a transformers model over as a checkpoint, and its gradients the same way.
"""

import copy
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
import torch

from t5x.checkpoints.formats import open_checkpoint
from t5x.checkpoints.transfer import config_of, restore
from t5x.decoding import greedy_decode
from t5x.models import EncoderDecoderModel
from t5x.network import CACHES, T5Config
from t5x.partitioning import PjitPartitioner
from t5x.trainer import StateLayout
from tests.checkpoints.formats import huggingface_models
from tests.support import tiny
from tests.support.marks import mark_slow

FIXED = {"ByT5": {"num_layers": 3, "num_decoder_layers": 1, "vocab_size": 384}}
# (family, whether its layers are scanned).
CASES = {
    f"{family}, {'scanned' if scan else 'unrolled'}": [family, scan]
    for family, scan in [
        ("T5 1.0", False),
        ("T5 1.0", True),
        ("T5 1.1", False),
        ("mT5", True),
        ("ByT5", False),
        ("umT5", False),
        ("umT5", True),
    ]
}


def cases(*slow: str) -> pytest.MarkDecorator:
    """T5 1.1, mT5 and ByT5 are one architecture; checkpoints/test_weights.py loads mT5's own checkpoints."""
    slow = ("T5 1.0, unrolled", "mT5, scanned", "ByT5, unrolled", "umT5, unrolled", *slow)
    return pytest.mark.parametrize("case", mark_slow(CASES, slow=slow), indirect=True)


LENGTH = 12  # of what is decoded


def random_sizes(seed: int) -> dict[str, int]:
    """Heads that do not fill the width, towers of unequal depth."""
    rng = np.random.default_rng(seed)
    heads, head_dim = int(rng.choice([1, 3, 5])), int(rng.integers(3, 8))
    encoder, decoder = (int(x) for x in rng.permutation([1, 2]))
    return {
        "d_model": heads * head_dim + int(rng.choice([-1, 1, 6])), "num_heads": heads, "d_kv": head_dim,
        "d_ff": int(rng.integers(9, 24)), "num_layers": encoder, "num_decoder_layers": decoder,
        "vocab_size": int(rng.integers(40, 70)),
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Case:
    """The same weights in both systems.

    Attributes:
      made: the transformers model, with the gradients of `batch` in it.
      gradients: those, as our parameters are named and shaped.
    """

    made: torch.nn.Module
    model: EncoderDecoderModel
    params: Any
    batch: dict[str, np.ndarray]
    logits: np.ndarray
    loss: float
    gradients: Any


@pytest.fixture(scope="module")
def case(request, tmp_path_factory) -> Case:
    family, scan = request.param
    seed = request.param_index
    base = "T5 1.1" if family == "ByT5" else family
    made = huggingface_models.model(base, **random_sizes(seed) | FIXED.get(family, {}))
    with torch.no_grad():
        made.lm_head.weight[1] *= 2  # some rows end early
    folder = tmp_path_factory.mktemp("hf")
    made.save_pretrained(folder / "weights")
    if family == "umT5":
        made.config.tie_word_embeddings = False  # version 5 of transformers would scale the logits of an untied umT5
    config = T5Config(**config_of(open_checkpoint(folder / "weights")) | {"scan_layers": scan, "dropout_rate": 0.0})
    model = tiny.model(config, decode_fn=greedy_decode, loss_normalizing_factor="NUM_REAL_TARGET_TOKENS")
    layout = StateLayout.of(model, PjitPartitioner(), model.input_shapes({"inputs": 3, "targets": 3}))

    def as_ours(name: str) -> Any:
        abstract, axes = {"target": layout.abstract.params}, {"target": layout.axes}
        return restore(open_checkpoint(folder / name), abstract, axes)["target"]

    batch = tiny.batch(seed, rows=4, inputs=150, targets=140, vocab=config.vocab_size)
    targets = torch.from_numpy(batch["decoder_target_tokens"]).long()
    theirs = made(
        **_encoder_inputs(batch),
        decoder_input_ids=torch.from_numpy(batch["decoder_input_tokens"]).long(),
        labels=targets.masked_fill(targets == 0, -100),
    )
    theirs.loss.backward()
    gradients = copy.deepcopy(made)
    for parameter, of in zip(gradients.parameters(), made.parameters(), strict=True):
        parameter.data = of.grad
    gradients.save_pretrained(folder / "gradients")
    logits = theirs.logits.detach().numpy()
    return Case(made, model, as_ours("weights"), batch, logits, theirs.loss.item(), as_ours("gradients"))


def _encoder_inputs(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    inputs = torch.from_numpy(batch["encoder_input_tokens"]).long()
    return {"input_ids": inputs, "attention_mask": (inputs > 0).long()}


@cases("umT5, scanned")
def test_loss_and_gradients(case):
    (loss, _), gradients = jax.jit(jax.value_and_grad(case.model.loss_fn, has_aux=True))(case.params, case.batch)
    np.testing.assert_allclose(loss, case.loss, atol=1e-4)

    def agree(path, ours, theirs):
        name, largest = jax.tree_util.keystr(path), np.abs(theirs).max()
        assert largest > 0, f"{name} has no gradient: the comparison says nothing"
        np.testing.assert_allclose(ours, theirs, atol=1e-4 * largest, rtol=0, err_msg=name)

    jax.tree_util.tree_map_with_path(agree, gradients, case.gradients)


@cases("T5 1.0, scanned", "umT5, scanned")
def test_greedy_decoding(case):
    inputs = tiny.batch(1, rows=8, inputs=30, vocab=case.model.module.config.vocab_size)["encoder_input_tokens"]
    batch = {"encoder_input_tokens": inputs, "decoder_input_tokens": np.zeros((8, LENGTH), np.int32)}
    # Without their cache, which has too few layers where the decoder is the deeper tower.
    generated = case.made.generate(
        **_encoder_inputs(batch), do_sample=False, num_beams=1, use_cache=False, max_new_tokens=LENGTH,
        decoder_start_token_id=0, eos_token_id=1, pad_token_id=0,
    )[:, 1:].numpy()  # fmt: skip
    expected = np.zeros((8, LENGTH), np.int32)
    expected[:, : generated.shape[1]] = generated
    np.testing.assert_array_equal(jax.jit(case.model.predict_batch)(case.params, batch), expected)


@cases()
def test_logits_of_the_full_pass_and_of_single_steps(case):
    module = case.model.module

    @jax.jit
    def both(params, batch):
        full = case.model.compute_logits(params, batch)
        inputs, tokens = batch["encoder_input_tokens"], batch["decoder_input_tokens"]
        encoded = module.apply({"params": params}, inputs, enable_dropout=False, method="encode")
        decode = functools.partial(module.apply, enable_dropout=False, decode=True, method="decode")
        _, caches = decode({"params": params}, encoded, inputs, tokens, tokens, mutable=list(CACHES))

        def step(cache, token):
            variables = {"params": params, **caches, "cache": cache}
            logits, changed = decode(variables, encoded, inputs, token, token, mutable=["cache"])
            return changed["cache"], logits[:, 0]

        _, steps = jax.lax.scan(step, caches["cache"], tokens.T[:, :, None])
        return full, steps.swapaxes(0, 1)

    real = case.batch["decoder_target_tokens"] > 0
    full, steps = both(case.params, case.batch)
    np.testing.assert_allclose(full[real], case.logits[real], atol=1e-4)
    np.testing.assert_allclose(steps[real], case.logits[real], atol=1e-4)
