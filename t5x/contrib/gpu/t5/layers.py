"""The layers of `t5x.examples.t5`."""

from t5x.examples.t5 import layers
from t5x.examples.t5.layers import *  # noqa: F403

__all__ = layers.__all__
