"""t5x: train, fine-tune, evaluate, run and export T5-family models in JAX.

Importing the package imports neither JAX nor Flax, so that `t5x --help` answers at once; import the rooms you need
(`from t5x import models, partitioning, trainer, utils`).
"""

import os

__version__ = "0.1.0"

# Remote paths are opened with fsspec. Where TensorFlow happens to be installed, etils would import all of it for them.
os.environ.setdefault("EPATH_USE_TF", "false")
