"""The final network of a run: population statistics, then folding (Algorithm 2, lines 7 to 11)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from math import inf
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..data import Augment, ImageBatches, seed_at
from ..inference import fold
from ..network_copy import private_copy, relative, run_copy
from ..population import estimate_
from .metrics import Statistics

SAME_CODE = 0.01
"""The largest relative difference of scores that different CPUs and torch versions may cause."""


def population_network(
    net: nn.Module, batches: ImageBatches, augment: Augment, *, epoch: int, seed: int, count: int, bf16: bool = False
) -> nn.Module:
    """Return a copy of the network, in evaluation mode, with population statistics instead of running averages.

    If the network has no running averages, or only frozen ones, nothing is estimated. Every rank must call this
    function, because the statistics are computed from the batches of all ranks.

    Args:
        net: the trained network.
        batches: training data; the first ``count`` batches of ``epoch`` are used, augmented as in training.
        augment: the training augmentation, on the network's device.
        epoch: an epoch that training has not used, so that its random crops are new.
        seed: seed of the augmentation.
        count: number of batches.
        bf16: run the network under autocast to bfloat16, as in training.

    Paper: Alg. 2, l. 7-10
    """
    final = copy.deepcopy(net)
    if statistics_of(final) == "population":
        device = next(final.parameters()).device
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            estimate_(final.train(), augmented_batches(batches, augment, epoch=epoch, seed=seed, count=count))
    return final.eval()


def folded_network(net: nn.Module, size: int) -> nn.Module:
    """Return the network with its batch normalization folded into its weights, on the same device.

    The network is folded and checked on the CPU, because a GPU's reduced precision could hide a mistake. A network
    without running averages is returned unchanged.

    Args:
        net: a network with population statistics.
        size: height and width of its input images.

    Paper: Alg. 2, l. 11
    """
    if statistics_of(net) == "none":
        return net
    device = next(net.parameters()).device
    folded = fold(copy.deepcopy(net).cpu(), example_images(size)).to(device)
    return folded.to(memory_format=torch.channels_last) if device.type == "cuda" else folded  # type: ignore[call-overload]


def statistics_of(net: nn.Module) -> Statistics:
    """Return which statistics the final network of a run normalizes by; "none" if no layer has running averages."""
    kept = [m for m in net.modules() if isinstance(m, TorchBatchNorm) and m.running_mean is not None]
    if not kept:
        return "none"
    return "frozen" if all(getattr(m, "frozen_statistics", False) for m in kept) else "population"


def scores_of(net: nn.Module, size: int) -> Tensor:
    """Return the network's scores, in evaluation mode on the CPU, for :func:`example_images`."""
    twin = private_copy(net).cpu().eval()
    scores: Tensor = run_copy(twin, twin, example_images(size), None)
    return scores


def check_scores(net: nn.Module, size: int, saved: object, factory: str, folder: Path) -> None:
    """Check that the code of the user's network computes the same as when the scores were saved with its weights.

    Raises:
        ValueError: if the scores differ by more than rounding explains.
    """
    if not isinstance(saved, Tensor):  # the paper's network, or a run of an earlier version
        return
    scores: object = scores_of(net, size)
    error, how = inf, "its output has another form"
    if isinstance(scores, Tensor) and scores.shape == saved.shape:
        error = relative(scores, saved)
        how = f"its scores for the same images differ by {error:.0%}"
    if error > SAME_CODE:
        raise ValueError(
            f"{factory} no longer computes what it did when the weights in {folder} were saved: with these weights,"
            f" {how}. Undo changes to the network's code (or to the version of the library that it comes from), or"
            " train a new run"
        )


def example_images(size: int) -> Tensor:
    """Return two images of random noise, for tracing and checking a network."""
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0), device="cpu")


def augmented_batches(
    batches: ImageBatches, augment: Augment, *, epoch: int, seed: int, count: int
) -> Iterator[Tensor]:
    """Yield the first ``count`` training batches of an epoch, augmented as in training."""
    for k, (images, _, positions) in enumerate(islice(batches.numbered_epoch(epoch), count)):
        generator = torch.Generator().manual_seed(seed_at(seed, 3, k))
        draws = augment.draw(batches.order.step_size(k), generator)[positions]
        yield augment(images, draws.to(images.device))
