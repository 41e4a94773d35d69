"""Settings of every test process and of the programs that tests start.

XLA compiles with little optimisation (most of the suite's time is compilation of programs that run once), and what
has been compiled is kept between runs in pytest's own cache directory.
"""

import os
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["T5X_CACHE_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / "t5x")

from t5x.startup import enable_compilation_cache

enable_compilation_cache()
