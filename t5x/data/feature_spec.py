"""The specification of a task's features."""

import dataclasses

import numpy as np

from t5x.data.vocabularies import Vocabulary


@dataclasses.dataclass(frozen=True)
class Feature:
    """One feature of a task's examples.

    Attributes:
      vocabulary: converts its text to ids.
      add_eos: whether `append_eos` and similar preprocessors append EOS.
      required: whether every example must have it.
      dtype: anything that numpy accepts as a dtype; stored as its name.
      rank: number of dimensions.
    """

    vocabulary: Vocabulary
    add_eos: bool = True
    required: bool = True
    dtype: str | type | np.dtype = "int32"
    rank: int = 1

    def __post_init__(self):
        # TensorFlow's dtypes, common in seqio tasks, carry their numpy equivalent.
        object.__setattr__(self, "dtype", np.dtype(getattr(self.dtype, "as_numpy_dtype", self.dtype)).name)
