"""Population statistics for a new domain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from . import network_call
from .change_report import attach
from .collectives import gather_objects
from .errors import at_least
from .network_copy import isolated, private_copy
from .population import estimate_


def adapt(
    net: nn.Module, batches: Iterable[Any], *, prior: float = 0.0, forward: network_call.Forward | None = None
) -> nn.Module:
    """Return a copy of the network with the same weights and the population statistics of a new domain.

    New data may differ from the training data, for example if another camera took the images. Often, the same weights
    work on the new data if batch normalization uses the new data's statistics. No labels are needed. With few batches,
    the new statistics are noisy; ``prior`` then keeps a part of the old ones:

        E[x] <- (K E_new[x] + prior E_old[x]) / (K + prior), and the same for Var[x],

    where K is the number of batches, summed over all ranks.

    Args:
        net: a trained network, with the statistics of its training data.
        batches: mini-batches of the new domain, for :func:`estimate_`.
        prior: the weight of the old statistics, as a number of batches; with 0, they are not used.
        forward: a function that takes the network and a batch, and calls the network; see :func:`estimate_`.

    Returns:
        The copy, with a ``report`` that compares the old statistics with those of the new domain, layer by layer.

    Raises:
        ValueError: if ``prior`` is negative or not finite, if it is above 0 and old statistics are not finite, if the
            network cannot be copied, if the copy still uses a part of the original, or for the same reasons as in
            :func:`estimate_`.
        TypeError: if ``net`` is not a network, or is a compiled or data-parallel wrapper. Also if the network cannot
            be called on the batches; in this case, pass ``forward=`` to say how to call it.

    >>> import torch
    >>> net = nn.Sequential(nn.BatchNorm1d(1))
    >>> adapt(net, [torch.tensor([[4.0], [8.0]])], prior=1.0)[0].running_mean  # halfway from 0 to 6
    tensor([3.])

    Paper: Sec. 5, domain adaptation
    """
    at_least(0, prior=prior)
    new = private_copy(net)
    old = {
        name: (m.running_mean.clone(), m.running_var.clone())
        for name, m in new.named_modules()
        if isinstance(m, TorchBatchNorm) and m.running_mean is not None and m.running_var is not None
    }
    passes = 0

    def call(new: nn.Module, batch: Any) -> Any:
        nonlocal passes
        passes += 1
        with isolated(net, new, seed=passes):
            return network_call.call(new, batch, forward)

    report = estimate_(new, batches, forward=call)
    passes = sum(gather_objects(passes))
    for layer in report.layers if prior else ():
        found = new.get_submodule(layer.path)
        for key, before in zip(("running_mean", "running_var"), old[layer.path], strict=True):
            if not before.isfinite().all():
                raise ValueError(f"the old {key} of layer '{layer.path}' is not finite: use prior=0")
            getattr(found, key).lerp_(before, prior / (passes + prior))
    return attach(new, report)
