"""One training step (augment, forward, backward, update), optionally compiled or captured as a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from inspect import signature
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Augment
from ..layers import param_groups
from ..models.bn_inception.blocks import InceptionModule, SeparableConv2d
from ..models.bn_inception.joined_branches import as_neighbors
from ..models.bn_inception.weight_gradients import WeightGradients
from ..ops import dispatch
from ..ops.cuda import driver
from ..ops.cuda.graph_memsets import replace_memsets
from .distributed import Ranks
from .fused_update import FusedUpdate, Trained, same_layout
from .loss import cross_entropy
from .recipe import Recipe

Compile = Literal["network", "nothing"]
# The number of warm-up steps before a CUDA graph is captured, in one process and with DistributedDataParallel. Warm-up
# steps allocate memory and tune kernels. Torch's notes on CUDA graphs ask for 11 steps with DistributedDataParallel.
WARMUP, WARMUP_DISTRIBUTED = 3, 11
# torch 2.13 deprecates broadcast_buffers in favor of forward_sync_buffers.
_RENAMED = "forward_sync_buffers" in signature(nn.parallel.DistributedDataParallel).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _RENAMED else "broadcast_buffers": False}


def make_optimizer(net: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.SGD:
    """Return SGD with momentum, and with weight decay on all parameters except gamma and beta.

    >>> optimizer = make_optimizer(nn.Conv2d(1, 1, 1), Recipe(), torch.device("cpu"))
    >>> [group["weight_decay"] for group in optimizer.param_groups]
    [0.0002, 0.0]

    Paper: Sec. 4.2, "a version of Stochastic Gradient Descent with momentum"
    """
    # On a GPU, the learning rate is a tensor, so that a captured CUDA graph reads the current rate.
    cuda = device.type == "cuda"
    rate = torch.tensor(recipe.rate, device=device) if cuda else recipe.rate
    return torch.optim.SGD(param_groups(net, recipe.weight_decay), rate, recipe.momentum, fused=True if cuda else None)


def set_rate_(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate; a tensor is filled in place, because a captured CUDA graph may read that tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


class Shadows:
    """Train a network with bfloat16 copies of its convolution and linear weights.

    Trained parameters with two or four dimensions have copies, and so does the bias of a linear layer if its weight has
    one. The parameters of a ``SeparableConv2d`` have no copies, because its two kernels are combined in full precision.
    One kernel launch updates many copies. Autocast, in contrast, would launch one kernel to cast each weight, and
    another to cast its gradient.

    Args:
        net: the network.
        aside: whether to compute the weights' gradients on separate CUDA streams.
    """

    def __init__(self, net: nn.Module, aside: bool = False) -> None:
        self.net = net
        self.weight_gradients = WeightGradients() if aside else None
        separable = [m for m in net.modules() if isinstance(m, SeparableConv2d)]
        kept = {id(p) for m in separable for p in m.parameters()}
        trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
        cast = {id(p) for p in trained.values() if p.dim() in (2, 4)} - kept
        cast |= {id(m.bias) for m in net.modules() if type(m) is nn.Linear and id(m.weight) in cast}
        chosen = {name: p for name, p in trained.items() if id(p) in cast}
        self.masters: list[Tensor] = list(chosen.values())
        self.copies = {name: p.detach().to(torch.bfloat16) for name, p in chosen.items()}
        self._join(net, {id(p): name for name, p in chosen.items()})
        for copy in self.copies.values():
            copy.requires_grad_()
        self.trained = list(trained.values())
        self.used = [self.copies.get(name, p) for name, p in trained.items()]
        # A shared parameter has several names. List all of them, because `run` calls functional_call() with
        # tie_weights=False. With tie_weights=True, functional_call() would find the names itself, but after the call,
        # it would leave the copies in modules that have several names.
        copy_of = {id(p): self.copies[name] for name, p in chosen.items()}
        self._replaced = {
            f"{path}.{name}".lstrip("."): copy_of[id(p)]
            for path, module in net.named_modules()
            for name, p in module._parameters.items()
            if id(p) in copy_of
        }
        self._updates: list[FusedUpdate] = []

    def _join(self, net: nn.Module, names: dict[int, str]) -> None:
        """If a module concatenates convolution kernels, make their copies adjacent in memory.

        Concatenating the copies then moves no data.
        """
        for module in net.modules():
            kernels = module.joined_kernels() if isinstance(module, InceptionModule) else []
            joined = [names.get(id(kernel), "") for kernel in kernels]
            if joined and all(joined):
                self.copies.update(zip(joined, as_neighbors(kernels, torch.bfloat16), strict=True))

    def run(self, x: Tensor) -> Tensor:
        """Call the network with the bfloat16 copies."""
        with self.weight_gradients or nullcontext():
            y: Tensor = torch.func.functional_call(self.net, self._replaced, x, tie_weights=False)
        return y

    def step(self, y: Tensor, dy: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Compute the gradients, and update the parameters and their copies.

        ``y`` is the network's output, and ``dy`` is the gradient of the loss with respect to ``y``.
        """
        aside = self.weight_gradients
        rows, kept = list[Trained](), list[Tensor]()
        # Do not use y.backward(dy): it would copy gradients that are views, such as those of concatenated weights.
        whole = range(len(self.used))
        parts = [(whole, torch.autograd.grad(y, self.used, dy))] if aside is None else aside.backward(y, dy, self.used)
        for k, (places, grads) in enumerate(parts):
            kept += grads  # keep the gradients in memory until the update has read them
            rows += self._rows(places, grads)
            if len(self._updates) <= k:
                self._updates.append(FusedUpdate(optimizer))
            if self._can_fuse(self._updates[k]) and all(row.fits() for row in rows):
                with nullcontext() if aside is None else aside.updating():
                    self._updates[k](rows)
                rows = []
        if aside is not None:
            aside.wait()
        if rows:
            self._update(rows, optimizer)

    def _can_fuse(self, update: FusedUpdate) -> bool:
        return dispatch.has_kernels(self.trained[0]) and update.can_update(self.trained)

    def _update(self, rows: list[Trained], optimizer: torch.optim.Optimizer) -> None:
        to, of = [], []
        for parameter, grad, _ in rows:
            # _foreach_copy_() copies many tensors in one launch only if each tensor has the strides of its target.
            grad = grad.as_strided(parameter.shape, parameter.stride()) if same_layout(grad, parameter) else grad
            if grad.dtype == parameter.dtype and grad.stride() == parameter.stride():
                parameter.grad = grad
            else:
                parameter.grad = torch.empty_like(parameter)
                to.append(parameter.grad)
                of.append(grad)
        if to:  # _foreach_copy_() rejects empty lists
            torch._foreach_copy_(to, of)
        optimizer.step()
        self.refresh()

    def _rows(self, places: Iterable[int], grads: Iterable[Tensor]) -> list[Trained]:
        found = []
        for k, grad in zip(places, grads, strict=True):
            weight, used = self.trained[k], self.used[k]
            found.append(Trained(weight, grad, None if used is weight else used))
        return found

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the current parameters to their bfloat16 copies."""
        if self.copies:
            torch._foreach_copy_(list(self.copies.values()), self.masters)


class TrainStep:
    """Train a network on one batch per call, and add the batch's total loss, correct predictions and size to ``sums``.

    The gradient is that of the mean loss over the examples of all ranks, even if ranks have different numbers of
    examples.

    Args:
        net: a network on the rank's device, which returns class scores.
        optimizer: the optimizer of the network's parameters.
        augment: the augmentation, on the same device.
        ranks: the processes that train together.
        bf16: run the network under autocast to bfloat16.
        compile: what torch.compile compiles: the whole "network", or "nothing".
        cast_once: keep bfloat16 copies of convolution and linear weights, and update many copies at once in each
            step, instead of casting each weight when it is used. This takes fewer kernel launches; the results are the
            same up to rounding. The option has no effect without ``bf16`` or with several processes.
        graph: capture the whole step as a CUDA graph. If the network is not compiled, the graph also runs the
            branches of Inception modules in parallel and, with ``cast_once``, computes weight gradients on separate
            streams.
        batch: the number of examples in this rank's part of a full batch. A batch of another size, such as an epoch's
            last batch, runs without the graph and, in a single process, without compilation. None means that all
            batches have the same size.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        augment: Augment,
        ranks: Ranks,
        *,
        bf16: bool = False,
        compile: Compile = "nothing",
        cast_once: bool = False,
        graph: bool = False,
        batch: int | None = None,
    ) -> None:
        self.net, self.optimizer, self.augment, self.ranks, self.bf16 = net, optimizer, augment, ranks, bf16
        aside = graph and compile == "nothing"
        self.shadows = Shadows(net, aside) if cast_once and bf16 and ranks.world_size == 1 else None
        self.plain: Any = net if self.shadows is None else self.shadows.run
        self.model, self.batch = self.plain, batch
        if compile == "network":
            self.model = torch.compile(self.plain, dynamic=False)
        elif graph:
            for module in net.modules():
                if isinstance(module, InceptionModule):
                    module.side_by_side = True
        self._graph = _Graph(self._compute, WARMUP if ranks.world_size == 1 else WARMUP_DISTRIBUTED) if graph else None
        if ranks.world_size > 1:
            with nullcontext() if self._graph is None else torch.cuda.stream(self._graph.stream):
                # Do not copy rank 0's running averages in each step: _compute averages them over the ranks.
                self.model = nn.parallel.DistributedDataParallel(self.model, **_KEEP_BUFFERS)
        self.sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)
        self._rate = -1.0

    def __call__(self, images: Tensor, labels: Tensor, draws: Tensor, rate: float) -> None:
        """Take one step at the given learning rate; on a GPU, the call may return before the step is done."""
        if rate != self._rate:
            set_rate_(self.optimizer, rate)
            self._rate = rate
        draws = draws.to(images.device, non_blocking=True)
        if self.batch is not None and len(labels) != self.batch:
            # With several ranks, do not bypass DistributedDataParallel, which averages the gradients.
            self._compute(images, labels, draws, self.plain if self.ranks.world_size == 1 else self.model)
        else:
            (self._graph or self._compute)(images, labels, draws)

    def _compute(self, images: Tensor, labels: Tensor, draws: Tensor, model: Any = None) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        x = self.augment(images, draws)
        if x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.bf16):
            scores = (model or self.model)(x)
        if self.shadows is None:
            loss = F.cross_entropy(scores.to(torch.promote_types(scores.dtype, torch.float32)), labels)
            self._count(loss.detach(), scores.detach(), labels)
            (loss * self._share(labels)).backward()
            self.optimizer.step()
        else:
            losses, dscores = cross_entropy(scores.detach(), labels)
            aside = self.shadows.weight_gradients
            with nullcontext() if aside is None else aside.beside():
                self._count(losses.mean(), scores.detach(), labels)
            self.shadows.step(scores, dscores, self.optimizer)
        self.ranks.average_statistics_(self.net)

    def _count(self, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        right = (scores.argmax(1) == labels).sum()
        self.sums += torch.stack([loss.double() * len(labels), right, torch.full_like(right, len(labels))])

    def _share(self, labels: Tensor) -> Tensor | float:
        """Return the factor for this rank's mean loss that accounts for its number of examples.

        With these factors, the mean over ranks is the mean loss over all examples.
        """
        if self.ranks.world_size == 1:
            return 1.0
        # Use float64, so that a factor such as 2/3 is not rounded to float32.
        total = self.ranks.sum_(torch.full((), len(labels), dtype=torch.float64, device=labels.device))
        return len(labels) * self.ranks.world_size / total


class _Graph:
    """Run a function directly in the first ``warmup`` calls, and as a CUDA graph in later calls.

    The inputs must have the same shapes in all calls.
    """

    def __init__(self, function: Any, warmup: int) -> None:
        self.function, self.left = function, warmup
        self.inputs: tuple[Tensor, ...] | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        # Weight gradients are computed on streams of lower priority, because they are needed last.
        self.stream = torch.cuda.Stream(priority=-1)

    def __call__(self, *inputs: Tensor) -> None:
        if self.inputs is None:
            self.inputs = tuple(torch.empty_like(v) for v in inputs)
        if self.left > 0:
            self.left -= 1
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.function(*inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return
        for static, v in zip(self.inputs, inputs, strict=True):
            static.copy_(v)
        if self.graph is None:
            self.graph = self._capture(self.inputs)
        self.graph.replay()

    def _capture(self, inputs: tuple[Tensor, ...]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # In the default error mode, the capture fails if another thread, such as NCCL's watchdog, makes certain CUDA
        # calls at the same time.
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.function(*inputs)
        with torch.cuda.device(self.stream.device):
            if dispatch.FAST and driver.unavailable() is None:
                replace_memsets(graph.raw_cuda_graph())
            graph.instantiate()
        torch.cuda.synchronize()  # wait until FusedUpdate has copied its tables on another stream
        return graph
