"""Errors that a user can meet, each with the exit code that the command line returns for it.

Raise one of these with a single clear line that names what is wrong and the remedy. Anything else
that escapes is a bug in Headwater and is shown with its traceback.
"""


class HeadwaterError(Exception):
    """What was asked for does not hold (exit code 1)."""

    exit_code = 1


class UserError(HeadwaterError):
    """Bad input, or a question that cannot be answered from what was given (exit code 2)."""

    exit_code = 2


class BlockedError(HeadwaterError):
    """The environment lacks something: an optional package, a device (exit code 3)."""

    exit_code = 3


def require_extra(extra: str, package: str) -> BlockedError:
    """The error to raise when an optional package is missing; names the extra that installs it."""
    return BlockedError(f"{package} is not installed: pip install 'headwater[{extra}]'")
