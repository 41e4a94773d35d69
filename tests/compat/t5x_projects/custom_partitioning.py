"""A network with logical axes of its own, and a partitioner that shards the embedding table by rows."""

import flax.linen as nn
from flax.linen import partitioning as nn_partitioning

from t5x import partitioning
from t5x.examples.t5 import network


class AdapterTransformer(network.Transformer):
    """A T5 whose encoder output passes through an adapter."""

    def encode(self, *args, **kwargs):
        encoded = super().encode(*args, **kwargs)
        return encoded + nn.gelu(encoded @ self.adapter_down) @ self.adapter_up

    def setup(self):
        super().setup()
        size = self.config.emb_dim
        init = nn.initializers.normal(0.1)
        with_axes = nn_partitioning.param_with_axes
        self.adapter_down = with_axes("adapter_down", init, (size, 4), axes=("embed", "adapter"), module=self)
        self.adapter_up = with_axes("adapter_up", init, (4, size), axes=("adapter", "embed"), module=self)


class RowPartitioner(partitioning.PjitPartitioner):
    """Shards by T5X's rules, but never the vocabulary."""

    def get_logical_axes(self, train_state):
        axes = super().get_logical_axes(train_state)
        params = dict(axes.params)
        params["token_embedder"] = {"embedding": partitioning.AxisNames(None, "embed")}
        return axes.replace_params(params)
