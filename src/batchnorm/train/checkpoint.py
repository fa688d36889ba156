"""Checkpoints, written atomically and verified when read.

A checkpoint is a folder such as ``step-000001234`` with three files: ``model.safetensors`` (parameters and buffers),
``state.pt`` (all other data, such as the optimizer's state; loadable with ``weights_only=True``) and
``manifest.json`` (the format, the step, and the size and SHA-256 of the other two files).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..optional_packages import require
from ..results import read_json, sync, write_atomically

FORMAT = "batchnorm checkpoint 1"
KEPT = 2


class CheckpointError(ValueError):
    """Raised for a checkpoint that cannot be used; the message says why."""


class Checkpoint(NamedTuple):
    """The contents of a checkpoint, and the reasons why newer checkpoints were skipped."""

    step: int
    model: dict[str, Tensor]
    state: dict[str, Any]
    passed_over: tuple[str, ...] = ()


def save(folder: Path, step: int, model: dict[str, Tensor], state: dict[str, Any]) -> Path:
    """Write a checkpoint atomically, and return its folder.

    A crash while writing leaves no incomplete checkpoint. Of the older checkpoints, only the newest is kept.
    Checkpoints of later steps are removed too, because :func:`load_latest` would prefer them to the new one; they are
    damaged, or come from an earlier run in the same folder.

    Args:
        folder: the folder of the run's checkpoints; created if missing.
        step: number of steps taken so far.
        model: the network's ``state_dict()``.
        state: all other data, as a dict that ``torch.load`` can read with ``weights_only=True``.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> save(folder, 7, {"w": torch.ones(2)}, {"note": "hello"}).name
    'step-000000007'
    >>> load_latest(folder).state
    {'note': 'hello'}
    """
    safetensors = require("safetensors.torch", "train")
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:09d}"
    temporary, replaced = folder / f".writing-{step:09d}", folder / f".replaced-{step:09d}"
    _clean_up(folder)
    temporary.mkdir()
    # safetensors rejects non-contiguous tensors and tensors that share memory, so copy every tensor.
    tensors = {k: v.detach().cpu().clone(memory_format=torch.contiguous_format) for k, v in model.items()}
    pickled = io.BytesIO()
    torch.save(state, pickled)
    # Serialize in memory, because errors that safetensors and torch raise on a full disk do not name the file.
    contents = {"model.safetensors": safetensors.save(tensors), "state.pt": pickled.getvalue()}
    files = {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in contents.items()
    }
    contents["manifest.json"] = json.dumps({"format": FORMAT, "step": step, "files": files}, indent=2).encode()
    try:
        for name, content in contents.items():
            write_atomically(temporary / name, content)
        sync(temporary)
        if final.exists():  # for example, this step's checkpoint is damaged, or the final network is saved again
            os.rename(final, replaced)
        os.rename(temporary, final)
    except BaseException:
        if replaced.exists() and not final.exists():
            os.rename(replaced, final)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    others = [path for path in _newest_first(folder) if path != final]
    earlier = [path for path in others if _step_of(path) < step]
    for old in {*others} - {*earlier[: KEPT - 1]}:
        shutil.rmtree(old)
    return final


def _clean_up(folder: Path) -> None:
    """Remove the temporary folders of a killed process, but restore a checkpoint that it did not finish replacing."""
    for replaced in folder.glob(".replaced-*"):
        final = folder / f"step-{replaced.name.removeprefix('.replaced-')}"
        if not final.exists():
            os.rename(replaced, final)
    for left in (*folder.glob(".writing-*"), *folder.glob(".replaced-*")):
        shutil.rmtree(left, ignore_errors=True)


def load_latest(folder: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint, or None if there are no checkpoints.

    Raises:
        CheckpointError: if there are checkpoints but none is usable; the message gives the reason for each.
    """
    passed_over: list[str] = []
    for path in _newest_first(folder):
        try:
            step, model, state, _ = load(path)
        except CheckpointError as error:
            passed_over.append(str(error))
        else:
            return Checkpoint(step, model, state, tuple(passed_over))
    if passed_over:
        raise CheckpointError(
            f"no checkpoint in {folder} can be used: {'; '.join(passed_over)}; restore one from a backup, or start a"
            " new run"
        )
    return None


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint, intact or not, or None if there are no checkpoints."""
    return max(map(_step_of, _newest_first(folder)), default=None)


def load(path: Path) -> Checkpoint:
    """Read one checkpoint and verify it against its manifest.

    Raises:
        CheckpointError: if a file is missing, was truncated or modified, or was not written by :func:`save`.
    """
    safetensors = require("safetensors.torch", "train")
    step, files = _manifest(path)
    for name, expected in files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"{path}: {name} is missing")
        actual = _fingerprint(path / name)
        if expected.get("bytes") != actual["bytes"]:
            raise CheckpointError(f"{path}: {name} has {actual['bytes']} bytes instead of {expected.get('bytes')}")
        if expected.get("sha256") != actual["sha256"]:
            raise CheckpointError(
                f"{path}: {name} is damaged or was modified: its SHA-256 is not the one in manifest.json"
            )
    try:
        model = safetensors.load_file(path / "model.safetensors")
        with zipfile.ZipFile(path / "state.pt") as file:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in file.infolist()):
                raise ValueError("state.pt is compressed and could unpack to any size")
        state = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise TypeError("state.pt does not hold a dict")
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise CheckpointError(f"{path}: model.safetensors or state.pt cannot be read ({why})") from error
    return Checkpoint(step, model, state)


def weights_digest(folder: Path) -> str | None:
    """Return the SHA-256 of the newest checkpoint's weights from its manifest, or None if there is no checkpoint.

    Raises:
        CheckpointError: if the checkpoint's manifest cannot be read.
    """
    found = _newest_first(folder)
    return str(_manifest(found[0])[1]["model.safetensors"]["sha256"]) if found else None


def _manifest(path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    """Return the step in a manifest, and a dict from each file's name to its size and SHA-256."""
    try:
        manifest = read_json(path / "manifest.json")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: it has no readable manifest.json ({error})") from error
    if manifest.get("format") != FORMAT:
        found = manifest.get("format")
        raise CheckpointError(
            f"{path}: its format is {found!r:.80}, not {FORMAT!r}; perhaps another version of batchnorm wrote it"
        )
    step, known = manifest.get("step"), manifest.get("files")
    files = {name: known.get(name) if isinstance(known, dict) else None for name in ("model.safetensors", "state.pt")}
    described = all(isinstance(file, dict) and {"bytes", "sha256"} <= file.keys() for file in files.values())
    if not isinstance(step, int) or step < 0 or not described:
        raise CheckpointError(f"{path}: manifest.json has no valid step, or lacks the size or SHA-256 of a file")
    return step, files  # type: ignore[return-value]


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _newest_first(folder: Path) -> list[Path]:
    # If save() was killed while it replaced a step's checkpoint, only .replaced-N may be left of this step.
    complete = {
        int(path.name.removeprefix(prefix)): path
        for prefix in (".replaced-", "step-")
        for path in folder.glob(f"{prefix}*")
        if path.is_dir() and path.name.removeprefix(prefix).isdigit()
    }
    return [complete[step] for step in sorted(complete, reverse=True)]


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def difference(expected: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Describe how a state dict differs from the network's; the text is empty if all names and shapes agree.

    >>> difference({"weight": torch.zeros(2), "bias": torch.zeros(2)}, {"weight": torch.zeros(3)})
    '1 entry not in the file (bias); 1 entry with a different shape (weight)'
    """
    kinds = {
        "not in the file": [k for k in expected if k not in state],
        "not in the network": [k for k in state if k not in expected],
        "with a different shape": [
            k for k, v in expected.items() if k in state and getattr(state[k], "shape", None) != v.shape
        ],
    }
    return "; ".join(
        f"{len(found)} {'entry' if len(found) == 1 else 'entries'} {kind}"
        f" ({', '.join(found[:3])}{', ...' if len(found) > 3 else ''})"
        for kind, found in kinds.items()
        if found
    )
