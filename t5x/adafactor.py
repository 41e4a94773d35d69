"""T5X's `t5x.adafactor`; see `t5x.optimizers.adafactor`."""

from t5x.optimizers.adafactor import *  # noqa: F403
from t5x.optimizers.adafactor import _AdafactorHyperParams, _AdafactorParamState  # noqa: F401
from t5x.optimizers.protocol import OptimizerDef, OptimizerState  # noqa: F401
