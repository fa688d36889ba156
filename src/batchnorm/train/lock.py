"""Lock a run's folder so that only one process trains in it."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from ..jobs import is_locked, lock_file

LOCK_FILE = "train.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder during the ``with`` block, so that no other process trains in it.

    The operating system releases the lock when the process ends, even if it is killed, so a killed run can be resumed
    at once. Locks may be unreliable on a network file system.

    Args:
        folder: the run's folder. A missing folder is created, and removed at the end if it is still empty.

    Raises:
        ValueError: if another process has locked the folder.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp(), "run")
    >>> with locked(folder): print([path.name for path in folder.iterdir()])
    ['train.lock']
    >>> folder.exists()
    False
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    file = _open(path, folder)
    try:
        yield
    finally:
        # Remove the file before unlocking it, so that no other process locks a file that is about to be removed.
        # Windows cannot remove an open file, so on Windows the file is closed first.
        with contextlib.suppress(OSError):
            if sys.platform != "win32":
                path.unlink()
        file.close()
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                path.unlink()
            if made:
                folder.rmdir()


def _open(path: Path, folder: Path) -> IO[bytes]:
    while True:
        file = path.open("ab")
        try:
            lock_file(file)
            if _is_at(file, path):
                return file
        except OSError as error:
            if not is_locked(error):
                warnings.warn(
                    f"cannot lock {folder} ({error.strerror}): make sure that no other process uses the same --out",
                    stacklevel=4,
                )
                return file
            file.close()
            raise ValueError(
                f"another process is training in {folder}: wait for it to end, or choose another --out"
            ) from error
        file.close()


def _is_at(file: IO[bytes], path: Path) -> bool:
    """Return whether the locked file is still at this path; the previous holder of the lock may have removed it."""
    if sys.platform == "win32":
        return True  # on Windows, an open file cannot be removed
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
