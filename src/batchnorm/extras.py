"""Packages that only some uses need: the error that names the extra to install."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


class MissingExtraError(ImportError):
    """Report a package that an optional part of the library needs."""


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, or say in one sentence which extra brings it.

    >>> require("math", "train").pi > 3
    True
    >>> require("no_such_package", "report")
    Traceback (most recent call last):
        ...
    batchnorm.extras.MissingExtraError: no_such_package is not installed; run: pip install 'batchnorm[report]'

    Beyond the paper: packaging.
    """
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise MissingExtraError(f"{name} is not installed; run: pip install 'batchnorm[{extra}]'") from error
