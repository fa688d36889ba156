"""Run a function on several ranks, each a process of its own, over gloo."""

import os
import sys
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, multiprocessing

# Modules that the fork server imports once for all processes. They are installed packages only, because before Python
# 3.13, the server does not get its parent's sys.path.
PRELOAD = ["torch", "torch._dynamo", "batchnorm.train"]


def _rank(rank, world_size, folder, function, args):
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world_size, timeout=timedelta(minutes=20)
    )
    try:
        result = function(rank, world_size, *args)
        distributed.barrier()
    except Exception as error:
        result = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    torch.save(result, f"{folder}/{rank}.pt")
    # Exit without running destructors, because gloo's threads sometimes abort the interpreter's shutdown.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def on_ranks(world_size, function, *args):
    """Return what ``function(rank, world_size, *args)`` returns on each rank, or its error as text."""
    with tempfile.TemporaryDirectory() as folder:
        method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
        multiprocessing.get_context(method).set_forkserver_preload(PRELOAD)
        multiprocessing.start_processes(
            _rank, (world_size, folder, function, args), nprocs=world_size, start_method=method
        )
        return [torch.load(Path(folder, f"{r}.pt"), weights_only=False) for r in range(world_size)]
