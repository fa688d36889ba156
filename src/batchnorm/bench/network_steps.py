"""Time whole training steps of a stock and a converted network, alternately within one process."""

from __future__ import annotations

import copy
import gc
import math
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from .. import network_call
from ..network_factory import UserCodeError, make_network
from ..ops.cuda import extension
from ..population import estimate_
from ..surgery import convert
from .cpu import keep_freed_memory

Mode = Literal[
    "eager", "graph", "compiled", "backend", "dynamic", "reduce-overhead", "max-autotune",
    "evaluation", "nchw", "float32", "fp16", "bf16-weights", "checkpoint", "accumulate", "ddp", "fsdp2",
]  # fmt: skip
Row = dict[str, Any]
TURN = "turn"  # a generator yields this before timing, to ask for exclusive use of the machine
COMPILED_TOGETHER: tuple[Mode, ...] = ("compiled", "backend")  # modes that share one compiled stock network
REPLAYING: tuple[Mode, ...] = ("reduce-overhead", "max-autotune")  # modes in which Inductor replays CUDA graphs
COMPILING: tuple[Mode, ...] = (*COMPILED_TOGETHER, "dynamic", *REPLAYING)
# The largest allowed relative differences between the losses of the converted and the stock network. In the first step,
# the losses differ only by rounding. The larger tolerance is for later steps, because training amplifies the
# difference, and for compiled networks, because they draw different dropout masks.
FIRST_TOLERANCE, LOSS_TOLERANCE = 0.005, 0.03
CHECKED_STEPS = 3
AUXILIARY = 0.3  # the weight of GoogLeNet's and Inception's auxiliary classifiers in the loss
# The learning rate is low, so that the losses of two correct networks stay close. At a rate of 0.01, changing
# GoogLeNet's weights by 1e-6 changes the loss after one step by 1%.
RATE = 1e-3
GROUP_SECONDS = 0.1  # take steps for about this long between two synchronizations
MIN_PAIRS = 6  # a 95% interval from order statistics needs at least this many rounds
NARROW = 0.01  # stop timing once half the width of the 95% interval is at most this fraction of the median


@dataclass(frozen=True)
class Settings:
    """Settings of one run of ``bench networks``."""

    device: str
    size: int
    seconds: float
    seed: int = 0
    cudnn_benchmark: bool = False

    @property
    def on_gpu(self) -> bool:
        """Whether steps run on a GPU."""
        return self.device == "cuda"


class Measurement(NamedTuple):
    """A batch size, and the modes that are timed together at this size; they share one stock network."""

    batch: int
    modes: tuple[Mode, ...]


class NetworkJob(NamedTuple):
    """The measurements that one process makes on one network."""

    network: str
    units: tuple[Measurement, ...]


class Pair(NamedTuple):
    """A stock network and its converted copy, on the device."""

    stock: nn.Module
    converted: nn.Module
    example: Tensor
    classes: int
    convert_seconds: float  # CPU time if the device is a GPU, else elapsed time
    fused: str


def network_to_convert(name: str) -> tuple[nn.Module, Any]:
    """Build a network by name; return the network, and its example batch or None.

    Raises:
        ValueError: if there is no such network, or if it has no batch normalization.
    """
    net, example = make_network(name)
    if not any(isinstance(module, TorchBatchNorm) for module in net.modules()):
        raise ValueError(f"{name} has no batch normalization layers, so there is nothing to convert")
    return net, example


def convert_pair(name: str, settings: Settings) -> Pair:
    """Build a network, move it to the device and convert it."""
    torch.manual_seed(settings.seed)
    net, example = network_to_convert(name)
    net.train()
    if example is None:
        example = torch.randn(8, 3, settings.size, settings.size)
    (example, *_), _ = network_call.arguments(example)
    net, example = net.to(settings.device), example.to(settings.device)
    if settings.on_gpu and example.dim() == 4:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        example = example.contiguous(memory_format=torch.channels_last)
    # On a GPU, measure CPU time, because this process is paused while another process is timed.
    clock = time.process_time if settings.on_gpu else time.perf_counter
    began = clock()
    converted = convert(net, example)
    seconds = clock() - began
    extension.wait()  # it is compiled in the background, and steps are slower without it
    with torch.no_grad():
        output = network_call.tensors_in(copy.deepcopy(net)(example))[0]
    return Pair(net, converted, example, output.shape[1], seconds, str(converted.report).partition("\n")[0])


def without_norms(net: nn.Module) -> nn.Module:
    """Return a copy in which ``nn.Identity`` replaces the batch normalization layers.

    With any implementation of batch normalization, a training step takes at least as long as the copy's.

    >>> without_norms(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1]
    Identity()
    """
    net = copy.deepcopy(net)
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
                setattr(parent, name, nn.Identity())
    return net


class Step:
    """Training steps on one batch: forward, loss, backward, SGD with momentum; in evaluation, only forward and loss."""

    def __init__(self, net: nn.Module, mode: Mode, images: Tensor, labels: Tensor) -> None:
        self.model, images = _as_used(net, mode, images)
        self.evaluates = mode == "evaluation"
        parts = 2 if mode == "accumulate" else 1
        self.parts = list(zip(images.chunk(parts), labels.chunk(parts), strict=True))
        device, kind = images.device.type, torch.float16 if mode == "fp16" else torch.bfloat16
        narrow = device == "cuda" and mode not in ("float32", "bf16-weights")
        self.autocast = torch.autocast(device, kind, enabled=narrow)
        self.scaler = torch.GradScaler(device, enabled=mode == "fp16")
        self.optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)

    def __call__(self) -> Tensor:
        """Take one step and return its loss."""
        if self.evaluates:
            with torch.no_grad():
                return sum(self._loss(*part) for part in self.parts)  # type: ignore[return-value]
        losses = []
        for part in self.parts:
            loss = self._loss(*part)
            loss = loss / len(self.parts) if len(self.parts) > 1 else loss
            self.scaler.scale(loss).backward()
            losses.append(loss.detach())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        # Clear the gradients here, not at the start of the next step, so that Inductor's CUDA graphs can reuse their
        # memory.
        self.optimizer.zero_grad(set_to_none=True)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _loss(self, images: Tensor, labels: Tensor) -> Tensor:
        with self.autocast:
            outputs = network_call.tensors_in(self.model(images))
            first, *others = (F.cross_entropy(t.float(), labels) for t in outputs)
        return first + AUXILIARY * sum(others) if others else first


def _as_used(net: nn.Module, mode: Mode, images: Tensor) -> tuple[Any, Tensor]:
    """Return the network and the images in the form that the mode requires."""
    match mode:
        case "compiled":
            return torch.compile(net), images
        case "backend":
            # Pass the backend as a function, because its name is registered only if the package is installed.
            return torch.compile(net, backend=import_module("batchnorm.dynamo").compile_graph), images
        case "dynamic":
            return torch.compile(net, dynamic=True), images
        case "reduce-overhead" | "max-autotune":
            return torch.compile(net, mode=mode), images
        case "evaluation":
            # Replace the initial running statistics, because activations could overflow with them.
            estimate_(net, [images])
            return net.eval(), images
        case "nchw":
            return net.to(memory_format=torch.contiguous_format), images.contiguous()  # type: ignore[call-overload]
        case "bf16-weights":
            return net.bfloat16(), images.bfloat16()
        case "checkpoint":
            from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

            for stage in net.children():
                for name, block in list(stage.named_children()) if isinstance(stage, nn.Sequential) else ():
                    setattr(stage, name, checkpoint_wrapper(block))
        case "ddp" | "fsdp2":
            from torch.distributed import HashStore, init_device_mesh  # type: ignore[attr-defined]
            from torch.distributed.fsdp import fully_shard

            if not torch.distributed.is_initialized():
                kind = "nccl" if images.is_cuda else "gloo"
                torch.distributed.init_process_group(kind, store=HashStore(), rank=0, world_size=1)
            if mode == "ddp":
                return nn.parallel.DistributedDataParallel(net), images
            # FSDP2 rejects parameters that are not contiguous.
            net = net.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
            # By default, FSDP2 would use the GPU if there is one, even for a network on the CPU.
            fully_shard(net, mesh=init_device_mesh(images.device.type, (1,)))
    return net, images


class GraphedStep:
    """A warmed-up step, captured as one CUDA graph."""

    def __init__(self, step: Step) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = step()
        self.step = step

    def __call__(self) -> Tensor:
        """Replay the step and return its loss."""
        self.graph.replay()
        return self.loss


class Prepared(NamedTuple):
    """A stock or converted network in one mode, ready to be timed."""

    step: Callable[[], Tensor]
    losses: list[float]
    first_step_seconds: float
    peak: int | None  # bytes on a GPU, not counting other networks' memory; None if it cannot be measured


def prepare(net: nn.Module, mode: Mode, images: Tensor, labels: Tensor) -> Prepared:
    """Copy a network and take its first steps; measure the first step's time and a later step's peak memory.

    The first step of a compiled network includes compilation with empty caches. Its time is measured as CPU time,
    because other processes may compile at the same time.
    """
    # Garbage that is freed only after `before` is read would make the measured peak too low.
    gc.collect()
    before = torch.cuda.memory_allocated() - images.nbytes - labels.nbytes if images.is_cuda else 0
    step: Any = Step(copy.deepcopy(net), mode, images, labels)
    compiles = mode in COMPILING
    clock = time.process_time if compiles else time.perf_counter
    side: AbstractContextManager[Any] = torch.cuda.stream(torch.cuda.Stream()) if mode == "graph" else nullcontext()
    if images.is_cuda:
        torch.cuda.synchronize()  # wait until the network is copied, because `side` may be another stream
    began = clock()
    with side:
        with _compiling() if compiles else nullcontext():
            losses = _losses(step, range(1))
        seconds = clock() - began
        losses += _losses(step, range(1, CHECKED_STEPS))
    if images.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    if mode == "graph":
        step = GraphedStep(step)  # the capture allocates as much memory as an eager step, so the peak is the same
        losses += _losses(step, range(CHECKED_STEPS, 2 * CHECKED_STEPS))
    else:
        step()
    # Replaying Inductor's CUDA graphs allocates nothing, so the peak cannot be measured in the modes that replay.
    peak = torch.cuda.max_memory_allocated() - before if images.is_cuda and mode not in REPLAYING else None
    if compiles and images.is_cuda:
        torch.cuda.empty_cache()
    return Prepared(step, losses, seconds, peak)


def _losses(step: Callable[[], Tensor], seeds: range) -> list[float]:
    """Take one step per seed and return the losses; the seed determines random numbers such as dropout masks."""
    losses = []
    for seed in seeds:
        torch.manual_seed(seed)
        losses.append(float(step()))
    return losses


def _compiling() -> AbstractContextManager[Any]:
    """Return a context manager in which torch compiles with empty caches.

    If torch supports it, the backward pass is compiled before the forward pass runs, so that no activations occupy
    memory during compilation.
    """
    import torch._functorch.config as functorch
    from torch._inductor.utils import fresh_cache

    stack = ExitStack()
    stack.enter_context(fresh_cache())
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        stack.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
    return stack


def loss_problem(stock: Sequence[float], ours: Sequence[float], compiled: bool = False) -> str | None:
    """Return a message about the first step whose losses differ by more than the tolerance, or None if all agree.

    >>> loss_problem([6.9, 6.8], [6.91, 6.75]), loss_problem([6.9, 6.8], [6.9, math.nan])
    (None, "not timed, because the loss of step 2 is nan, but the stock network's loss is 6.8")
    """
    for k, (a, b) in enumerate(zip(stock, ours, strict=True), 1):
        if not abs(a - b) <= (FIRST_TOLERANCE if k == 1 and not compiled else LOSS_TOLERANCE) * abs(a):
            return f"not timed, because the loss of step {k} is {b:.4g}, but the stock network's loss is {a:.4g}"
    return None


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its 95% interval, which comes from order statistics and is valid for any distribution.

    The k-th smallest and k-th largest of n values bound the median with probability 1 - 2 P(Binomial(n, 1/2) < k).
    For fewer than six values, the interval is the whole range, which contains the median with a probability below 95%.

    >>> median_interval([5, 1, 2, 4, 3, 6])
    (3.5, 1, 6)
    """
    ordered, n = sorted(values), len(values)
    # The interval is from ordered[k] to ordered[n - 1 - k]. Of the 2^n outcomes of n coin flips, `below` have at most k
    # heads.
    k, below = 0, 1.0
    while 2 * (below + math.comb(n, k + 1)) <= 0.05 * 2**n:
        k += 1
        below += math.comb(n, k)
    return statistics.median(ordered), ordered[k], ordered[n - 1 - k]


def time_rounds(steps: Sequence[Callable[[], Tensor]], device: str, seconds: float) -> list[list[float]]:
    """Time several kinds of steps alternately; return, for each round, the seconds per step of each kind.

    There are at least ``MIN_PAIRS`` rounds. After that, timing stops when ``seconds`` have passed, or earlier if the
    95% intervals of all speedups over the first kind are narrow.
    """

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def timed(step: Callable[[], Tensor], count: int) -> float:
        if count > 1:  # a step longer than GROUP_SECONDS needs no warm-up
            step()
        synchronize()
        began = time.perf_counter()
        for _ in range(count):
            step()
        synchronize()
        return (time.perf_counter() - began) / count

    end = time.perf_counter() + seconds
    counts = [max(1, math.ceil(GROUP_SECONDS / timed(step, 1))) for step in steps]
    rounds: list[list[float]] = []
    while True:
        took = [0.0] * len(steps)
        forward = len(rounds) % 2 == 0
        for i in range(len(steps)) if forward else reversed(range(len(steps))):
            took[i] = timed(steps[i], counts[i])
        rounds.append(took)
        if len(rounds) >= MIN_PAIRS:
            intervals = [median_interval([r[0] / r[i] for r in rounds]) for i in range(1, len(steps))]
            narrow = all(high - low <= 2 * NARROW * middle for middle, low, high in intervals)
            if narrow or time.perf_counter() > end:
                return rounds


def measure(pair: Pair, unit: Measurement, settings: Settings) -> Generator[str, None, list[Row]]:
    """Make a measurement and return its rows, one per mode; yield ``TURN`` before timing.

    Each time memory runs out, the batch size is halved. If memory runs out at a batch size below 4, the rows say that
    the measurement failed.
    """
    examples = unit.batch
    while True:
        try:
            rows = yield from _measure(pair, unit.modes, examples, settings)
            return [{"batch": unit.batch, "examples": examples, **row} for row in rows]
        except torch.OutOfMemoryError:
            if examples < 4:
                return failed(unit, f"out of memory at batch size {examples}")
        finally:
            gc.collect()
            if unit.modes[0] in COMPILING:
                torch.compiler.reset()
            if settings.on_gpu:
                torch.cuda.empty_cache()
        examples //= 2


def failed(unit: Measurement, why: str) -> list[Row]:
    """Return one row per mode, with the reason for the failure."""
    return [{"batch": unit.batch, "mode": mode, "failed": why} for mode in unit.modes]


def _measure(pair: Pair, modes: tuple[Mode, ...], examples: int, settings: Settings) -> Generator[str, None, list[Row]]:
    generator = torch.Generator().manual_seed(settings.seed)
    images = torch.randn(examples, *pair.example.shape[1:], generator=generator).to(pair.example)
    if settings.on_gpu and images.dim() == 4:
        images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(pair.classes, (examples,), generator=generator).to(images.device)
    # Libraries load code and allocate workspaces in their first call. Take a step now, so that this cost does not count
    # in either network's measurements.
    Step(copy.deepcopy(pair.stock), "eager", images[:8], labels[:8])()
    if modes[0] in COMPILING:
        torch.compile(nn.Linear(8, 8, device=images.device))(torch.zeros(8, 8, device=images.device)).sum().backward()
    stock = prepare(pair.stock, "compiled" if modes[0] == "backend" else modes[0], images, labels)
    forms: dict[Mode, Prepared] = {}
    rows: list[Row] = []
    for mode in modes:
        try:
            form = prepare(pair.stock if mode == "backend" else pair.converted, mode, images, labels)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            rows.append({"mode": mode, "failed": _first_line(error)})
            continue
        if problem := loss_problem(stock.losses, form.losses, mode in COMPILING):
            losses = {"stock_losses": stock.losses, "ours_losses": form.losses}
            rows.append({"mode": mode, "failed": problem, **losses})
        else:
            forms[mode] = form
    if forms:
        yield TURN
        steps = [stock.step, *(form.step for form in forms.values())]
        limited = modes == ("eager",) and not settings.on_gpu
        limit = _limiting_step(pair.stock, images, labels) if limited else None
        steps += [] if limit is None else [limit]
        rounds = time_rounds(steps, settings.device, settings.seconds)
        rows += [_row(pair, mode, i, stock, form, rounds) for i, (mode, form) in enumerate(forms.items(), 1)]
        if limit is not None:
            least = statistics.median(took[-1] / took[0] for took in rounds)
            rows = [{**row, "without_bn": least} if "speedup" in row else row for row in rows]
    return sorted(rows, key=lambda row: modes.index(row["mode"]))


def _limiting_step(net: nn.Module, images: Tensor, labels: Tensor) -> Step | None:
    """Return a step of the network without batch normalization, or None if such a step fails."""
    try:
        step = Step(without_norms(net), "eager", images, labels)
        step()
    except Exception:  # for example, the network reads the removed layers' weights, or has no other weights
        return None
    return step


def _row(pair: Pair, mode: Mode, i: int, stock: Prepared, form: Prepared, rounds: list[list[float]]) -> Row:
    middle, low, high = median_interval([took[0] / took[i] for took in rounds])
    return {
        "mode": mode,
        "speedup": middle,
        "interval": [low, high],
        "pairs": len(rounds),
        "stock_ms": 1e3 * statistics.median(took[0] for took in rounds),
        "ours_ms": 1e3 * statistics.median(took[i] for took in rounds),
        "stock_peak_bytes": stock.peak,
        "ours_peak_bytes": form.peak,
        "convert_seconds": pair.convert_seconds,
        "stock_first_step_seconds": stock.first_step_seconds,
        "ours_first_step_seconds": form.first_step_seconds,
        "stock_losses": stock.losses,
        "ours_losses": form.losses,
        "fused": pair.fused,
    }


def results_of(job: NetworkJob, settings: Settings) -> Iterator[tuple[Measurement, list[Row]] | str]:
    """Yield each measurement of a job with its rows; yield ``TURN`` before steps are timed."""
    if settings.cudnn_benchmark:
        torch.backends.cudnn.benchmark = True
    if not settings.on_gpu:
        # Running two networks alternately in one process fragments its heap. By default, glibc would then return memory
        # to the system in every step, and the next step would spend time on page faults.
        keep_freed_memory()
    try:
        pair = convert_pair(job.network, settings)
    except Exception as error:
        for unit in job.units:
            yield unit, failed(unit, _first_line(error))
        return
    for unit in job.units:
        if unit.modes[0] not in COMPILING:
            # Modes that do not compile record the elapsed time of the first step, so no other process may run now.
            yield TURN
        try:
            yield unit, (yield from measure(pair, unit, settings))
        except Exception as error:
            # Most of these errors come from the stock network; `_measure` handles those of the converted network.
            yield unit, failed(unit, f"stock: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    if isinstance(error, UserCodeError):
        error = error.__cause__ or error
    return f"{type(error).__name__}: {error}".partition("\n")[0][:300]
