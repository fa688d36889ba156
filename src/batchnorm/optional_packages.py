"""Optional packages: the extras that install them, and the error if one is missing."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

# The modules that each extra in pyproject.toml installs, by the extra's name.
EXTRAS = {
    "train": ("safetensors", "PIL", "tensorboard"),
    "report": ("matplotlib",),
    "export": ("onnx", "onnxscript", "onnxruntime", "safetensors"),
}
PACKAGES = {"PIL": "pillow"}  # packages whose names differ from their modules' names


class MissingExtraError(ImportError):
    """Raised if an optional package is needed but not installed, or cannot be imported."""


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``; if that fails, raise an error that says how to install the package, or why importing fails.

    >>> require("math", "train").pi > 3
    True
    >>> require("absent", "report")
    Traceback (most recent call last):
        ...
    batchnorm.optional_packages.MissingExtraError: absent is not installed; run: pip install absent, or ...
    """
    try:
        return import_module(module)
    except ImportError as error:
        # Name the missing package, which may differ from `module`: torch.utils.tensorboard needs tensorboard.
        package = (error.name or module).partition(".")[0]
        if package in (module.partition(".")[0], *EXTRAS[extra]) and find_spec(package) is None:
            raise MissingExtraError(_sentence([package], [extra])) from error
        raise MissingExtraError(
            f"{module} is installed but cannot be imported ({error}): repair the installation"
        ) from error


def check_installed(*modules: str) -> None:
    """Raise MissingExtraError if optional packages are not installed; do not import them.

    >>> check_installed("math")
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        extras = {next(extra for extra, brought in EXTRAS.items() if module in brought) for module in missing}
        raise MissingExtraError(_sentence(missing, sorted(extras)))


def _sentence(modules: list[str], extras: list[str]) -> str:
    names = [PACKAGES.get(module, module) for module in modules]
    *others, last = names
    listed = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    said = f"{listed} not installed; run: pip install {' '.join(names)}"
    return f"{said}, or pip install '.[{','.join(extras)}]' in a clone of the repository"
