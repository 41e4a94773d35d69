"""The references themselves, held to hand-computed values, finite differences and invariances."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from . import adafactor_numpy as adafactor
from . import t5_torch as t5

T5_1_0 = t5.Config(
    vocab_size=23,
    emb_dim=8,
    num_heads=3,
    head_dim=4,
    mlp_dim=10,
    num_encoder_layers=2,
    num_decoder_layers=3,
    mlp_activations=("relu",),
    logits_via_embedding=True,
)
T5_1_1 = dataclasses.replace(T5_1_0, mlp_activations=("gelu", "linear"), logits_via_embedding=False)
both_versions = pytest.mark.parametrize("cfg", [T5_1_0, T5_1_1], ids=["t5_1_0", "t5_1_1"])


def shift_right(targets: np.ndarray) -> np.ndarray:
    return np.pad(targets, ((0, 0), (1, 0)))[:, :-1]


def make_batch(cfg, seed, input_lengths, target_lengths, pad_inputs_to=None, pad_targets_to=None) -> dict:
    """One padded row for each pair of lengths."""
    rng = np.random.default_rng(seed)

    def rows(lengths, width):
        out = np.zeros((len(lengths), width or max(lengths)), np.int64)
        for row, length in zip(out, lengths, strict=True):
            row[:length] = rng.integers(2, cfg.vocab_size, length)
        return out

    inputs, targets = rows(input_lengths, pad_inputs_to), rows(target_lengths, pad_targets_to)
    return {
        "encoder_input_tokens": inputs,
        "decoder_input_tokens": shift_right(targets),
        "decoder_target_tokens": targets,
        "decoder_loss_weights": (targets > 0).astype(np.float64),
    }


def pack(batch: dict) -> dict:
    """All rows of an unpadded batch in one row."""
    rows = {name: value.reshape(1, -1) for name, value in batch.items()}
    for side, tokens in (("encoder", "encoder_input_tokens"), ("decoder", "decoder_target_tokens")):
        count, length = batch[tokens].shape
        rows[f"{side}_segment_ids"] = np.repeat(np.arange(1, count + 1), length)[None]
    return rows


def forward(params, cfg, batch) -> np.ndarray:
    segments = (batch.get("encoder_segment_ids"), batch.get("decoder_segment_ids"))
    tokens = (batch[f"{name}_tokens"] for name in ("encoder_input", "decoder_input", "decoder_target"))
    return t5.forward(params, cfg, *tokens, *segments).numpy()


# --- Network ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ((32128, 512, 8, 64, 2048, 6, 6, ("relu",), True), 60_506_624),
        ((32128, 1024, 128, 128, 65536, 24, 24, ("relu",), True), 11_307_321_344),
        ((32128, 512, 6, 64, 1024, 8, 8, ("gelu", "linear"), False), 76_961_152),
        ((384, 1472, 6, 64, 3584, 12, 4, ("gelu", "linear"), False), 299_637_760),
    ],
    ids=["t5_small", "t5_11b", "t5_1_1_small", "byt5_small"],
)
def test_parameter_counts_are_those_of_the_published_models(sizes, expected):
    counts = []
    t5.map_leaves(lambda _, shape: counts.append(math.prod(shape)), t5.param_shapes(t5.Config(*sizes)))
    assert sum(counts) == expected


def test_buckets_by_hand():
    past = t5.relative_position_buckets(1001, 1, bidirectional=True)[:, 0]
    assert [int(past[n]) for n in (0, 1, 7, 8, 15, 16, 32, 64, 127, 1000)] == [0, 1, 7, 8, 9, 10, 12, 14, 15, 15]
    future = t5.relative_position_buckets(1, 1001, bidirectional=True)[0]
    assert [int(future[n]) for n in (0, 1, 7, 8, 16, 1000)] == [0, 17, 23, 24, 26, 31]
    past = t5.relative_position_buckets(1001, 1, bidirectional=False)[:, 0]
    assert [int(past[n]) for n in (0, 1, 15, 16, 20, 32, 64, 127, 1000)] == [0, 1, 15, 16, 17, 21, 26, 31, 31]
    assert not t5.relative_position_buckets(1, 50, bidirectional=False).any()


@pytest.mark.parametrize("bidirectional, buckets", [(True, 16), (False, 32)])
def test_buckets_agree_with_integer_arithmetic(bidirectional, buckets):
    """Bucket e + k (e = buckets / 2) starts where (n / e)^e >= (128 / e)^k; integers once multiplied by e^e."""
    exact = buckets // 2

    def bucket(n):
        if n < exact:
            return n
        return exact + max(k for k in range(exact) if n**exact >= exact**exact * (128 // exact) ** k)

    found = t5.relative_position_buckets(600, 1, bidirectional=bidirectional)[:, 0]
    assert found.tolist() == [bucket(n) for n in range(600)]


@both_versions
def test_padding_changes_nothing(cfg):
    params = t5.random_params(cfg, seed=0)
    short = forward(params, cfg, make_batch(cfg, 1, [5], [4]))
    long = forward(params, cfg, make_batch(cfg, 1, [5], [4], pad_inputs_to=9, pad_targets_to=7))
    np.testing.assert_allclose(long[:, :4], short, rtol=0, atol=1e-12)


@both_versions
def test_decoder_is_causal_and_encoder_is_not(cfg):
    params = t5.random_params(cfg, seed=0)
    batch = make_batch(cfg, 1, [6], [6])
    before = forward(params, cfg, batch)
    batch["decoder_input_tokens"][0, 3] += 1
    changed = np.abs(forward(params, cfg, batch) - before).max(axis=(0, 2))
    assert (changed[:3] == 0).all() and (changed[3:] > 1e-6).all()
    batch["decoder_input_tokens"][0, 3] -= 1
    batch["encoder_input_tokens"][0, 5] = 2 if batch["encoder_input_tokens"][0, 5] != 2 else 3
    assert (np.abs(forward(params, cfg, batch) - before).max(axis=(0, 2)) > 1e-6).all()


@both_versions
def test_packed_sequences_do_not_see_each_other(cfg):
    params = t5.random_params(cfg, seed=0)
    batch = make_batch(cfg, 1, [5, 5, 5], [4, 4, 4])
    alone = forward(params, cfg, batch)
    packed = forward(params, cfg, pack(batch))
    np.testing.assert_allclose(packed.reshape(alone.shape), alone, rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        t5.score(params, cfg, pack(batch)), t5.score(params, cfg, batch).sum(keepdims=True), rtol=1e-12
    )


def test_mlp_and_norm_by_hand():
    x = torch.tensor([[3.0, -4.0]], dtype=torch.float64)
    scale = torch.tensor([2.0, 1.0], dtype=torch.float64)
    root_mean_square = math.sqrt(12.5 + 1e-6)
    np.testing.assert_allclose(t5.rms_norm(x, scale), [[6 / root_mean_square, -4 / root_mean_square]], rtol=1e-15)
    eye = {"kernel": torch.eye(2, dtype=torch.float64)}
    np.testing.assert_allclose(t5.mlp({"wi": eye, "wo": eye}, T5_1_0, x), [[3.0, 0.0]])
    gated = t5.mlp({"wi_0": eye, "wi_1": eye, "wo": eye}, T5_1_1, x)
    gelu = torch.nn.functional.gelu(x, approximate="tanh")
    np.testing.assert_allclose(gated, gelu * x, rtol=1e-14)


# --- Loss and gradients ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cfg, packed, loss_kwargs",
    [
        (T5_1_0, True, {"z_loss": 1e-2, "loss_normalizing_factor": "AVERAGE_PER_SEQUENCE"}),
        (T5_1_1, False, {"label_smoothing": 0.1, "loss_normalizing_factor": "num_real_target_tokens"}),
    ],
    ids=["t5_1_0_packed", "t5_1_1_smoothed"],
)
@pytest.mark.slow
def test_gradients_agree_with_finite_differences(cfg, packed, loss_kwargs):
    params = t5.random_params(cfg, seed=0)
    batch = pack(make_batch(cfg, 1, [5, 5], [4, 4])) if packed else make_batch(cfg, 1, [5, 3], [4, 6])
    _, grads = t5.loss_and_grads(params, cfg, batch, **loss_kwargs)
    rng = np.random.default_rng(2)

    def loss_moved(target, move):
        moved = t5.map_leaves(lambda path, leaf: leaf + move if path == target else leaf, params)
        logits = torch.tensor(forward(moved, cfg, batch))
        segments = batch.get("decoder_segment_ids")
        targets, weights = batch["decoder_target_tokens"], batch["decoder_loss_weights"]
        return t5.loss(logits, targets, weights, segment_ids=segments, **loss_kwargs)[0].item()

    def check(path, grad):
        direction = rng.normal(size=grad.shape)
        direction /= np.linalg.norm(direction)
        slope = (loss_moved(path, 1e-5 * direction) - loss_moved(path, -1e-5 * direction)) / 2e-5
        assert np.abs(grad).max() > 1e-7, path
        np.testing.assert_allclose(np.vdot(grad, direction), slope, rtol=1e-5, atol=1e-9, err_msg="/".join(path))

    t5.map_leaves(check, grads)


def test_loss_gradient_has_its_closed_form():
    """d loss / d logits = (1 + 2 z logZ) softmax - target, times the weight."""
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=(2, 3, 5)), requires_grad=True)
    targets, weights, z_loss = rng.integers(0, 5, (2, 3)), rng.uniform(size=(2, 3)), 0.03
    total, z_part = t5.loss(logits, targets, weights, z_loss=z_loss)
    total.backward()
    values = logits.detach().numpy()
    log_z = np.log(np.exp(values).sum(-1))
    softmax = np.exp(values - log_z[..., None])
    expected = (1 + 2 * z_loss * log_z)[..., None] * softmax - np.eye(5)[targets]
    np.testing.assert_allclose(logits.grad, expected * weights[..., None], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(z_part.item(), (weights * z_loss * log_z**2).sum(), rtol=1e-12)
    of_targets = np.take_along_axis(values - log_z[..., None], targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(total.item(), z_part.item() - (weights * of_targets).sum(), rtol=1e-12)


def test_smoothed_loss_of_a_perfect_prediction_is_zero():
    perfect = np.full((1, 1, 5), math.log(0.2 / 4))
    perfect[0, 0, 3] = math.log(0.8)
    total, _ = t5.loss(torch.tensor(perfect), [[3]], [[1.0]], z_loss=0.0, label_smoothing=0.2)
    assert abs(total.item()) < 1e-14
    worse, _ = t5.loss(torch.tensor(perfect), [[2]], [[1.0]], z_loss=0.0, label_smoothing=0.2)
    np.testing.assert_allclose(worse.item(), 0.75 * math.log(16), rtol=1e-12)


def test_normalizing_factors_by_hand():
    """With uniform logits over 4 tokens and no z-loss every token costs log 4; the z-loss of one is z * (log 4)^2."""
    logits, targets = torch.zeros(3, 4, 4, dtype=torch.float64), np.zeros((3, 4), np.int64)
    weights = np.array([[1, 1, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0]])
    token = math.log(4) + 0.5 * math.log(4) ** 2
    expected = {None: 5, 10: 0.5, "NUM_REAL_TARGET_TOKENS": 1, "num_total_target_tokens": 5 / 12}
    for factor, tokens in expected.items():
        total, z_part = t5.loss(logits, targets, weights, z_loss=0.5, loss_normalizing_factor=factor)
        np.testing.assert_allclose(total.item(), tokens * token, rtol=1e-14)
        np.testing.assert_allclose(z_part.item(), tokens * 0.5 * math.log(4) ** 2, rtol=1e-14)
    with pytest.raises(ValueError, match="MEAN"):
        t5.loss(logits, targets, weights, loss_normalizing_factor="MEAN")


def test_average_per_sequence_counts_sequences_alike():
    """Token losses 1, 2, 3 | 10: the mean of the means is (2 + 10) / 2, as rows and packed; empty rows do not count."""

    def average(token_losses, weights, segment_ids=None):
        token_losses = np.asarray(token_losses, np.float64)
        logits = np.stack([np.zeros_like(token_losses), np.log(np.expm1(token_losses))], axis=-1)
        targets = np.zeros(token_losses.shape, np.int64)
        kwargs = {"z_loss": 0.0, "loss_normalizing_factor": "AVERAGE_PER_SEQUENCE", "segment_ids": segment_ids}
        return t5.loss(torch.tensor(logits), targets, weights, **kwargs)[0].item()

    rows = average([[1, 2, 3], [10, 7, 7], [7, 7, 7]], [[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    packed = average([[1, 2, 3, 10, 7], [7, 7, 7, 7, 7]], [[1, 1, 1, 1, 0], [0] * 5], [[1, 1, 1, 2, 0], [0] * 5])
    np.testing.assert_allclose([rows, packed], [6.0, 6.0], rtol=1e-12)
    np.testing.assert_allclose(average([[1, 4]], [[3, 1]]), 1.75, rtol=1e-12)


# --- Inference -------------------------------------------------------------------------------------------------------


@both_versions
def test_greedy_is_the_argmax_of_the_forward_pass(cfg):
    params = t5.random_params(cfg, seed=3)
    inputs = make_batch(cfg, 4, [5, 3, 6], [1, 1, 1])["encoder_input_tokens"]
    free = t5.greedy(params, cfg, inputs, max_len=6, eos_id=-1)
    logits = t5.forward(params, cfg, inputs, shift_right(free), np.ones_like(free))
    np.testing.assert_array_equal(free, logits.argmax(-1).numpy())

    eos = int(free[0, 2])
    stopped = t5.greedy(params, cfg, inputs, max_len=6, eos_id=eos)
    for row, ended in zip(free, stopped, strict=True):
        length = row.tolist().index(eos) + 1 if eos in row else len(row)
        assert ended.tolist() == row[:length].tolist() + [0] * (len(row) - length)
    assert (stopped[0, 3:] == 0).all()


@both_versions
def test_score_is_the_negated_plain_loss(cfg):
    params = t5.random_params(cfg, seed=0)
    batch = make_batch(cfg, 1, [5, 3], [4, 6])
    total, _ = t5.loss_and_grads(params, cfg, batch, z_loss=0.0)
    scores = t5.score(params, cfg, batch)
    assert scores.shape == (2,)
    np.testing.assert_allclose(scores.sum(), -total, rtol=1e-12)


# --- Adafactor -------------------------------------------------------------------------------------------------------


def run_adafactor(param, grads, axes=None, **kwargs):
    slot_kwargs = {k: v for k, v in kwargs.items() if k in ("beta1", "factored", "min_dim_size_to_factor")}
    slots = adafactor.init_slots(param.shape, axes, **slot_kwargs)
    for step, grad in enumerate(grads):
        param, slots = adafactor.update(param, grad, slots, step, 0.1, axes=axes, **kwargs)
    return param, slots


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize(
    "shape, axes, v_row, v_col, v",
    [
        ((128, 256), None, (128,), (256,), (1,)),
        ((256, 128), ("embed", "mlp"), (128,), (256,), (1,)),
        ((200, 200), None, (200,), (200,), (1,)),
        ((127, 256), ("embed", "mlp"), (1,), (1,), (127, 256)),
        ((512,), ("embed",), (1,), (1,), (512,)),
        ((8, 32), ("heads", "relpos_buckets"), (1,), (1,), (8, 32)),
        ((16, 3, 2, 4), ("embed", "layers", "heads", "kv"), (16, 3), (3, 2, 4), (1,)),
        ((2, 3, 4, 16), ("heads", "layers", "kv", "embed"), (3, 16), (2, 3, 4), (1,)),
        ((16, 3), ("embed", "layers"), (1,), (1,), (16, 3)),
        ((2, 3, 32), ("heads", "layers", "relpos_buckets"), (1,), (1,), (2, 3, 32)),
    ],
)
def test_slot_shapes(shape, axes, v_row, v_col, v):
    slots = adafactor.init_slots(shape, axes)
    assert {name: slot.shape for name, slot in slots.items()} == {"m": (1,), "v": v, "v_row": v_row, "v_col": v_col}


def test_adafactor_refuses_what_the_rules_do_not_decide():
    with pytest.raises(ValueError, match="needs logical axes"):
        adafactor.init_slots((4, 4, 4))
    with pytest.raises(ValueError, match="no factor rule"):
        adafactor.init_slots((4, 4, 4), ("embed", "layers", "banana"))
    with pytest.raises(ValueError, match="mix ROW, COLUMN and NONE"):
        adafactor.init_slots((4, 4, 4), ("embed", "mlp", "relpos_buckets"))


def test_first_unfactored_step_is_the_sign_of_the_gradient():
    """beta is 0 at step 0, so y = sign(g), of rms 1: not clipped. The parameter moves by lr * max(rms, 1e-3)."""
    grad = np.array([5.0, -0.01, 2.0])
    moved, slots = adafactor.update(np.array([3.0, -4.0, 0.0]), grad, adafactor.init_slots((3,)), 0, 0.1)
    scale = 0.1 * math.sqrt(25 / 3)
    np.testing.assert_allclose(moved, [3 - scale, -4 + scale, -scale], rtol=1e-12)
    np.testing.assert_allclose(slots["v"], grad**2, rtol=1e-12)
    moved, _ = adafactor.update(np.zeros(3), grad, adafactor.init_slots((3,)), 0, 0.1)
    np.testing.assert_allclose(moved, [-1e-4, 1e-4, -1e-4], rtol=1e-12)


def test_second_step_clips_and_decays_by_hand():
    """g = 1 then 3: beta_1 = 1 - 2^-0.8, v = beta + 9 (1 - beta), y = 3 / sqrt(v) > 1 is clipped to 1."""
    options = {"multiply_by_parameter_scale": False, "beta1": 0.9, "weight_decay_rate": 0.25}
    param, slots = run_adafactor(np.array([2.0]), [np.array([1.0]), np.array([3.0])], **options)
    beta = 1 - 2**-0.8
    np.testing.assert_allclose(slots["v"], [beta + 9 * (1 - beta)], rtol=1e-12)
    first = 0.1 * 0.1
    second = 0.9 * first + 0.1 * 0.1
    np.testing.assert_allclose(slots["m"], [second], rtol=1e-12)
    np.testing.assert_allclose(param, [0.75 * (0.75 * 2 - first) - second], rtol=1e-12)
    free, _ = run_adafactor(
        np.array([2.0]), [np.array([1.0]), np.array([3.0])], multiply_by_parameter_scale=False, clipping_threshold=None
    )
    np.testing.assert_allclose(free, [2 - 0.1 - 0.3 / math.sqrt(beta + 9 * (1 - beta))], rtol=1e-12)


def test_factoring_is_exact_for_a_rank_one_gradient():
    """|g| = outer(a, b) has g^2 = R C / mean(R) exactly, so the factored and the unfactored updates agree."""
    param = draw(128, 130)
    grads = [np.outer(np.abs(draw(128)), np.abs(draw(130, seed=1))) * np.sign(draw(128, 130, seed=2))] * 2
    factored, slots = run_adafactor(param, grads)
    whole, _ = run_adafactor(param, grads, factored=False)
    assert slots["v_row"].shape == (128,)
    np.testing.assert_allclose(factored, whole, rtol=1e-10)
    ordinary = [draw(128, 130, seed=5)] * 2
    assert np.abs(run_adafactor(param, ordinary)[0] - run_adafactor(param, ordinary, factored=False)[0]).max() > 1e-3


@pytest.mark.parametrize("shape", [(128, 192), (192, 128), (5, 7)], ids=["wide", "tall", "unfactored"])
def test_batched_parameter_is_many_parameters(shape):
    factored = min(shape) >= 128
    param, grads = draw(3, *shape) * np.array([0.1, 1, 10])[:, None, None], [draw(3, *shape, seed=s) for s in (1, 2, 3)]
    alone = [run_adafactor(param[i], [g[i] for g in grads], beta1=0.9)[0] for i in range(3)]
    stacked, _ = run_adafactor(
        np.moveaxis(param, 0, 1),
        [np.moveaxis(g, 0, 1) for g in grads],
        ("embed", "layers", "mlp"),
        beta1=0.9,
        factored=factored,
    )
    np.testing.assert_allclose(np.moveaxis(stacked, 1, 0), alone, rtol=1e-9, atol=1e-12)


def test_several_column_dims_act_as_one():
    param, grads = draw(130, 4, 40), [draw(130, 4, 40, seed=s) for s in (1, 2)]
    split, slots = run_adafactor(param, grads, ("embed", "heads", "kv"))
    joined, joined_slots = run_adafactor(param.reshape(130, 160), [g.reshape(130, 160) for g in grads])
    np.testing.assert_allclose(split.reshape(130, 160), joined, rtol=1e-10)
    np.testing.assert_allclose(slots["v_col"].reshape(160), joined_slots["v_col"], rtol=1e-12)


def test_max_parameter_scale_bounds_the_step():
    moved, _ = run_adafactor(np.full(4, 50.0), [np.ones(4)], max_parameter_scale=2.0)
    np.testing.assert_allclose(moved, 50 - 0.1 * 2, rtol=1e-12)


# --- Schedules -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "step, expected, options",
    [
        (0, 0.01, {"factors": "constant * rsqrt_decay", "base_learning_rate": 1.0, "warmup_steps": 10000}),
        (10000, 0.01, {"factors": "constant * rsqrt_decay", "base_learning_rate": 1.0, "warmup_steps": 10000}),
        (40000, 0.005, {"factors": "constant * rsqrt_decay", "base_learning_rate": 1.0, "warmup_steps": 10000}),
        (10**6, 0.001, {"factors": "constant", "base_learning_rate": 0.001}),
        (0, 1e-8, {}),
        (500, 0.25 / math.sqrt(1000), {}),
        (4000, 0.5 / math.sqrt(4000), {}),
        (4000, 0.25, {"factors": "constant*rsqrt_normalized_decay"}),
        (4000, 0.5, {"factors": "constant*rsqrt_normalized_decay", "step_offset": 3500}),
        (45000, 0.125, {"factors": "constant * decay_every"}),
        (500, 0.5, {"factors": "constant * cosine_decay"}),
        (51000, 0.25, {"factors": "constant * cosine_decay"}),
        (101000, 0.5, {"factors": "constant * cosine_decay"}),
        (250, 0.25, {"factors": "linear_decay", "base_learning_rate": 1.0, "decay_factor": 1e-4}),
        (3000, 0.8, {"factors": "linear_decay", "base_learning_rate": 1.0, "decay_factor": 1e-4}),
        (10**9, 1e-5, {"factors": "linear_decay", "decay_factor": 1e-4, "min_learning_rate": 1e-5}),
    ],
)
def test_schedules_by_hand(step, expected, options):
    assert adafactor.learning_rate(step, **options) == pytest.approx(expected, rel=1e-12)


def test_unknown_schedule_factor():
    with pytest.raises(ValueError, match="banana"):
        adafactor.learning_rate(1, "constant * banana")
