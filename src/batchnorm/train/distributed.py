"""Training in one or several processes: ranks, devices and communication."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor, distributed, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..layers import Sync

CPU = torch.device("cpu")
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among the processes that train together; a single process is rank 0 of 1.

    >>> Ranks().any(True), Ranks().main
    (True, True)
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    control: distributed.ProcessGroup | None = None
    """with NCCL, a second process group (Gloo) for communication on the CPU; otherwise None"""

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum_(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.world_size > 1:
            distributed.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        if self.world_size == 1:
            return flag
        raised = torch.tensor(float(flag))
        distributed.all_reduce(raised, distributed.ReduceOp.MAX, self.control)
        return bool(raised)

    def wait(self) -> None:
        """Wait until all ranks have called this method."""
        if self.world_size > 1:
            distributed.barrier(self.control)

    def average_statistics_(self, net: nn.Module) -> None:
        """Replace each running average by its mean over the ranks.

        By default, DistributedDataParallel would instead copy rank 0's averages to all ranks. A single all-reduce
        averages all layers, except ``nn.SyncBatchNorm`` layers, layers with ``statistics=Sync()``, and layers with
        frozen statistics.
        """
        if self.world_size == 1:
            return
        layers = [
            m
            for m in net.modules()
            if isinstance(m, TorchBatchNorm)
            # Leave out averages that are already equal on all ranks, because averaging could change their last bit.
            and not isinstance(m, nn.SyncBatchNorm)
            and getattr(m, "statistics", None) != Sync()
            and not getattr(m, "frozen_statistics", False)
        ]
        running = [b for m in layers for b in (m.running_mean, m.running_var) if b is not None]
        if not running:
            return
        flat = torch.cat([b.flatten() for b in running])
        distributed.all_reduce(flat)
        flat /= self.world_size
        for buffer, mean in zip(running, flat.split([b.numel() for b in running]), strict=True):
            buffer.copy_(mean.view_as(buffer))


def find_device(name: str) -> torch.device:
    """Return the device with this name: "cpu", "cuda", or "auto" (a GPU if there is one, else the CPU).

    Raises:
        ValueError: if the name is unknown, or if it is "cuda" and there is no GPU.

    >>> find_device("gpu")
    Traceback (most recent call last):
        ...
    ValueError: device='gpu' is unknown: choose cpu, cuda or auto
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device={name!r} is unknown: choose cpu, cuda or auto")
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ValueError(f"device={name!r}, but torch finds no CUDA device: use --device cpu")
    return torch.device("cuda") if name == "cuda" or (name == "auto" and found) else CPU


@contextmanager
def ranks(device: str = "auto") -> Iterator[Ranks]:
    """Join the processes that ``torchrun`` started, or run as a single process.

    Args:
        device: "cpu", "cuda", or "auto" (a GPU if there is one, else the CPU). On GPUs, each rank uses its own GPU.

    Raises:
        ValueError: if the device is unknown, if it is "cuda" and there is no GPU, or if this machine has no GPU for
            this process's local rank.

    >>> with ranks("cpu") as alone: print(alone.rank, alone.world_size)
    0 1
    """
    cuda = find_device(device).type == "cuda"
    world_size, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    if cuda and local >= torch.cuda.device_count():
        raise ValueError(
            f"local rank {local} needs its own GPU, but this machine has only {torch.cuda.device_count()} GPU(s):"
            " start fewer processes"
        )
    place = torch.device("cuda", local) if cuda else CPU
    if cuda:
        torch.cuda.set_device(place)
    if world_size == 1:
        yield Ranks(device=place)
        return
    store, rank, _ = next(rendezvous("env://", timeout=TIMEOUT))
    # Prefix the store's keys with the number of restarts by torchrun. Otherwise, restarted workers would read the
    # addresses of dead workers, which are still in the store.
    store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    backend = "nccl" if cuda else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        control = distributed.new_group(backend="gloo") if cuda else None
        yield Ranks(rank, world_size, place, control)
    finally:
        distributed.destroy_process_group()
