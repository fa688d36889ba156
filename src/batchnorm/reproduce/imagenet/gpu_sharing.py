"""Let several processes use one GPU at the same time, by NVIDIA's Multi-Process Service where it is installed.

Without it the GPU gives each process its turn: eight small networks then take as long as one after the other.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@contextmanager
def shared_gpu(processes: int) -> Iterator[bool]:
    """Prepare the surroundings that processes started meanwhile inherit; tell whether the service runs for them.

    A service that is already there is left as it is.

    Beyond the paper: one GPU has room for several.
    """
    if processes < 2:
        yield False
        return
    before = dict(os.environ)
    # A kernel whose programs wait for each other could wait for ever for room that other processes took (ops/plan.py).
    os.environ.setdefault("BATCHNORM_LAUNCHES_AT_ONCE", "0")
    # On all multiprocessors, one process's wide kernels hold up the small ones of all others (docs/decisions.md).
    os.environ.setdefault(SHARE, str(max(25, 200 // processes)))
    folder = None
    try:
        if shutil.which(CONTROL) is not None and FOLDERS[0] not in os.environ:
            folder = Path(tempfile.mkdtemp(prefix="mps-"))
            for name in FOLDERS:
                os.environ[name] = str(folder / name.lower())
                Path(os.environ[name]).mkdir()
            started = subprocess.run([CONTROL, "-d"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
            if not started:  # not allowed here, or no such GPU: turns, then
                for name in FOLDERS:
                    del os.environ[name]
        yield FOLDERS[0] in os.environ
    finally:
        if folder is not None and FOLDERS[0] in os.environ:
            subprocess.run([CONTROL], input=b"quit\n", capture_output=True)
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        os.environ.clear()
        os.environ.update(before)
