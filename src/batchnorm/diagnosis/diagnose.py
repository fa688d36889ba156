"""Run all rules on a network."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .. import network_call
from .evidence import collect
from .findings import Diagnosis, Finding
from .rules import RULES, functional_calls, unchecked


def diagnose(
    net: nn.Module,
    batches: Iterable[Any],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    forward: network_call.Forward | None = None,
) -> Diagnosis:
    """Find out what is wrong with a network's batch normalization, and how to fix it.

    Copies of the network run on the batches; the network itself is not changed. Each finding names a layer (or the
    whole network), the reason and a fix. Some rules need limits that are a matter of judgment, such as the size below
    which a batch is too small; :mod:`batchnorm.diagnosis.rules` lists these limits.

    In a distributed run, each rank can diagnose the network on its own batches. If the network has synchronized
    layers, all ranks must call ``diagnose``, with the same number of batches.

    Args:
        net: any network with batch normalization layers of this library or of ``torch.nn``.
        batches: about ten to fifty training mini-batches, with the size and augmentation of training. A batch is a
            tensor, a tuple or list whose first item is the input, or a dict of keyword arguments.
        optimizer: the optimizer used for training, to check which parameters it updates and with which weight decay.
        forward: a function that takes the network and a batch, and calls the network; needed for batches of any other
            type.

    Raises:
        ValueError: if the network has no batch normalization, if ``batches`` is empty or a single batch (a tensor or a
            dict), if the network cannot be copied, or if a copy still uses a part of the original. Also if the network
            has synchronized layers and ranks have different numbers of batches.
        TypeError: if the network cannot be called on the batches; pass ``forward=`` to say how to call it. Also if
            ``net`` is not a network, is scripted, or is a compiled or data-parallel wrapper.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> found = diagnose(net, [torch.ones(64, 4) * 10 + torch.randn(64, 4) for _ in range(10)])
    >>> [finding.rule for finding in found]
    ['never_updated', 'bias_without_effect']
    >>> print(found.findings[1])
    0: '1' subtracts the mean, and with it the bias of this layer

    Beyond the paper: common mistakes in networks with batch normalization.
    """
    network_call.check_batches(batches)
    if optimizer is not None and not hasattr(optimizer, "param_groups"):
        raise TypeError(f"optimizer must be an optimizer of torch.optim, not {type(optimizer).__name__}")
    evidence = collect(net, batches, optimizer, forward)
    if not evidence.layers and not functional_calls(evidence.graph):
        raise ValueError("the network has no batch normalization: add it with bn.insert(net, example)")
    findings = tuple(Finding(rule.__name__, *problem) for rule in RULES for problem in rule(evidence))
    return Diagnosis(findings, len(evidence.layers), evidence.batches, tuple(unchecked(evidence)))
