"""T5X's `contrib`: `gpu` is our network; importing one of the others says that it does not exist."""

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_MISSING = {"t5x.contrib.moe": "mixture-of-experts networks", "t5x.contrib.calm": "early-exit decoding (CALM)"}


class _Explanations(MetaPathFinder):
    """Raises an error that explains why a package of T5X cannot be imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if what := _MISSING.get(fullname):
            message = f"{fullname} does not exist in this package: it has no {what}. Use T5X for that model."
            raise ModuleNotFoundError(message, name=fullname)


sys.meta_path.append(_Explanations())
