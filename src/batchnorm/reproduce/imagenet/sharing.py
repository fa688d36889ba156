"""Share one GPU between processes, after checking that convolutions are correct at the share each process gets."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ...processes import workers
from ...train import Recipe

# The command that controls NVIDIA's Multi-Process Service (MPS). Without MPS, processes take turns on the GPU, and
# training several networks at the same time saves little time.
CONTROL = "nvidia-cuda-mps-control"
SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
# The shares, in percent of the multiprocessors, at which cuDNN's bfloat16 convolutions were correct in tests. At 33
# percent of an H200 (42 multiprocessors), these convolutions returned NaN.
SHARES = (25, 50, 100)
# The largest relative error that a bfloat16 convolution may have. Rounding alone gives less than 0.01.
TOLERANCE = 0.05
CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


def share_of(processes: int) -> int:
    """Return the percentage of the multiprocessors that each process gets, one of SHARES.

    Each of n processes gets at least 2/n of the multiprocessors, because a process does not keep its multiprocessors
    busy all the time.

    >>> [share_of(processes) for processes in (2, 4, 6, 8, 12)]
    [100, 50, 50, 25, 25]
    """
    return next(share for share in SHARES if share >= min(100, 200 // processes) or share == SHARES[-1])


@contextmanager
def shared_gpu(processes: int) -> Iterator[bool]:
    """Set the child processes' environment so that they share a GPU; yield whether NVIDIA's MPS is used.

    If there are fewer than two processes, nothing is set. If CUDA_MPS_PIPE_DIRECTORY is set, MPS is assumed to run
    already, and is not started or stopped.

    Raises:
        ValueError: if the environment already sets a share that is not one of SHARES.
    """
    if processes < 2:
        yield False
        return
    before = dict(os.environ)
    # Limit each process to a share of the multiprocessors. Otherwise, the large kernels of one process would delay the
    # small kernels of other processes.
    share = os.environ.setdefault(SHARE, str(share_of(processes)))
    if share not in map(str, SHARES):
        raise ValueError(
            f"{SHARE}={share}: torch's convolutions may be wrong with this percentage; set it to"
            f" {', '.join(map(str, SHARES[:-1]))} or {SHARES[-1]}, or unset it"
        )
    # Turn off kernels whose thread blocks wait for each other: they could deadlock if other processes occupy the GPU.
    os.environ.setdefault("BATCHNORM_LAUNCHES_AT_ONCE", "0")
    folder = None
    try:
        if shutil.which(CONTROL) is not None and FOLDERS[0] not in os.environ:
            folder = Path(tempfile.mkdtemp(prefix="mps-"))
            for name in FOLDERS:
                os.environ[name] = str(folder / name.lower())
                Path(os.environ[name]).mkdir()
            started = subprocess.run([CONTROL, "-d"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
            if not started:
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


@contextmanager
def checked_gpu(
    processes: int, recipes: Iterable[Recipe], evaluate_batch: int, precision: Literal["auto", "bf16", "fp32"]
) -> Iterator[None]:
    """Share a GPU as :func:`shared_gpu` does, and check its bfloat16 convolutions with :func:`check_share`.

    Nothing is checked if there are fewer than two processes, or if ``precision`` is "fp32".

    Raises:
        ValueError: if :func:`shared_gpu` or :func:`check_share` raises it.
    """
    with shared_gpu(processes) as shared:
        if processes > 1 and not shared:
            print(f"{CONTROL} could not be started: the runs take turns on the GPU, so --jobs saves little time")
        if processes > 1 and precision != "fp32":
            check_share(recipes, evaluate_batch, "cuda")
        yield


def check_share(recipes: Iterable[Recipe], evaluate_batch: int, device: str) -> None:
    """Check the convolutions of the recipes' networks in a process with the GPU share that the environment sets.

    Raises:
        ValueError: if a convolution is wrong; the message names the first one.
    """
    # Recipes that agree in these fields have the same convolutions.
    networks = {
        (r.factory, r.normalize, r.batch_norm, r.stem, r.projection, r.width, r.size, r.batch_size): r for r in recipes
    }
    with workers(1) as run:
        for outcome in run(wrong_convolution, [(r, evaluate_batch, device) for r in networks.values()], math.inf):
            if (wrong := outcome.value()) is not None:
                raise ValueError(
                    f"{outcome.job[0].name}: with {SHARE}={os.environ.get(SHARE)}, {wrong}: change --jobs, or train"
                    " one run at a time with --jobs 1"
                )


def wrong_convolution(recipe: Recipe, evaluate_batch: int, device: str) -> str | None:
    """Return a description of the first convolution that is wrong in bfloat16, or None if all are correct.

    The convolutions of training and of validation are checked.
    """
    net = recipe.network(10).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    for batch, training in ((recipe.batch_size, True), (evaluate_batch, False)):
        images = torch.randn(batch, 3, recipe.size, recipe.size, device=device).to(memory_format=torch.channels_last)
        found = compare_convolutions(net.train(training), images)
        if found is not None:
            return found
    return None


def compare_convolutions(net: nn.Module, images: Tensor) -> str | None:
    """Run a network under autocast to bfloat16, and compare each convolution with the same convolution in float32.

    In training mode, the convolutions of the backward pass are compared too.

    Returns:
        A description of the first convolution whose error is larger than TOLERANCE, or None if there is none.
    """
    watch = _Compare()
    with torch.set_grad_enabled(net.training), watch:
        with torch.autocast(images.device.type, torch.bfloat16):
            scores = net(images)
        if net.training:
            scores.float().square().mean().backward()
    net.zero_grad()
    return watch.wrong


class _Compare(TorchDispatchMode):
    """Repeat bfloat16 convolutions in float32, compare the results, and describe the first wrong convolution."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.wrong: str | None = None

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in CONVOLUTIONS and args[0].dtype == torch.bfloat16 and self.wrong is None:
            exact = func(*(a.float() if isinstance(a, Tensor) else a for a in args), **(kwargs or {}))
            pairs = zip(_tensors(found), _tensors(exact), strict=True)
            errors = [((a.float() - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in pairs]
            if not all(error <= TOLERANCE for error in errors):
                worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
                shapes = " and ".join(str(tuple(a.shape)) for a in args[:3] if isinstance(a, Tensor))
                self.wrong = (
                    f"the bfloat16 convolution of tensors with shapes {shapes} has a relative error of {worst:.2g},"
                    f" more than the {TOLERANCE:g} allowed for rounding"
                )
        return found


def _tensors(found: Tensor | Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in ([found] if isinstance(found, Tensor) else found) if t is not None]
