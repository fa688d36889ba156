"""Errors as people read them on a command line."""

from __future__ import annotations


class JobsFailedError(RuntimeError):
    """Say which of several jobs failed, and how: the message holds the ends of their logs.

    Beyond the paper: the command line.
    """


def sentence(error: Exception) -> str:
    """Say what went wrong: an error's message, or for one of the operating system which file and what about it.

    >>> sentence(PermissionError(13, "Permission denied", "runs/a"))
    'runs/a: permission denied'
    >>> sentence(ValueError("steps=0: train at least one"))
    'steps=0: train at least one'

    Beyond the paper: the command line.
    """
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)
