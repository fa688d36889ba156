"""The public names: the callables in ``__all__`` of the packages that users import."""

import importlib

PACKAGES = ["batchnorm", *(f"batchnorm.{name}" for name in ("ops", "data", "models", "monitor", "evaluate", "train"))]


def exported():
    """Yield each public name, such as ``batchnorm.ops.merge``, and its object."""
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            if callable(thing := getattr(module, name)):
                yield f"{package}.{name}", thing


WORDS = dict(exported())
