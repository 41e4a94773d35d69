"""Errors that the user can fix."""


class UserError(Exception):
    """Something in the input, the configuration or the environment is wrong.

    The message says what is wrong, where, and how to fix it. The command line prints it without a traceback and
    exits with `exit_code`; from Python it is an ordinary exception.
    """

    exit_code = 2


class TemporaryError(UserError):
    """A failure that may not happen again, such as a process that the system killed: a scheduler may retry."""

    exit_code = 75  # EX_TEMPFAIL
