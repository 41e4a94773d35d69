"""Results for each example, wherever a program puts the rows of a batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x import data
from t5x.data.dataset_config import DatasetConfig
from t5x.inference.engine import Engine
from t5x.inference.jobs import JobProgress
from t5x.inference.loaded import LoadedModel
from t5x.inference.task_inference import IndexedExample, TaskExamples, TaskJob
from t5x.models import DecoderOnlyModel
from t5x.network import DecoderWrapper, TransformerConfig
from t5x.partitioning import PjitPartitioner
from tests.support import tiny

ROWS = 4
EXAMPLES = [{"inputs": [5, 6, number + 3, 1], "targets": [7, 1]} for number in range(6)]
LENGTHS = {"inputs": 8, "targets": 3}


@pytest.fixture
def engine(loaded_tiny_t5):
    return loaded_tiny_t5.engine


def sown(params, batch, rng):
    """As of a network of four scanned layers: what they sow has the layers in front."""
    number = batch["encoder_input_tokens"][:, 2]
    return number, {
        "layers": jnp.arange(ROWS)[:, None, None] * 100 + number[:, None],
        "all": jnp.arange(ROWS),
        "one": jnp.float32(3.5),
        "pairs": number[:, None] * number,
    }


def test_rows_are_found_by_what_grows_with_the_batch(engine):
    program = engine.program(sown)
    axes = engine.row_axes(program, LENGTHS, ROWS)
    assert axes == (0, {"layers": 1, "all": -1, "one": -1, "pairs": 0})
    results = engine.run(program, EXAMPLES, LENGTHS, rows=ROWS, row_axes=axes)
    for number, (main, aux) in enumerate(results):
        assert main == number + 3
        np.testing.assert_array_equal(aux["layers"], np.arange(ROWS)[:, None] * 100 + number + 3)
        np.testing.assert_array_equal(aux["all"], np.arange(ROWS))
        assert aux["one"] == 3.5


def test_logits_of_a_decoder_only_model_begin_after_each_prompt():
    config = TransformerConfig(vocab_size=31, emb_dim=8, num_heads=2, head_dim=4, mlp_dim=8, num_layers=1)
    model = DecoderOnlyModel(DecoderWrapper(config), data.PassThroughVocabulary(31, eos_id=1), None)
    loaded = LoadedModel(None, model, partitioner := PjitPartitioner())
    loaded.engine = Engine(model, partitioner, tiny.random_params_of(model, model.input_shapes(LENGTHS)))
    inputs, targets = [[5, 6, 7], [], [9]], [[8, 1], [4, 3, 1], [2]]
    logits = jax.nn.log_softmax(loaded.logits(inputs, targets))
    sums = [row[np.arange(len(ids)), ids].sum() for row, ids in zip(logits, targets, strict=True)]
    np.testing.assert_allclose(sums, loaded.scores(inputs, targets, max_input_length=8, batch_size=4), rtol=1e-5)


def test_a_task_gets_what_was_sown_for_each_of_its_examples(engine):
    features = {name: data.Feature(engine.model.output_vocabulary) for name in LENGTHS}
    task = data.Task("sown", data.FunctionDataSource(lambda split: EXAMPLES, ("test",)), features, [])
    cfg = DatasetConfig(task, LENGTHS, "test", ROWS, shuffle=False, seed=0)
    job = TaskJob(
        description="score", engine=engine, program=engine.program(sown), cfg=cfg, lengths=LENGTHS, mode="score",
        examples=TaskExamples(task, cfg, LENGTHS), job={}, chunk_size=6, keep_aux_as_numpy=True, keep_position=True,
    )  # fmt: skip
    placed = [IndexedExample(example, i, None) for i, example in enumerate(EXAMPLES)]
    ((numbers, aux), _), _ = job.compute(placed, JobProgress(job, quiet=True))
    assert numbers == list(range(3, 9))
    np.testing.assert_array_equal(aux["layers"][:, 2, 0], 200 + np.arange(3, 9))
