"""Weights from other runs or from files: read a state dict, compare it with a network, and start training from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import listed
from ..optional_packages import MissingExtraError, require
from .checkpoint import difference
from .saved_runs import open_run


def read_state_dict(path: Path) -> dict[str, Any]:
    """Read a state dict from a .safetensors file or, with ``weights_only=True``, from a file written by torch.save.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file does not hold a state dict; the message names the file.
    """
    try:
        if path.suffix == ".safetensors":
            state = require("safetensors.torch", "export").load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, MissingExtraError):
        raise
    except UnpicklingError as error:
        raise ValueError(
            f"{path} holds objects other than tensors, or was not written by torch.save: save net.state_dict() instead"
        ) from error
    except Exception as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise ValueError(f"{path} cannot be read as a state dict: {why}") from error
    if not isinstance(state, Mapping):
        raise ValueError(f"{path} holds a {type(state).__name__}, not a state dict: save net.state_dict()")
    _check(state, path)
    return dict(state)


def _check(state: Mapping[Any, Any], path: Path) -> None:
    """Check that all keys of a file are strings, and that a network can load its tensors."""
    for name, value in state.items():
        if not isinstance(name, str):
            raise ValueError(
                f"{path} is not a state dict, because its key {name!r:.80} is not a string: save net.state_dict()"
            )
        if isinstance(value, Tensor) and (value.is_meta or value.is_quantized or value.layout != torch.strided):
            kind = "a meta" if value.is_meta else "a quantized" if value.is_quantized else "a sparse"
            raise ValueError(f"{path}: {name} is {kind} tensor: save the state dict of a network with ordinary tensors")
    inner = [name for name, value in state.items() if isinstance(value, Mapping)]
    if inner and not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f"{path} holds dicts ({listed(inner)}) instead of tensors: save only the dict that is the state dict"
        )


def unwrapped(state: Mapping[str, Any], net: nn.Module) -> dict[str, Any]:
    """Drop the prefixes that DataParallel, DistributedDataParallel and torch.compile add to all names.

    If any name is already a name in the network, nothing is dropped.

    >>> list(unwrapped({"module._orig_mod.weight": 0, "module._orig_mod.bias": 1}, nn.Linear(1, 1)))
    ['weight', 'bias']
    """
    own = net.state_dict()
    while state and not any(name in own for name in state):
        prefix = next((p for p in ("module.", "_orig_mod.") if all(name.startswith(p) for name in state)), None)
        if prefix is None:
            break
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return dict(state)


def start_from_(net: nn.Module, source: str, classes: int) -> str:
    """Load the weights of a finished run or of a state dict file into a network before training.

    If the loaded last layer has another number of classes, the network's last layer keeps its initial weights. The
    function named in the run's recipe is not called.

    Args:
        net: the network.
        source: the run's folder, or the file.
        classes: number of classes in the new data.

    Returns:
        A message that says what was loaded.

    Raises:
        FileNotFoundError: if there is no such run or file.
        ValueError: if the run or file cannot be read, or if a layer other than the last one does not fit.
    """
    path = Path(source).expanduser()
    state = unwrapped(open_run(path).final().model if path.is_dir() else read_state_dict(path), net)
    # Drop the `frozen` buffers, because the new run decides which layers are frozen. `num_batches_tracked` may be
    # missing, because old versions of torch did not save it.
    state = {name: value for name, value in state.items() if name.rpartition(".")[2] != "frozen"}
    optional = ("frozen", "num_batches_tracked")
    expected = {k: v for k, v in net.state_dict().items() if k in state or k.rpartition(".")[2] not in optional}
    new = [name for name, value in expected.items() if _is_for_other_classes(value, state.get(name), classes)]
    problems = difference({**expected, **{name: state[name] for name in new}}, state)
    if problems:
        raise ValueError(
            f"{source} does not fit the network: {problems}; use the options that it was trained with, such as"
            " --network, --normalize or --recipe"
        )
    net.load_state_dict({name: value for name, value in state.items() if name not in new}, strict=False)
    told = f"starting from {source}: {len(state) - len(new)} of {len(expected)} tensors loaded"
    if not new:
        return told
    return f"{told}; {', '.join(new)} initialized for {classes} classes instead of {len(state[new[0]])}"


def _is_for_other_classes(mine: Tensor, theirs: Any, classes: int) -> bool:
    if not isinstance(theirs, Tensor) or not 0 < mine.dim() == theirs.dim():
        return False
    return mine.shape[1:] == theirs.shape[1:] and len(mine) == classes != len(theirs)
