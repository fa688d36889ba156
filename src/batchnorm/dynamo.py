"""``torch.compile(net, backend="batchnorm")``: fused batch normalization for networks of plain ``torch.nn`` layers.

Dynamo's graph calls ``F.batch_norm``. In training mode, calls that the fused kernels support are replaced with calls to
this library. The new calls also compute the sum and the activation that follow, if they can be fused. Inductor compiles
the changed graph. In evaluation mode, batch normalization is elementwise, and Inductor fuses it without help.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from . import ops
from .graph.patterns import Match, Matcher

log = logging.getLogger(__name__)

# The names of each function's positional arguments, in order.
PARAMETERS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
}
DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


def compile_graph(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    inner: str | Callable[..., Any] = "inductor",
    everywhere: bool = False,
) -> Callable[..., Any]:
    """Fuse the batch normalizations in a Dynamo graph and compile the graph; this is the backend "batchnorm".

    Args:
        module: the graph; it is changed in place.
        inputs: the example inputs that Dynamo passes.
        mode: as for ``torch.compile``: "reduce-overhead", "max-autotune", ...
        options: Inductor's options, as for ``torch.compile``.
        inner: the backend that compiles the changed graph, or the backend's name; only Inductor uses ``mode`` and
            ``options``.
        everywhere: also replace calls that the fused kernels do not support, such as calls on a CPU; such calls do
            not become faster.
    """
    with _compiling():
        fuse_(module, everywhere=everywhere)
        if inner != "inductor":
            return lookup_backend(inner)(module, inputs)  # type: ignore[arg-type]
        functions = {f"{__name__}.{f.__name__}": _digest() for f in (normalize_batch, move_averages_)}
        functions |= inductor_config.unsafe_marked_cacheable_functions
        with inductor_config.patch(unsafe_marked_cacheable_functions=functions):
            return torch._TorchCompileInductorWrapper(mode, options, None)(module, inputs)  # type: ignore[no-any-return]


def _reset() -> None:
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


compile_graph.reset = _reset  # type: ignore[attr-defined]  # torch._dynamo.reset() calls this to free CUDA graphs


def fuse_(module: fx.GraphModule, *, everywhere: bool = False) -> int:
    """Fuse the batch normalizations in a Dynamo graph, in place, and return how many were fused.

    Batch normalizations inside activation checkpoints are fused too, but are not counted in the result. With
    ``TORCH_LOGS=batchnorm.dynamo``, the counts of each graph are logged. ``torch._dynamo.utils.counters["batchnorm"]``
    has the totals over all graphs.
    """
    for node in list(module.graph.nodes):
        if node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body = module.get_submodule(node.args[0].target)
            assert isinstance(body, fx.GraphModule)
            fuse_(body, everywhere=everywhere)
    calls = [node for node in module.graph.nodes if _arguments(node)["training"] is True]
    norms = _fusable(module.graph, calls, everywhere)
    matches = Matcher(module, module.graph, norms.__contains__, fits=_fits).matches()
    found = {match.norm: match for match in matches}
    for node in norms:
        found.setdefault(node, Match(node, None, 0, None, ops.Activation()))
    _replace(module.graph, [found[node] for node in norms])
    module.recompile()
    counts = {
        "calls": len(calls),
        "fused": len(norms),
        "activations": sum(match.activation is not None for match in found.values()),
        "residuals": sum(match.sum is not None for match in found.values()),
    }
    counters["batchnorm"].update(counts)
    log.info(
        "%(fused)d of %(calls)d batch normalizations in training mode fused, %(activations)d with an activation,"
        " %(residuals)d with a residual",
        counts,
    )
    return len(norms)


def normalize_batch(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float, name: str, slope: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return g(BN(x) + residual), the batch's mean and its unbiased variance.

    g is the activation with the given name and slope. AOTAutograd traces this function.
    """
    y, moments = ops.batch_norm(x, weight, bias, eps, activation=ops.Activation(name, slope), residual=residual)
    m = x.numel() / x.shape[1]
    return y, moments.mean.detach(), moments.var.detach() * (m / (m - 1))


def move_averages_(averages: list[Tensor], moments: list[Tensor], momentum: float) -> None:
    """Set each running average to (1 - momentum) * average + momentum * moment.

    One call updates many averages, so that Inductor can compile the updates into one kernel.
    """
    with torch.no_grad():
        old = [average.to(moment.dtype) for average, moment in zip(averages, moments, strict=True)]
        new = torch._foreach_add(torch._foreach_mul(old, 1 - momentum), torch._foreach_mul(moments, momentum))
        for average, value in zip(averages, new, strict=True):
            average.copy_(value)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """Return a batch_norm call's arguments by their names in ``F.batch_norm``; for other nodes, return the defaults."""
    if node.op != "call_function" or node.target not in PARAMETERS:
        return DEFAULTS
    return {**DEFAULTS, **dict(zip(PARAMETERS[node.target], node.args, strict=False)), **node.kwargs}


def _fusable(graph: fx.Graph, calls: list[fx.Node], everywhere: bool) -> dict[fx.Node, None]:
    """Return the calls that can be replaced, in order."""
    if any("_functorch" in (getattr(node.target, "__module__", None) or "") for node in graph.nodes):
        log.info("batch normalization in a graph with a torch.func transform is not fused")
        return {}
    norms = dict.fromkeys(node for node in calls if _is_plain(node, everywhere))
    # The running averages will be updated at the end of the graph. So leave out calls whose averages are also used by
    # nodes that are not replaced.
    while others := [node for node in norms if any(user not in norms for a in _averages(node) for user in a.users)]:
        for node in others:
            del norms[node]
    return norms


def _is_plain(node: fx.Node, everywhere: bool) -> bool:
    given = _arguments(node)
    x, y = _value(given["input"]), _value(node)
    if type(x) is not FakeTensor or type(y) is not FakeTensor or x.dim() < 2:
        return False
    if not node.args or len(_averages(node)) == 1:
        return False  # not a call from torch.nn, which passes the input by position and both running averages or none
    # For a permuted input, F.batch_norm returns a contiguous output. Leave out such calls, because later code may rely
    # on this layout.
    if not _is_known_equal(x.stride(), y.stride()) or x.dtype is not y.dtype:
        return False
    if statically_known_true(x.numel() <= x.shape[1]):
        return False
    return everywhere or ops.explain(x, _value(given["weight"]), _value(given["bias"])).path == "cuda"


def _averages(node: fx.Node) -> list[fx.Node]:
    given = _arguments(node)
    return [a for a in (given["running_mean"], given["running_var"]) if a is not None]


def _fits(norm: fx.Node, residual: fx.Node) -> bool:
    """Return whether the residual has the dtype, device, shape and strides of the layer's output."""
    y, other = _value(norm), _value(residual)
    if type(other) is not FakeTensor or other.dtype is not y.dtype or other.device != y.device:
        return False
    return _is_known_equal(y.shape, other.shape) and _is_known_equal(y.stride(), other.stride())


def _is_known_equal(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether two tuples of sizes or strides are known to be equal, without adding guards on symbolic sizes."""
    return len(a) == len(b) and all(statically_known_true(p == q) for p, q in zip(a, b, strict=True))


def _value(node: Any) -> Any:
    """Return the example value, such as a fake tensor, that Dynamo computed for a node, or None if there is none."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _replace(graph: fx.Graph, matches: list[Match]) -> None:
    rounds: list[dict[fx.Node, tuple[fx.Node, Any]]] = []
    for match in matches:
        given, averages = _arguments(match.norm), _averages(match.norm)
        with graph.inserting_before(match.sum or match.norm):
            tensors = (given["input"], given["weight"], given["bias"], match.residual)
            results = graph.call_function(normalize_batch, (*tensors, given["eps"], *match.kind))
            y, *moments = (graph.call_function(operator.getitem, (results, i)) for i in range(1 + len(averages)))
        y.meta = dict(match.end.meta)
        results.meta = {key: value for key, value in y.meta.items() if key != "example_value"}
        match.replace_by(y)
        # If a layer is called twice, its averages are updated twice. move_averages_ can update an average only once per
        # call, so divide the updates into rounds in which each average occurs at most once.
        turn = next((turn for turn in rounds if not turn.keys() & {*averages}), None)
        if turn is None:
            rounds.append(turn := {})
        turn |= {a: (moment, given["momentum"]) for a, moment in zip(averages, moments, strict=True)}
    with graph.inserting_before(graph.output_node()):
        for turn in rounds:
            for momentum in dict.fromkeys(momentum for _, momentum in turn.values()):
                alike = {a: moment for a, (moment, by) in turn.items() if by == momentum}
                graph.call_function(move_averages_, ([*alike], [*alike.values()], momentum))


@contextmanager
def _compiling() -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` true inside the block, in which AOTAutograd runs the graph.

    torch 2.13 does this itself.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


@cache
def _digest() -> str:
    """Return a digest of the Python code that a fused graph calls, for the key of torch's compile cache."""
    files = sorted([Path(__file__), *Path(ops.__file__).parent.rglob("*.py")])
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
