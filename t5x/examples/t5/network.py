"""T5X's name for the T5 network (`from t5x.examples.t5 import network` in gin files)."""

from t5x.network import T5Config, Transformer

__all__ = ["T5Config", "Transformer"]
