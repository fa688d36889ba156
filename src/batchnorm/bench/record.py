"""A result file says what it was measured on: hardware, versions, commit, load."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

from .. import __version__


def write(path: Path, question: str, **content: Any) -> None:
    """Write ``content`` as JSON, with where, when and by what code it was measured.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder) / "a.json", "how fast?", rows=[1, 2])
    ...     sorted(json.loads((Path(folder) / "a.json").read_text()))
    ['commit', 'date', 'hardware', 'question', 'rows', 'versions']

    Beyond the paper: every number stated anywhere has such a file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "question": question,
        "date": _now(),
        "commit": commit(),
        "hardware": hardware(),
        "versions": versions(),
    }
    path.write_text(json.dumps(document | content, indent=1) + "\n")


def hardware() -> dict[str, Any]:
    """Describe the processor, the GPU if there is one, and how busy the machine was when asked.

    >>> hardware()["cores"] >= 1
    True

    Beyond the paper: what a time means depends on it.
    """
    found: dict[str, Any] = {"cpu": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if hasattr(os, "getloadavg"):
        found["load"] = round(os.getloadavg()[0], 2)
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def versions() -> dict[str, str]:
    """Return the versions of everything that the numbers depend on.

    >>> sorted(versions())
    ['batchnorm', 'numpy', 'python', 'torch']

    Beyond the paper: what a time means depends on them.
    """
    return {
        "batchnorm": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
    }


def commit() -> str | None:
    """Return the commit of the working tree this code lies in, "+" added where it has changes; None outside one.

    Beyond the paper: the code that measured.
    """

    def git(*words: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        if names:
            return names[0]
    return platform.processor() or platform.machine()
