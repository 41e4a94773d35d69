"""`InteractiveModel` against what the trainer and the network compute themselves."""

import jax
import numpy as np
import pytest

import t5x
from t5x import configuration, data
from t5x._runtime.errors import UserError
from t5x.compat.interactive_model import (
    InferenceType,
    InteractiveModel,
    T5XScriptType,
    get_batches_from_seqio,
    get_dataset_from_natural_text_examples,
    get_gin_config_from_interactive_model,
    get_seqio_task_from_examples,
)
from t5x.decoding import greedy_decode
from t5x.models import EncoderDecoderModel
from t5x.network import T5Config, Transformer
from t5x.optimizers.adafactor import Adafactor
from t5x.partitioning import PjitPartitioner
from t5x.runs.eval import evaluate
from t5x.runs.infer import infer
from t5x.runs.train import train
from t5x.trainer import StateLayout
from tests.support import tiny

VOCABULARY = data.ByteVocabulary()
CONFIG = T5Config(
    vocab_size=384, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=16, num_encoder_layers=1, num_decoder_layers=1,
    mlp_activations=("gelu", "linear"), dropout_rate=0.1,
)  # fmt: skip
LENGTHS = {"inputs": 8, "targets": 4}
EXAMPLES = [{"input": f"{i} + {i}", "target": str(2 * i)} for i in range(3)]
BATCH_SIZE = 4


def make_model(**options) -> EncoderDecoderModel:
    return EncoderDecoderModel(Transformer(CONFIG), VOCABULARY, VOCABULARY, Adafactor(), **options)


def make(directory, **options) -> InteractiveModel:
    options = {
        "batch_size": BATCH_SIZE, "task_feature_lengths": LENGTHS, "output_dir": str(directory),
        "partitioner": PjitPartitioner(), "model": make_model(), "dtype": "float32", "restore_mode": "specific",
        "checkpoint_path": None, "input_shapes": None,
    } | options  # fmt: skip
    return InteractiveModel(**options)


def ids(text: str, length: int) -> np.ndarray:
    """ByT5's: byte + 3, EOS 1, padding 0."""
    row = [*[byte + 3 for byte in text.encode()][: length - 1], 1]
    return np.array(row + [0] * (length - len(row)), np.int32)


def batch_of(examples, rows: int = BATCH_SIZE) -> dict[str, np.ndarray]:
    targets = np.stack([ids(e["target"], 4) for e in examples] + [np.zeros(4, np.int32)] * (rows - len(examples)))
    inputs = np.stack([ids(e["input"], 8) for e in examples] + [np.zeros(8, np.int32)] * (rows - len(examples)))
    return {
        "encoder_input_tokens": inputs,
        "decoder_target_tokens": targets,
        "decoder_input_tokens": np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
        "decoder_loss_weights": (targets > 0).astype(np.int32),
    }


@pytest.fixture(scope="module")
def interactive(tmp_path_factory) -> InteractiveModel:
    return make(tmp_path_factory.mktemp("model"))


def same(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(x, y), a, b)))


@pytest.mark.slow
def test_train_steps_are_the_trainers_and_a_checkpoint_resumes(tmp_path):
    model = make(tmp_path / "a", input_shapes={name: array.shape for name, array in batch_of(EXAMPLES).items()})
    assert model.step == 0 and model.train_summary == {}
    init, dropout = jax.random.split(jax.random.key(42))
    partitioner = PjitPartitioner()
    layout = StateLayout.of(make_model(), partitioner, make_model().input_shapes(LENGTHS))
    expected = tiny.trainer(layout, layout.init(init), dropout, lambda step: 0.001)
    model.train_step(EXAMPLES)
    expected.step(batch_of(EXAMPLES))
    assert same(model.train_state.state_dict(), expected.train_state.state_dict())
    assert not list((tmp_path / "a").glob("checkpoint_*"))  # saved when asked for, not after every step
    model.save_checkpoint()
    again = make(tmp_path / "a")
    assert again.step == 1 and same(again.train_state.state_dict(), model.train_state.state_dict())
    model.train_step_from_batch_iterator(iter([batch_of(EXAMPLES[:2])]))
    expected.step(batch_of(EXAMPLES[:2]))
    assert same(model.train_state.state_dict(), expected.train_state.state_dict())
    assert model.train_summary["target_tokens"] == 4
    other = make(tmp_path / "b", checkpoint_path=str(tmp_path / "a"), restore_mode="latest")
    assert other.step == 1 and other.newest_checkpoint == str(tmp_path / "a")


@pytest.mark.slow
def test_scores_are_the_log_likelihood_under_teacher_forcing(interactive):
    scores, aux = interactive.score([*EXAMPLES, *EXAMPLES])  # six examples in two batches of four
    batch = batch_of(EXAMPLES, 3)
    logits = jax.jit(interactive.model.compute_logits)(interactive.train_state.params, batch)
    probabilities = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(logits)), batch["decoder_target_tokens"][..., None], axis=-1
    )
    expected = (probabilities[..., 0] * batch["decoder_loss_weights"]).sum(-1)
    assert aux == {}
    np.testing.assert_allclose([score for _, score in scores], [*expected, *expected], rtol=1e-5)
    assert [example["targets_pretokenized"] for example, _ in scores[:3]] == ["0", "2", "4"]


@pytest.mark.slow
def test_predictions_are_those_of_the_loaded_model(interactive, tmp_path):
    model = make(tmp_path, model=make_model(decode_fn=greedy_decode))
    model.save_checkpoint()
    texts = ["1 + 1", "2 + 2", "three", "4", "5"]
    predictions, aux = model.predict_with_aux(texts)
    expected = t5x.load(str(tmp_path)).generate(texts, max_length=4)
    assert [prediction for _, prediction in predictions] == [generation.text for generation in expected]
    assert len(aux["scores"]) == len(texts)
    several, aux = interactive.infer_with_preprocessors(
        InferenceType.PREDICT_WITH_AUX, texts[:2], [data.preprocessors.tokenize], num_decodes=2, return_all_decodes=True
    )
    assert [len(decodes) for _, decodes in several] == [2, 2] and np.shape(aux["scores"]) == (2, 2)
    assert several[0][0]["inputs"].tolist() == [byte + 3 for byte in b"1 + 1"]  # no EOS was appended


@pytest.mark.slow
def test_metrics_of_all_three_signatures(interactive):
    def of_scores(targets, scores):
        return {"mean": np.mean(scores)}

    def of_predictions(targets, predictions):
        return {"texts": all(isinstance(text, str) for text in [*targets, *predictions]), "count": len(predictions)}

    def of_aux(targets, predictions, aux_values):
        return {"aux": np.mean(aux_values["scores"])}

    expected = np.mean([score for _, score in interactive.score(EXAMPLES)[0]])
    assert interactive.evaluate(EXAMPLES, [of_scores]) == {"mean": pytest.approx(expected)}
    found = interactive.evaluate(EXAMPLES, [of_scores, of_predictions, of_aux])
    aux = interactive.predict_with_aux(EXAMPLES)[1]["scores"]
    assert found == {"mean": pytest.approx(expected), "texts": 1, "count": 3, "aux": pytest.approx(np.mean(aux))}


def test_postprocessors_make_what_metrics_compare(interactive):
    seen = interactive.evaluate_with_preprocessors(
        EXAMPLES,
        [data.preprocessors.tokenize],
        [lambda targets, predictions: {"targets": sum(targets), "predictions": sum(predictions)}],
        postprocessor=lambda text, example, is_target: int(text) if is_target else 100,
    )
    assert seen == {"targets": 6, "predictions": 300}


def test_the_loop_trains_evaluates_and_saves(interactive):
    model, first, steps = interactive, interactive.step, []

    def note(targets, predictions):
        steps.append((model.step - first, len(targets)))
        return {"count": len(targets)}

    # Two batches for five steps: they begin again.
    predictions, scores, metrics = model.train_loop(
        5, eval_period=2, train_batches=[EXAMPLES, EXAMPLES[:1]], predict_batches=["1"], score_batches=EXAMPLES,
        eval_batches=[EXAMPLES, EXAMPLES], metrics_fns=[note],
    )  # fmt: skip
    assert steps == [(2, 6), (4, 6), (5, 6)] and metrics == {"count": 6}
    assert len(predictions) == 1 and [score for _, score in scores] == [score for _, score in model.score(EXAMPLES)[0]]
    assert model.newest_checkpoint == f"{model.output_dir}/checkpoint_{first + 5}"
    assert model.train_loop(0) == (None, None, None)


def test_random_preprocessors_differ_from_step_to_step(interactive):
    seen = []

    def noisy(example, seed):
        seen.append(seed)
        return example

    for _ in range(2):
        interactive.train_step_with_preprocessors(EXAMPLES[:1], [noisy, *interactive_preprocessors()])
    assert len(set(seen)) == 2


def interactive_preprocessors():
    return [data.preprocessors.tokenize, data.preprocessors.append_eos]


# --- Helpers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def registered(interactive):
    names = ["interactive_numbers", "interactive_letters"]
    get_seqio_task_from_examples(names[0], interactive, EXAMPLES, interactive_preprocessors())
    get_seqio_task_from_examples(
        names[1], interactive, [{"input": "a", "target": "b"}] * 9, interactive_preprocessors()
    )
    data.MixtureRegistry.add("interactive_mixture", names, default_rate=1.0)
    yield
    for name in names:
        data.TaskRegistry.remove(name)
    data.MixtureRegistry.remove("interactive_mixture")


def test_batches_of_a_task_and_of_a_mixture(registered):
    (batch,) = get_batches_from_seqio("interactive_numbers", "validation", 3, 1)
    assert sorted(batch, key=str) == sorted(EXAMPLES, key=str)
    (batch,) = get_batches_from_seqio("interactive_numbers", "train", 3, 1, shuffle=False)
    assert batch == EXAMPLES
    ((first,),) = get_batches_from_seqio("interactive_numbers", "train", 1, 1, False, shuffle=False)
    assert first == {"input": [51, 35, 46, 35, 51, 1], "target": [51, 1]}
    mixed = [e["input"] for b in get_batches_from_seqio("interactive_mixture", "train", 2, 2) for e in b]
    assert len(mixed) == 4 and 0 < mixed.count("a") < 4
    with pytest.raises(UserError, match="after 3 examples"):
        get_batches_from_seqio("interactive_numbers", "train", 2, 2)


def test_a_task_need_not_be_registered(interactive):
    task = get_seqio_task_from_examples("kept_apart", interactive, EXAMPLES, [], add_to_registry=False)
    assert task.splits == ("train", "validation") and "kept_apart" not in data.TaskRegistry.names()


def test_strings_become_examples(interactive):
    found = get_dataset_from_natural_text_examples(
        ["1", {"input": "2", "target": "3"}], interactive_preprocessors(), LENGTHS, interactive.features
    )
    assert [(e["inputs"].tolist(), e["targets"].tolist()) for e in found] == [([52, 1], [1]), ([53, 1], [54, 1])]


def test_gin_configuration_continues_in_the_verbs(tmp_path):
    model = make(tmp_path)
    entries = {T5XScriptType.EVALUATION: evaluate, T5XScriptType.INFERENCE: infer}
    for script in entries:
        with pytest.raises(UserError, match="call save_checkpoint"):
            get_gin_config_from_interactive_model(model, script, "sums", "", "")
    model.save_checkpoint()
    for script in T5XScriptType:
        entry = entries.get(script, train)
        text = get_gin_config_from_interactive_model(
            model, script, "sums", "partitioning.PjitPartitioner.num_partitions = 1",
            "include 't5x/examples/t5/byt5/base.gin'\nDROPOUT_RATE = 0.0", train_steps=7,
            imports_str="from t5x.examples.t5 import network",
        )  # fmt: skip
        (tmp_path / "run.gin").write_text(text)
        configuration.clear()
        try:
            configuration.parse(
                gin_files=[str(tmp_path / "run.gin")], bindings=[], entry_points={entry.__name__: entry}
            )
            configuration.check(entry)
            resolved = configuration.resolved_str()
        finally:
            configuration.clear()
        assert "'sums'" in resolved and str(tmp_path) in resolved
        assert ("TRAIN_STEPS = 7" in resolved) is (entry is train)


WRONG = {
    "more than a batch": (lambda m: m.train_step(EXAMPLES * 2), "at most batch_size = 4"),
    "no target to train on": (lambda m: m.train_step(["1 + 1"]), "Example 0 has no target"),
    "no target to score": (lambda m: m.score(["1 + 1"]), "Example 0 has no target"),
    "no examples": (lambda m: m.predict_with_aux([]), "examples is empty"),
    "one example alone": (lambda m: m.predict_with_aux("1 + 1"), "list"),
    "another field": (lambda m: m.predict_with_aux([{"question": "1"}]), r"\['question'\]"),
    "no metrics": (lambda m: m.evaluate(EXAMPLES, []), "metric_fns is empty"),
    "no batch left": (lambda m: m.train_step_from_batch_iterator(iter([])), "no batch left"),
}


@pytest.mark.parametrize("name", WRONG)
def test_invalid_calls_raise_user_error(name, interactive):
    call, words = WRONG[name]
    with pytest.raises(UserError, match=words):
        call(interactive)


def test_a_model_without_an_optimizer_does_not_train(interactive, monkeypatch):
    monkeypatch.setattr(interactive.model, "optimizer_def", None)
    with pytest.raises(UserError, match="no optimizer"):
        interactive.train_step(EXAMPLES)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"checkpoint_path": "x", "restore_mode": "all"}, "restore_mode is 'all'"),
        ({"input_types": {"encoder_input_tokens": np.float32}}, "encoder_input_tokens.*float32"),
        ({"input_shapes": {"encoder_input_tokens": (4, 8)}}, "no decoder_input_tokens"),
        ({"checkpoint_path": "nowhere"}, "There is no checkpoint"),
        ({"dtype": "float16"}, "'float32', 'bfloat16'"),
    ],
)
def test_invalid_arguments_raise_user_error(options, words, tmp_path):
    with pytest.raises(UserError, match=words):
        make(tmp_path, **options)
