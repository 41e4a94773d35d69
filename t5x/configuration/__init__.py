"""Configuration by gin files and `--gin.NAME=VALUE` arguments, with errors that say what to mend.

    rest, bindings = split_gin_args(sys.argv[1:])
    parse(gin_files=["t5x/configs/runs/finetune.gin"], bindings=bindings, entry_points={"train": train})
    check(train)           # everything missing or of the wrong type, in one ConfigurationError
    configured(train)()    # runs with the bound arguments

gin-config (0.5.0) keeps the bindings and calls the functions; this room reads the files itself, because gin keeps no
record of where a binding was made. It does not import JAX.

`import __main__ as train_script` in a gin file means the `entry_points` of `parse`, whatever program is running;
`__main__` itself is not touched. `import seqio` means `t5x.data` where seqio is not installed (`aliases`); only gin
files see that, Python's `import seqio` still fails. Where seqio is installed, its vocabularies, feature converters,
Evaluator and loggers are still those of `t5x.data`, so that gin files do the same in both; the rest is seqio's.
"""

from t5x.configuration.arguments import rewrite_gin_args, split_gin_args
from t5x.configuration.checks import check, check_everything
from t5x.configuration.errors import ConfigurationError
from t5x.configuration.imports import DEFAULT_ALIASES
from t5x.configuration.parsing import parse
from t5x.configuration.printing import config_str, resolved_str
from t5x.configuration.runtime import configured, root_cause, user_message
from t5x.configuration.session import clear
from t5x.configuration.summary import write_summary

__all__ = [
    "DEFAULT_ALIASES",
    "ConfigurationError",
    "check",
    "check_everything",
    "clear",
    "config_str",
    "configured",
    "parse",
    "resolved_str",
    "rewrite_gin_args",
    "root_cause",
    "split_gin_args",
    "user_message",
    "write_summary",
]
