"""Build a network by name: from a function in a module or a file, or from torchvision or timm."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import signature
from pathlib import Path
from typing import Any

from torch import nn

_LIBRARY = re.compile(r"(torchvision|timm):([\w.-]+)")
# Without init_weights=True, these networks warn that their default initialization will change.
_INIT_WEIGHTS = ("googlenet", "inception_v3")


class UserCodeError(ValueError):
    """Report that the user's code raised an exception, which is the ``__cause__`` of this error."""


def make_network(name: str, classes: int | None = None) -> tuple[nn.Module, Any]:
    """Build a network by name, and return it with an example batch or None.

    A user's function may return the network alone, or a pair (network, example batch).

    Args:
        name: MODULE:FUNCTION or FILE.py:FUNCTION, a function that builds the network; or torchvision:NAME or timm:NAME,
            a network without pretrained weights. The module may be in the current folder.
        classes: the number of classes. A function gets it as ``classes=`` or ``num_classes=`` if it has such an
            argument; torchvision and timm get it as ``num_classes=``. If None, nothing is passed.

    Raises:
        ValueError: if there is no function or network of this name, if an import fails, if the module has a syntax
            error, or if the function cannot be called with these arguments or does not return a network.
        UserCodeError: if the module or the function raises another exception.

    >>> make_network("torch.nn:Identity")
    (Identity(), None)
    """
    if (library := _LIBRARY.fullmatch(name)) is not None:
        made = _from_library(library[1], library[2], classes)
    else:
        with _importing_from(_folder(name)):
            made = _call(name, *_function(name, classes))
    net, example = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(net, nn.Module):
        raise ValueError(f"{name} returned {type(net).__name__}, not a torch.nn.Module")
    return net, example


def check_function(name: str) -> None:
    """Import the module of a user's function, and check that :func:`make_network` can call the function.

    The function is not called. Networks of torchvision and timm are not checked.

    Raises:
        ValueError: if there is no such function, if an import fails, if the module has a syntax error, or if the
            function cannot be called.
        UserCodeError: if the module raises another exception.
    """
    if not is_of_library(name):
        with _importing_from(_folder(name)):
            _function(name, classes=1)


def is_of_library(name: str) -> bool:
    """Return whether a name refers to a network of torchvision or timm.

    >>> is_of_library("timm:resnet50"), is_of_library("mynet.py:build")
    (True, False)
    """
    return _LIBRARY.fullmatch(name) is not None


def _folder(name: str) -> Path:
    """Return the folder to import a function's module from, or raise ValueError if the name is not allowed."""
    source, _, function = name.rpartition(":")
    file = Path(source) if source.endswith(".py") else None
    if not (source and function and (file or not source.startswith("."))):
        raise ValueError(
            f"'{name}' is not the name of a function: write MODULE:FUNCTION (such as mynets:resnet),"
            " FILE.py:FUNCTION, torchvision:NAME or timm:NAME"
        )
    if file is None and source.partition(".")[0] in sys.stdlib_module_names:
        raise ValueError(
            f"{name}: '{source}' is a module of Python's standard library; for a function in your own file, write"
            " FILE.py:FUNCTION"
        )
    return Path.cwd() if file is None else file.resolve().parent


def _function(name: str, classes: int | None) -> tuple[Callable[..., Any], dict[str, int]]:
    """Return the function with this name, and the arguments to call it with."""
    source, _, function = name.rpartition(":")
    try:
        module = _import_file(Path(source)) if source.endswith(".py") else import_module(source)
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"cannot make a network from {name}: {error}") from error
    except Exception as error:
        raise UserCodeError(f"importing {source} raised {type(error).__name__}, so {name} was not called") from error
    found = getattr(module, function, None)
    if found is None:
        raise ValueError(f"cannot make a network from {name}: {source} has no function {function}")
    if isinstance(found, nn.Module) or not callable(found):
        raise ValueError(
            f"cannot make a network from {name}: {function} is of type {type(found).__name__}; give a function that"
            " returns a network"
        )
    return found, _arguments(name, found, classes)


def _call(name: str, function: Callable[..., Any], given: dict[str, int]) -> Any:
    try:
        return function(**given)
    except ImportError as error:
        raise ValueError(f"cannot make a network from {name}: {error}") from error
    except Exception as error:
        raise UserCodeError(f"{name} raised {type(error).__name__}") from error


def _from_library(library: str, name: str, classes: int | None) -> nn.Module:
    options: dict[str, Any] = {} if classes is None else {"num_classes": classes}
    try:
        models = import_module("timm" if library == "timm" else "torchvision.models")
    except ModuleNotFoundError as error:
        raise ValueError(f"{name} needs {error.name}, which is not installed; run: pip install {library}") from error
    except Exception as error:  # torchvision raises RuntimeError or OSError if it was built for another torch version
        why = str(error).partition("\n")[0]
        raise ValueError(
            f"{library} cannot be imported ({why}): install the versions of torch and torchvision that belong together,"
            " from the same index"
        ) from error
    try:
        if library == "timm":
            return models.create_model(name, pretrained=False, **options)  # type: ignore[no-any-return]
        options |= {"init_weights": True} if name in _INIT_WEIGHTS else {}
        return models.get_model(name, weights=None, **options)  # type: ignore[no-any-return]
    except Exception as error:  # both libraries raise various errors, for example if the name is unknown
        known = models.list_models()
        near = [] if name in known else get_close_matches(name, known)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"cannot make {library}'s {name}: {str(error).partition(chr(10))[0]}{hint}") from error


def _import_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise ImportError(f"{path} is not a file; relative paths are resolved from the current folder")
    # The module's name has a digest of the path and the content. So a file runs again only if it has changed, and files
    # of the same name in different folders do not replace each other in sys.modules.
    digest = hashlib.sha256(bytes(path) + b"\0" + path.read_bytes())
    name = f"{path.stem}_{digest.hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _arguments(name: str, function: Callable[..., Any], classes: int | None) -> dict[str, int]:
    given: dict[str, int] = {}
    try:
        expected = signature(function)
        name_of_classes = next((word for word in ("classes", "num_classes") if word in expected.parameters), None)
        if classes is not None and name_of_classes is not None:
            given[name_of_classes] = classes
        expected.bind(**given)
    except TypeError as error:
        how = f"with {name_of_classes}= alone" if given else "without arguments"
        hint = "; give its other arguments default values"
        if not given:
            hint = (
                "; give its arguments default values"
                if classes is None
                else "; if this argument is the number of classes, name it 'classes'; if not, give it a default value"
            )
        raise ValueError(f"{name} cannot be called {how}: {error}{hint}") from error
    except ValueError:
        return {}
    return given


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
