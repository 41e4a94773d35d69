"""What a task promises about one of its features."""

import dataclasses
from typing import Any

import numpy as np

from t5x.data.vocabularies import Vocabulary


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a task's examples.

    Attributes:
      vocabulary: turns its text into ids.
      add_eos: whether `append_eos` and its relatives append EOS.
      required: whether every example must have it.
      dtype: anything that numpy takes for a dtype; kept as its name.
      rank: number of dimensions.
    """

    vocabulary: Vocabulary
    add_eos: bool = True
    required: bool = True
    dtype: Any = "int32"
    rank: int = 1

    def __post_init__(self):
        # TensorFlow's dtypes, common in seqio tasks, carry their numpy equivalent.
        object.__setattr__(self, "dtype", np.dtype(getattr(self.dtype, "as_numpy_dtype", self.dtype)).name)
