"""T5X's `t5x.infer`; see `t5x.runs.infer`."""

from t5x.inference.t5x_api import _extract_tokens_and_aux_values as _extract_tokens_and_aux_values
from t5x.inference.t5x_api import _Inferences as _Inferences
from t5x.runs.infer import *  # noqa: F403

if __name__ == "__main__":
    from t5x.cli.main import main_of

    main_of("infer")
