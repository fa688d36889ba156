"""Write result files atomically, with the hardware, software versions and commit that the measurements come from."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

# Reject JSON that is nested more deeply than this, because printing it could exhaust the stack. This library's own
# files are nested far less.
MAX_DEPTH = 100


def environment() -> dict[str, Any]:
    """Return a description of this machine and its software, to record with a measurement.

    >>> sorted(environment())
    ['commit', 'cores', 'gpu', 'hardware', 'load', 'numpy', 'python', 'threads', 'torch']
    """
    return {
        "hardware": _cpu(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "load": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "commit": _commit(),
    }


def write_result(path: Path, question: str, **content: Any) -> None:
    """Write a measurement as JSON, with the question it answers, the hardware and the commit.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_result(Path(folder) / "a.json", "how fast?", rows=[1, 2])
    ...     sorted(json.loads((Path(folder) / "a.json").read_text()))
    ['environment', 'question', 'rows']
    """
    write_json(path, {"question": question, "environment": environment(), **content})


def write_json(path: Path, values: Mapping[str, Any]) -> Path:
    """Write a JSON file atomically."""
    write_atomically(path, (json.dumps(values, indent=1, default=str) + "\n").encode())
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ValueError: if the file does not contain a JSON object, or if the object is nested too deeply; the message names
            the file.
    """
    return parse_json(path.read_bytes(), str(path))


def parse_json(text: bytes, where: str) -> dict[str, Any]:
    """Parse JSON text that must contain an object; error messages start with ``where``, the source of the text.

    >>> parse_json(b"[1]", "a.json")
    Traceback (most recent call last):
        ...
    ValueError: a.json is not a JSON object (it is of type list)
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where} is not a JSON object (it is of type {type(value).__name__})")
    if _depth(value) > MAX_DEPTH:
        raise ValueError(f"{where} is nested more than {MAX_DEPTH} levels deep")
    return value


def _depth(value: object) -> int:
    """Return how deeply lists and dicts are nested, without recursion."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth, level = depth + 1, [x for v in level for x in (v.values() if isinstance(v, dict) else v)]
    return depth


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file next to ``path``, flush it to disk, then rename it to ``path``.

    If ``path`` is a symbolic link, the file that it refers to is replaced, and the link is kept.
    """
    path = followed(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError) or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # name the result, not the temporary file
    # A rename is durable only after the folder is synced.
    sync(path.parent)


def followed(path: Path) -> Path:
    """Return the file that a symbolic link refers to; return any other path unchanged."""
    try:
        return path.resolve() if path.is_symlink() else path
    except RuntimeError as error:  # Python 3.11 and 3.12 raise it for links that refer to each other
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error


def sync(path: Path) -> None:
    """Wait until the contents of a file or folder are on the disk."""
    windows = os.name == "nt"
    if windows and path.is_dir():
        return  # Windows cannot open folders, but its file system journals renames, so no sync is needed
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_writable(path: Path | None) -> None:
    """Check, before long work starts, that a result file can be written, and create its folder if it is missing.

    If ``path`` is None, there is nothing to check.

    Raises:
        OSError: if the file cannot be written; the message names the file, or the part of its path that cannot be used.

    >>> check_writable(Path("."))
    Traceback (most recent call last):
        ...
    IsADirectoryError: [Errno 21] Is a directory: '.'
    """
    if path is None:
        return
    path = followed(path)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    probe = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Return the commit of the source tree, with "-dirty" if files were changed since, or None if git finds none.

    If the environment variable ``BATCHNORM_COMMIT`` is set, return its value instead.
    """
    if "BATCHNORM_COMMIT" in os.environ:
        return os.environ["BATCHNORM_COMMIT"]
    here = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.stdout.strip()
