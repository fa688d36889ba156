"""Error messages for the command line, and checks of options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

LARGEST = {int: 2**63 - 1, float: 3.4e38}  # the largest int64 and about the largest float32
SEED_MAX = 2**32 - 1


class JobsFailedError(RuntimeError):
    """Raised if a part of a command's work failed; the message says which part."""


def sentence(error: Exception) -> str:
    """Return an error's message or, for an OSError with a path, the path and the reason.

    >>> sentence(PermissionError(13, "Permission denied", "runs/a"))
    'runs/a: permission denied'
    >>> sentence(ValueError("steps=0: train at least one"))
    'steps=0: train at least one'
    """
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}"
    return str(error)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return a phrase for each option in ``here`` whose value is missing or different in a stored run, ``there``.

    >>> differences({"rate": 0.0015, "seed": 0}, {"rate": 0.1, "seed": 0})
    ['rate is 0.0015 instead of 0.1']
    """
    return [f"{name} is {there.get(name)!r} instead of {v!r}" for name, v in here.items() if there.get(name) != v]


def listed(names: Sequence[str], most: int = 5) -> str:
    """Join at most ``most`` names; an ellipsis stands for the others.

    >>> listed(["a", "b", "c"], most=2)
    'a, b, ...'
    """
    return ", ".join([*names[:most], "..."] if len(names) > most else names)


def at_least(least: float, /, **options: object) -> None:
    """Check that options are numbers of at least ``least``, or nonempty tuples of such numbers without duplicates.

    An option that is None was not given and is not checked.

    Raises:
        ValueError: if an option fails its check; the message names the first one that does.

    >>> at_least(1, steps=10, marks=(1, 2), processes=None)
    >>> at_least(1, log_every=0)
    Traceback (most recent call last):
        ...
    ValueError: log_every=0: must be 1 or more
    """
    _check(lambda value: value >= least, f"{least:g} or more", options)


def above(bound: float, /, **options: object) -> None:
    """Check options as :func:`at_least` does, but require numbers above ``bound``.

    >>> above(0, rate=float("nan"))
    Traceback (most recent call last):
        ...
    ValueError: rate=nan: must be above 0
    """
    _check(lambda value: value > bound, f"above {bound:g}", options)


def between(least: float, most: float, /, **options: object) -> None:
    """Check options as :func:`at_least` does, but require numbers from ``least`` to ``most``.

    >>> between(0, SEED_MAX, seed=-1)
    Traceback (most recent call last):
        ...
    ValueError: seed=-1: must be from 0 to 4294967295
    """
    _check(lambda value: least <= value <= most, f"from {least} to {most}", options)


def _check(fits: Callable[[float], bool], what: str, options: dict[str, object]) -> None:
    for name, given in options.items():
        if given is None:
            continue
        values = given if isinstance(given, tuple) else (given,)
        if not values:
            raise ValueError(f"{name} is empty: give at least one number")
        for value in values:
            # Some options are read from recipe or plan files, so a value may have any type.
            most = LARGEST.get(type(value))
            if most is None or not fits(value):
                raise ValueError(f"{name}={value!r}: must be {what}")
            if value > most:
                raise ValueError(f"{name}={value!r}: must be at most {most}")
        if len(set(values)) < len(values):
            raise ValueError(f"{name} contains duplicates: {', '.join(f'{value:g}' for value in values)}")
