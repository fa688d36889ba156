"""Verify a converted network against the original: outputs (also under autocast), running statistics, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import network_call
from ..graph.kinds import despite_global_hooks
from ..graph.rewrite import unused
from ..network_call import Forward
from ..network_copy import isolated, outputs, private_copy, relative_error
from ..verify import AMPLIFICATION, EXACT, TINY, verify

Gradients = dict[str, Tensor]

ROWS = 3
"""Gradients are compared on this number of rows of the example.

Two may be too few: with two values per channel, as in 1x1 maps of two images, the normalized values are always close to
1 and -1, and almost no gradient flows back through them.
"""


def compare_outputs(old: nn.Module, new: nn.Module, example: Any, forward: Forward | None, modes: int) -> float:
    """Compare outputs in evaluation mode and, if ``modes`` is 2, in training mode; return the larger relative error."""
    return max(
        verify(old, new, example, forward, what="the changed network", training=training, same_weights=True)
        for training in (False, True)[:modes]
    )


def verify_conversion(
    old: nn.Module, new: nn.Module, example: Any, forward: Forward | None, modes: int, step: Callable[[str], None]
) -> float:
    """Compare outputs, gradients and outputs under autocast, in each mode, and return the outputs' relative error.

    Before each of the ``1 + 2 * modes`` comparisons, ``step`` is called with a description of the comparison.

    Raises:
        ValueError: if the networks differ by more than rounding explains.
    """
    with despite_global_hooks():
        step("comparing outputs")
        error = compare_outputs(old, new, example, forward, modes)
        for training in (False, True)[:modes]:
            where = "in training mode" if training else "in evaluation mode"
            step(f"comparing gradients {where}")
            _compare_gradients(old, new, example, forward, training)
            step(f"comparing outputs under autocast {where}")
            _compare_autocast(old, new, example, forward, training)
    return error


def _compare_gradients(old: nn.Module, new: nn.Module, example: Any, forward: Forward | None, training: bool) -> None:
    """Compare the gradients of all parameters in float64; the loss is a randomly weighted sum of the outputs.

    To save time, only the first ROWS rows of the example are used. The whole example is used if the original network
    fails on these rows, or if some rewritten module never runs its new code on them.
    """
    few = _first_rows(example)
    if unused(new, few, forward, training):
        few = example
    for batch in (few, example):
        try:
            was, example = _gradients(old, batch, forward, training), batch
            break
        except Exception:
            continue
    else:
        return  # the original may not support float64, or may have no gradients
    now = _gradients(new, example, forward, training)
    if was.keys() != now.keys():
        name = min(was.keys() ^ now.keys())
        raise ValueError(f"'{name}' {'no longer gets' if name in was else 'now gets'} a gradient")
    name, error = _worst(now, was)
    if error <= EXACT:
        return
    # A network may amplify rounding errors. To measure by how much, change the original's weights by a relative amount
    # of about TINY, which is more than the rounding errors of float64.
    noise = _worst(_gradients(old, example, forward, training, change=TINY), was)[1]
    if error > AMPLIFICATION * noise:
        raise ValueError(f"the gradient of '{name}' differs from the original's by {error:.2e} (relative)")


def _first_rows(example: Any) -> Any:
    """Return the example with only the first ROWS rows of each tensor that is as long as the example's first tensor."""
    rows = next((len(t) for t in network_call.tensors_in(example) if t.dim()), 0)
    return network_call.map_tensors(example, lambda t: t[:ROWS] if t.dim() and len(t) == rows else t)


def _gradients(net: nn.Module, example: Any, forward: Forward | None, training: bool, change: float = 0.0) -> Gradients:
    twin = private_copy(net).double().train(training)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for p in twin.parameters() if change else ():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype, device="cpu")
            p.mul_(1 + change * noise.to(p.device))
    batch = network_call.copy_for(net, example, torch.float64)
    with isolated(net, twin), torch.enable_grad():
        found = [t for t in network_call.tensors_in(network_call.call(twin, batch, forward)) if t.requires_grad]
        torch.manual_seed(0)
        # Do not use randn_like: its numbers depend on the strides, which may differ between the two networks.
        weighted = [(t * torch.randn(t.shape, dtype=t.dtype, device=t.device)).sum() for t in found]
        torch.stack(weighted).sum().backward()
    return {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}


def _worst(new: Gradients, old: Gradients) -> tuple[str, float]:
    """Return the name of the parameter whose gradient has the largest relative error, and that error.

    Each error is relative to the larger of two values: the gradient's largest value, and EXACT times the largest value
    of all gradients.
    """
    largest = max((float(g.abs().max()) for g in old.values() if g.numel()), default=0.0)
    errors = {"": 0.0}
    for name, gradient in old.items():
        if gradient.numel() and not gradient.equal(new[name]):
            scale = max(float(gradient.abs().max()), EXACT * largest)
            errors[name] = float((new[name] - gradient).abs().max()) / scale if scale > 0 else float("inf")
    name = max(errors, key=lambda name: errors[name])
    return name, errors[name]


def _compare_autocast(old: nn.Module, new: nn.Module, example: Any, forward: Forward | None, training: bool) -> None:
    """Compare dtypes, shapes and values of the outputs under bf16 autocast; allow for autocast's rounding errors."""
    try:
        was = _autocast(old, example, forward, training)
    except Exception:
        return  # the original does not run under autocast
    now = _autocast(new, example, forward, training)
    kinds = [[(t.dtype, tuple(t.shape)) for t in network_call.tensors_in(out)] for out in (now, was)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"under autocast, the converted network's outputs are {kinds[0]}, but the original's are {kinds[1]}"
        )
    if not kinds[0] or relative_error(now, was) <= 0.01:
        return
    exact, other = (_autocast(net, example, forward, training, enabled=False) for net in (old, new))
    moved, moves, rounding = (relative_error(out, exact) for out in (was, now, other))
    if not moves <= 4 * max(moved, rounding) + 0.02:
        raise ValueError(
            "autocast changes the converted network's outputs too much: their relative error under autocast is"
            f" {moves:.2e}, but that of the original's outputs is {moved:.2e}. Both errors are relative to the"
            " original's outputs without autocast"
        )


def _autocast(net: nn.Module, example: Any, forward: Forward | None, training: bool, enabled: bool = True) -> Any:
    with torch.autocast(network_call.device_of(net).type, torch.bfloat16, enabled=enabled):
        return outputs(net, example, forward, training=training)
