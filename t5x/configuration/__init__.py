"""Configuration with gin files and `--gin.NAME=VALUE` arguments.

    argv, bindings = split_gin_args(sys.argv[1:])
    parse(gin_files=["t5x/configs/runs/finetune.gin"], bindings=bindings, entry_points={"train": train})
    check(train)           # reports everything that is missing in one ConfigurationError
    configured(train)()    # runs with the bound arguments

This package reads the files itself, so that errors name the line and suggest a fix. gin-config stores the values and
calls the functions. JAX is not imported.

In gin files, `import __main__ as train_script` means the `entry_points` of `parse`, and the packages in `STAND_INS`
mean modules of this package. Python's own imports are not affected.
"""

# ruff: noqa: F401

from t5x.configuration.checking import check, configured, entry_points_in_use, root_cause, user_message
from t5x.configuration.printing import bindings, config_str, resolved_str
from t5x.configuration.reading import STAND_INS, parse, rewrite_gin_args, split_gin_args
from t5x.configuration.state import ConfigurationError, clear
