"""T5's relative position bias: a learned value per head and bucket of distances."""

import flax.linen as nn
from flax.linen import initializers

from t5x.kernels.attention_inputs import RelativeBias
from t5x.network.keys import Keys
from t5x.network.layers import parameter


class RelativePositionBias(nn.Module):
    """The module that owns a bias table."""

    num_heads: int
    bidirectional: bool
    num_buckets: int = 32
    max_distance: int = 128

    @nn.compact
    def __call__(self, keys: Keys) -> RelativeBias:
        init = initializers.variance_scaling(1.0, "fan_avg", "uniform")
        shape = (self.num_heads, self.num_buckets)
        table = parameter(self, "rel_embedding", init, shape, ("heads", "relpos_buckets"), keys)
        return RelativeBias(table, self.bidirectional, self.max_distance)
