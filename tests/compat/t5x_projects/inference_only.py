"""Inference from a checkpoint, without gin: load the arrays, build the model, predict and score."""

import jax

from t5x import checkpoints, models, partitioning, train_state, utils
from t5x.examples.t5 import network


def predict(checkpoint, vocabulary, converter, examples, lengths):
    """Return {index: text} and {index: score} of examples of token ids."""
    state = checkpoints.load_t5x_checkpoint(checkpoint)
    config = network.T5Config(
        vocab_size=384, dtype="float32", emb_dim=8, num_heads=2, num_encoder_layers=1, num_decoder_layers=1, head_dim=4,
        mlp_dim=16, mlp_activations=("gelu", "linear"), dropout_rate=0.0,
    )  # fmt: skip
    model = models.EncoderDecoderModel(network.Transformer(config), vocabulary, vocabulary, optimizer_def=None)
    partitioner = partitioning.PjitPartitioner(num_partitions=1)
    initializer = utils.TrainStateInitializer(
        optimizer_def=None,
        init_fn=model.get_initial_variables,
        input_shapes={"encoder_input_tokens": (4, lengths["inputs"]), "decoder_input_tokens": (4, lengths["targets"])},
        partitioner=partitioner,
    )
    inference_state = train_state.InferenceState(step=state["state"]["step"], params=state["target"])
    features = [(i, converter.convert_row([example], lengths)) for i, example in enumerate(examples)]
    infer = lambda step: utils.get_infer_fn(step, 4, initializer.train_state_axes, partitioner)
    predictions = infer(model.predict_batch)(features, inference_state, rng=jax.random.PRNGKey(0))
    scores = infer(model.score_batch)(features, inference_state)
    return {i: vocabulary.decode(ids) for i, ids in predictions}, dict(scores)
