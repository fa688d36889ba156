"""Result files: what was measured, on what, with which versions and from which commit."""

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


def environment(commit: str | None = None) -> dict[str, Any]:
    """Describe the machine and the software that a measurement ran on.

    Args:
        commit: that of the software, where git cannot tell.

    >>> sorted(environment())
    ['commit', 'cores', 'gpu', 'hardware', 'load', 'numpy', 'python', 'threads', 'torch']

    Beyond the paper: provenance of what is measured.
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
        "commit": commit or _commit(),
    }


def write_result(path: Path, question: str, **content: Any) -> None:
    """Write what was measured as JSON, with the question it answers and where and by what code it was measured.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_result(Path(folder) / "a.json", "how fast?", rows=[1, 2])
    ...     sorted(json.loads((Path(folder) / "a.json").read_text()))
    ['environment', 'question', 'rows']

    Beyond the paper: every number stated anywhere has such a file.
    """
    write_json(path, {"question": question, "environment": environment(), **content})


def write_json(path: Path, values: Mapping[str, Any]) -> Path:
    """Write a JSON file so that a reader sees the old or the new content, never a part."""
    write_atomically(path, (json.dumps(values, indent=1, default=str) + "\n").encode())
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Write to a temporary file beside ``path``, flush it to the disk, then rename it over ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error  # not the name of the temporary file
    # The rename itself is on the disk only when the folder is.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def check_writable(path: Path) -> None:
    """Check that a file can be written, before the work whose result it will hold; make its folder if needed.

    Raises:
        OSError: naming the file, or the part of its path that is in the way.

    >>> check_writable(Path("."))
    Traceback (most recent call last):
        ...
    IsADirectoryError: [Errno 21] Is a directory: '.'

    Beyond the paper: an hour of measurements is not lost to a mistyped --out.
    """
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
    """Return the commit of the source tree, with a mark where files differ from it; None outside a repository.

    A copy of the tree without its repository is told by ``BATCHNORM_COMMIT``.
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
