"""SGD with momentum in one kernel, which can read bfloat16 gradients and write bfloat16 copies of float32 weights.

Torch's fused SGD needs gradients of the weights' dtype. For weights with bfloat16 gradients and copies, a step with
torch's SGD therefore takes three passes: cast the gradients, update the weights, and cast the weights. Together, the
three passes move 32 bytes per weight. This kernel takes one pass, which moves 20 bytes per weight.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 2048  # maximum number of elements that one program of the Triton kernel updates


class Trained(NamedTuple):
    """A weight, its gradient, and its bfloat16 copy (None if the network uses the weight itself)."""

    weight: Tensor
    gradient: Tensor
    copy: Tensor | None

    def fits(self) -> bool:
        """Return whether the kernel supports the layouts and dtypes of these tensors."""
        kind = torch.float32 if self.copy is None else torch.bfloat16
        others = [self.gradient] if self.copy is None else [self.gradient, self.copy]
        same = all(t.dtype == kind and same_layout(t, self.weight) for t in others)
        return same and self.weight.dtype == torch.float32 and _is_dense(self.weight)


class FusedUpdate:
    """Take steps of SGD with momentum: v <- momentum v + g + decay w, then w <- w - rate v.

    Here w is a weight, g its gradient and v its momentum buffer. The momentum buffers are stored in the optimizer's
    state, as ``torch.optim.SGD`` stores them. After capturing a step as a CUDA graph, synchronize before you replay the
    graph, because another stream copies a table that the graph reads. Keep this object until the last replay, because
    it owns the table.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None
        self._spare: tuple[Tensor, Tensor] | None = None
        self._captured: list[tuple[Tensor, Tensor]] = []  # keeps alive the tensors that replayed graphs read

    def can_update(self, trained: Sequence[Tensor]) -> bool:
        """Return whether this kernel can replace the optimizer's step for these weights.

        The method does not check whether Triton kernels can run on the device.
        """
        if type(self.optimizer) is not torch.optim.SGD:
            return False
        groups = self.optimizer.param_groups
        momentum = groups[0]["momentum"]
        unusual = any(group["nesterov"] or group["maximize"] or group["dampening"] for group in groups)
        rates = [group["lr"] for group in groups if isinstance(group["lr"], Tensor)]
        readable = len(rates) == len(groups) and all(rate.dtype == torch.float32 for rate in rates)
        together = len({t.device for t in (*trained, *rates)}) == 1
        same = all(group["momentum"] == momentum for group in groups)
        known = {id(p) for group in groups for p in group["params"]}
        usual = same and not unusual and momentum != 0
        return usual and readable and together and known >= set(map(id, trained))

    @torch.no_grad()
    def __call__(self, trained: list[Trained]) -> None:
        """Update the weights, their momentum buffers and their copies."""
        from .triton.update import update

        if not trained:
            return
        groups = self.optimizer.param_groups
        group_of = {id(p): group for group in groups for p in group["params"]}
        rows, chunks = list[tuple[int, ...]](), list[tuple[int, int]]()
        for w, g, copy in trained:
            state, group = self.optimizer.state[w], group_of[id(w)]
            velocity = state.get("momentum_buffer")
            if velocity is None:
                velocity = state["momentum_buffer"] = torch.zeros_like(w)
            elif velocity.dtype != w.dtype or not same_layout(velocity, w):  # possible after load_state_dict()
                if velocity.is_cuda:
                    velocity.record_stream(torch.cuda.current_stream(velocity.device))
                velocity = state["momentum_buffer"] = torch.empty_like(w).copy_(velocity)
            tensors = (w, velocity, g, copy, group["lr"])
            (decay,) = struct.unpack("i", struct.pack("f", group["weight_decay"]))
            chunks += [(len(rows), start) for start in range(0, w.numel(), CHUNK)]
            rows.append((*(0 if t is None else t.data_ptr() for t in tensors), w.numel(), decay))
        aligned = all(count % 8 == 0 and all(n % 16 == 0 for n in addresses) for *addresses, count, _ in rows)
        table = self._on_device(torch.tensor([*chain(*rows), *chain(*chunks)]), trained[0].weight.device)
        with torch.cuda.device_of(table):
            update[(len(chunks),)](table, table[7 * len(rows) :], groups[0]["momentum"], CHUNK, aligned)
        # Autograd does not see the kernel's writes. Increment the version counters, so that autograd rejects graphs
        # that saved these tensors before the update.
        torch.autograd.graph.increment_version([t for w, _, copy in trained for t in (w, copy) if t is not None])

    def _on_device(self, table: Tensor, device: torch.device) -> Tensor:
        if device.type == "cpu" or not torch.cuda.is_current_stream_capturing():
            # Allocate the memory for a later capture now, because pinned memory cannot be allocated during a capture.
            self._spare = (
                torch.empty_like(table, pin_memory=device.type == "cuda"),
                torch.empty_like(table, device=device),
            )
            return table.to(device)
        if self._spare is None or self._spare[0].shape != table.shape:
            raise RuntimeError(
                "cannot capture this step in a CUDA graph: first run one uncaptured step with the same parameters"
            )
        pinned, moved = self._spare
        self._captured.append(self._spare)
        self._spare = None
        # Work on this stream is not captured, so the table is copied now, and not in each replay of the graph.
        with torch.cuda.stream(self._stream):
            return moved.copy_(pinned.copy_(table), non_blocking=True)


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of the same shape have the same strides, except in dimensions of size 1.

    The stride of a dimension of size 1 does not matter. For example, the kernel of a 1x1 convolution is both contiguous
    and channels last.
    """
    return all(n == 1 or i == j for n, i, j in zip(a.shape, a.stride(), b.stride(), strict=True))


def _is_dense(t: Tensor) -> bool:
    return 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)) == t.numel()
