"""Errors that users can fix; see `t5x._runtime.errors`."""

from t5x._runtime.errors import *  # noqa: F403
