import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class T5Config:
    emb_dim: int = 512
    dropout_rate: float = 0.1
    mlp_activations: Sequence[str] = ("relu",)
    dtype: Any = "float32"


class Transformer:
    def __init__(self, config: T5Config):
        self.config = config
