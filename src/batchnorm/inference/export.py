"""Write the inference network to a file, then run the file and check its outputs."""

from __future__ import annotations

import errno
import inspect
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import network_call
from ..change_report import VerbReport
from ..network_copy import isolated, outputs, private_copy, relative, require_numbers, restored
from ..optional_packages import MissingExtraError, check_installed, require
from ..progress import Steps
from ..results import check_writable, followed
from ..verify import roundings
from .fold import READS_VALUES, fold_with_report, warn_of_left

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# A protobuf file is limited to 2 GiB; the weights of larger networks go into a second file.
LARGEST_FILE = 1_900_000_000
# The file is also checked on a batch larger than the example, because the network's code may branch on the batch size.
# The size of that batch is the largest multiple of the example's batch size within these two limits. If the limits do
# not allow twice the example's batch size, it is the example's batch size plus 1.
MANY_EXAMPLES = 16
LARGEST_INPUT = 2**22  # the number of values in all input tensors together


@dataclass(frozen=True)
class Exported:
    """Describe the file that :func:`export` wrote, and how far its outputs are from the network's."""

    path: Path
    relative_error: float
    """The largest relative error of the file's outputs over the batch sizes that were run."""
    batch_sizes: tuple[int, ...]
    """The batch sizes on which the file was run and compared with the network."""
    fold: VerbReport
    sizes: tuple[int, int, int]
    """Sizes in bytes: parameters and buffers before folding, parameters and buffers after it, and the written files."""

    def __str__(self) -> str:
        *others, last = map(str, self.batch_sizes)
        batches = f"{', '.join(others)} and {last}" if others else last
        before, after, written = self.sizes
        return (
            f"{self.path}: relative error {self.relative_error:.1e} on batches of {batches}\n{self.fold}\n"
            f"size: {before:,} bytes of parameters and buffers before folding, {after:,} after, {written:,} in the file"
        )


def export(
    net: nn.Module,
    example: Any,
    path: str | Path,
    *,
    dynamic_batch: bool = True,
    tolerance: float | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Exported:
    """Fold a network, write it as ONNX or as a ``torch.export`` program, run the file and compare the outputs.

    Only the folded network is exported, in evaluation mode. In training mode, an exporter would silently write a
    network whose output for an example depends on the other examples of the batch. The file is written to ``path`` only
    if its outputs agree with the network's. ``net`` is not changed.

    Args:
        net: any network; it is written in evaluation mode, with a warning if it is in training mode.
        example: a batch; a dict is passed as keyword arguments, so use a dict if the network has several inputs.
        path: the file to write; the name ends in ``.onnx`` (which needs the extra "export") or ``.pt2``.
        dynamic_batch: let the first dimension of each input vary. With ``dynamic_batch``, the file is also run on
            batches of 1, 2 and 3 examples and on a batch larger than ``example``. Batches that the network does not
            accept are skipped.
        tolerance: the largest relative error to accept; by default, the error that rounding can cause in the network's
            precision.
        metadata: strings to store in the file, such as class names. These strings become ONNX's metadata properties
            or ``torch.export``'s extra files.

    Warns:
        UserWarning: if a batch normalization is left in the file, or the network is in training mode.

    Raises:
        FileNotFoundError: if the folder of ``path`` does not exist.
        MissingExtraError: if packages for ONNX are missing; the message names all of them.
        TypeError: if the network is wrapped in a compiled or data-parallel module; pass the network inside it.
        ValueError: if ``path`` has another extension, if the network cannot be folded or exported, if it is written as
            ONNX but does not return only tensors, or if the file computes different outputs or fails on a batch that
            the network accepts.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU()).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export(net, torch.randn(2, 4), f"{folder}/net.pt2").batch_sizes
    (1, 2, 3, 16)

    Beyond the paper: inference without Python.
    """
    network_call.check_network(net)
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be a file name, not {type(path).__name__}: call export(net, example, path)")
    path = Path(path)
    for key, value in (metadata or {}).items():
        if not (isinstance(key, str) and isinstance(value, str)):
            raise TypeError(f"metadata must map strings to strings, but {key!r} maps to {value!r}")
    formats: dict[str, tuple[Writer, Loader]] = {".onnx": (_write_onnx, _load_onnx), ".pt2": (_write_pt2, _load_pt2)}
    if path.suffix not in formats:
        raise ValueError(f"cannot tell the format from '{path.name}': the name must end in .onnx or .pt2")
    # Replace the file that a symbolic link refers to. But the weights of a large ONNX file are in a second file, which
    # must be in the folder of the link.
    has_two_files = path.suffix == ".onnx" and _bytes(net) > LARGEST_FILE
    goal = path if has_two_files else followed(path)
    if not goal.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path.name}: the folder '{goal.parent}' does not exist")
    check_writable(goal)
    if path.suffix == ".onnx":
        check_installed("onnx", "onnxscript", "onnxruntime")
    if net.training:
        warnings.warn(
            "the network is in training mode; export writes it in evaluation mode, with the current running statistics."
            " Update the statistics with estimate_ if needed, and call net.eval() to silence this warning",
            stacklevel=2,
        )
    folded, report = fold_with_report(net, example, tolerance)
    warn_of_left(report)
    # Copy the example, because it may be a view of a data set, and torch.export saves the whole storage of its example.
    example = network_call.copy_for(folded, example)
    limits = _limits(net, folded, example, tolerance)
    own_size = _batch_size(example)
    traced_size = 2 if dynamic_batch and own_size == 1 else own_size  # exporters treat a dimension of 1 as fixed
    traced = example if traced_size == own_size else _resized(example, traced_size)
    write, load = formats[path.suffix]
    with Steps("export", total=2) as step, tempfile.TemporaryDirectory(dir=goal.parent) as folder:
        draft = Path(folder) / goal.name
        step("writing the file")
        try:
            with torch.no_grad(), warnings.catch_warnings(), _without_import_warnings():
                warnings.simplefilter("ignore")  # torch's exporters warn about their own internals
                write(folded, traced, draft, dynamic_batch, dict(metadata or {}))
                run = load(draft)
        except MissingExtraError:
            raise
        except Exception as failure:
            cause = _first_cause(failure)
            if isinstance(cause, OSError) and cause.errno in FULL_DISK:
                raise OSError(cause.errno, cause.strerror, str(path)) from failure
            if path.suffix == ".onnx":
                _require_tensors(outputs(folded, example))
            hint = " (try dynamic_batch=False)" if dynamic_batch else ""
            for note in report.notes:
                if note.startswith(READS_VALUES):
                    hint = f". {note}; if so, use operations on tensors instead, such as torch.where. Torch's error"
            why = str(cause).partition("\n")[0] or type(cause).__name__  # torch adds many lines of debugging advice
            raise ValueError(f"torch cannot export this network to {path.suffix}{hint}: {why}") from failure
        step("running the file")
        others = _other_sizes(example) if dynamic_batch else []
        found = _errors(net, run, example, others)
        errors = {size: max(each) for size, each in found.items()}
        if path.suffix == ".onnx" and max(errors.values()) == inf:
            _require_tensors(outputs(folded, example))
        for size, each in found.items():
            error, limit = max(zip(each, limits, strict=False), key=lambda pair: pair[0] - pair[1])
            if len(each) != len(limits) or not error <= limit:
                branch = "The network may depend on the batch size: export one file per size with dynamic_batch=False"
                raise ValueError(
                    f"the exported file's output on a batch of {size} differs from the network's by {error:.2e}"
                    f" (relative), more than {limit:.0e}. Nothing was written."
                    f" {branch if size != traced_size else 'To accept this error, pass a larger tolerance='}"
                )
        if others and len(errors) == 1:
            raise ValueError(
                f"the network accepts no other batch size than {own_size} (tried {', '.join(map(str, others))}), so it"
                " cannot be checked that the file accepts others. Nothing was written. To write a file for this batch"
                " size only, pass dynamic_batch=False"
            )
        _check_state(net, run, example, limits)
        written = sum(file.stat().st_size for file in Path(folder).iterdir())
        for file in Path(folder).iterdir():
            os.replace(file, goal.parent / file.name)
    return Exported(path, max(errors.values()), tuple(sorted(errors)), report, (_bytes(net), _bytes(folded), written))


Writer = Callable[[nn.Module, Any, Path, bool, dict[str, str]], None]
Run = Callable[..., Any]
"""A function that runs a file on batches, in a row and from the file's initial state, and returns the last output."""
Loader = Callable[[Path], Run]


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _require_tensors(output: Any) -> None:
    """Raise ValueError if a network's output has a number, a string or another value that is not a tensor or None."""
    for path, item in network_call.walk([("output", output)]):
        if isinstance(item, network_call.LEAVES) and not isinstance(item, Tensor | None):
            raise ValueError(
                f"the network's {path} is of type {type(item).__name__}, but an ONNX file returns only tensors: export"
                " a module that calls the network and returns only its tensors, or write a .pt2 file"
            )


def _limits(net: nn.Module, folded: nn.Module, example: Any, tolerance: float | None) -> list[float]:
    """Return the relative error to accept for each output, so that one sensitive output does not excuse the others."""
    old, new = (network_call.tensors_in(outputs(n, example, training=False)) for n in (net, folded))
    if tolerance is not None:
        return [tolerance] * len(old)
    return [a + relative(x, y) for a, x, y in zip(roundings(folded, example), new, old, strict=True)]


def _check_state(net: nn.Module, run: Run, example: Any, limits: list[float]) -> None:
    """Raise ValueError if a second call in a row returns something else in the file than in the network."""
    twin = private_copy(net).eval()
    calls = []
    # Copy the example for each call, because the network and the file may write to their input.
    with isolated(net, twin):
        for _ in range(2):
            output = network_call.call(twin, network_call.copy_for(net, example))
            calls.append([t.clone() for t in _on_cpu(output)])
    first, second = calls
    again = _on_cpu(run(*(network_call.copy_for(net, example) for _ in range(2))))
    same = [t.shape for t in again] == [t.shape for t in second]
    if same and all(relative(a, b) <= e for a, b, e in zip(again, second, limits, strict=True)):
        return
    if [t.shape for t in first] == [t.shape for t in second] and all(map(torch.equal, first, second)):
        what = "the file's second call returns something else than its first"
    else:
        what = "the network's forward keeps values for its next call (in buffers, attributes or lists)"
    raise ValueError(
        f"{what}, which the exported file does not reproduce. Nothing was written. Take these values as inputs and"
        " return them as outputs; a .pt2 file can also keep them in buffers"
    )


def _errors(net: nn.Module, run: Run, example: Any, others: list[int]) -> dict[int, list[float]]:
    """Return the relative error of each of a file's outputs, for each batch size that the network accepts."""
    expected = _on_cpu(outputs(net, example, training=False))
    require_numbers(expected)
    new = _outputs_of(run, example)
    same = [t.shape for t in new] == [t.shape for t in expected]
    found = {_batch_size(example): [relative(a, b) for a, b in zip(new, expected, strict=True)] if same else [inf]}
    scales = [_largest(t) for t in expected]
    for size in others:
        batch = _resized(example, size)
        try:
            expected = _on_cpu(outputs(net, batch, training=False))
            require_numbers(expected)
        except Exception:
            continue
        found[size] = _scaled_errors(_outputs_of(run, batch), expected, scales)
    return found


def _outputs_of(run: Run, batch: Any) -> list[Tensor]:
    try:
        return _on_cpu(run(batch))
    except Exception as failure:
        raise ValueError(
            f"the exported file fails on a batch of {_batch_size(batch)}, which the network accepts. Nothing was"
            " written. If the network's code computes with len(x), write x.shape[0] instead; otherwise, export one file"
            f" per batch size with dynamic_batch=False. The error was: {failure}"
        ) from failure


def _scaled_errors(new: list[Tensor], old: list[Tensor], scales: list[float]) -> list[float]:
    """Return each output's error, relative to its largest value on this batch or on the example."""
    if [t.shape for t in new] != [t.shape for t in old] or len(old) != len(scales):
        return [inf]
    errors = []
    for a, b, scale in zip(new, old, scales, strict=True):
        here = _largest(b)
        errors.append(relative(a, b) * (here or 1.0) / (max(here, scale) or 1.0))
    return errors


def _largest(t: Tensor) -> float:
    t = t.to(torch.promote_types(t.dtype, torch.float32))
    finite = t[t.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _on_cpu(output: Any) -> list[Tensor]:
    return [t.cpu() for t in network_call.tensors_in(output)]


def _other_sizes(example: Any) -> list[int]:
    """Return the other batch sizes to check a file on: 1, 2, 3 and a size larger than the example's."""
    own = _batch_size(example)
    if own == 0:
        return []
    numbers = sum(t.numel() for t in network_call.tensors_in(network_call.arguments(example)))
    many = min(MANY_EXAMPLES, LARGEST_INPUT * own // max(numbers, 1))
    return sorted({1, 2, 3, own * (many // own) if many >= 2 * own else own + 1} - {own})


@contextmanager
def _without_import_warnings() -> Iterator[None]:
    """Keep torch.onnx from warning about missing optional packages."""
    # Use a filter, because torch itself sets the logger's level while the exporter is imported.
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")

    def matters(record: logging.LogRecord) -> bool:
        return record.levelno > logging.WARNING

    logger.addFilter(matters)
    try:
        yield
    finally:
        logger.removeFilter(matters)


def _write_pt2(net: nn.Module, example: Any, path: Path, dynamic: bool, metadata: dict[str, str]) -> None:
    args, kwargs = network_call.arguments(example)
    program = torch.export.export(net, args, kwargs, dynamic_shapes=_shapes(net, args, kwargs, dynamic))
    content = io.BytesIO()  # torch ends the process if it cannot write to a file
    torch.export.save(program, content, extra_files=metadata)
    path.write_bytes(content.getbuffer())


def _load_pt2(path: Path) -> Run:
    with warnings.catch_warnings(), torch.device("cpu"):  # torch.export.load needs the CPU as the default device
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # torch 2.11 warns about its own code
        program = torch.export.load(path).module()

    def run(*batches: Any) -> Any:
        with torch.no_grad(), restored(program):
            for batch in batches:
                out = network_call.call(program, batch)
            return [t.clone() for t in network_call.tensors_in(out)]  # an output may be a buffer

    return run


def _write_onnx(net: nn.Module, example: Any, path: Path, dynamic: bool, metadata: dict[str, str]) -> None:
    require("onnxscript", "export")
    args, kwargs = network_call.arguments(example)
    if args and isinstance(args[-1], dict):
        # Without keyword arguments, torch would take a dict at the end of `args` for them.
        kwargs = {next(iter(inspect.signature(net.forward).parameters)): args[0]}
        args = ()
    torch.onnx.export(
        net,
        args,
        str(path),
        kwargs=kwargs,
        dynamo=True,
        dynamic_shapes=_shapes(net, args, kwargs, dynamic),
        external_data=_bytes(net) > LARGEST_FILE,
        verbose=False,
    )
    if metadata:
        onnx = require("onnx", "export")
        model = onnx.load(str(path), load_external_data=False)
        onnx.helper.set_model_props(model, metadata)
        onnx.save(model, str(path))


def _load_onnx(path: Path) -> Run:
    runtime = require("onnxruntime", "export")
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # do not print errors, because they are also raised as exceptions
    session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [node.name for node in session.get_inputs()]

    def run(*batches: Any) -> Any:  # an ONNX file has no state
        args, kwargs = network_call.arguments(batches[-1])
        given = (
            kwargs
            if set(names) <= kwargs.keys()
            else dict(zip(names, network_call.tensors_in((args, kwargs)), strict=True))
        )
        out = session.run(None, {name: given[name].detach().cpu().numpy() for name in names})
        return [torch.as_tensor(value, device="cpu") for value in out]

    return run


def _shapes(net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool) -> Any:
    """Return torch.export's ``dynamic_shapes`` for inputs whose first dimension varies, or None if not ``dynamic``.

    For inputs that are not tensors, such as flags, torch.export expects None. torch.export groups the inputs by the
    names of the arguments of ``forward``, so ``*inputs`` is one tuple.
    """
    if not dynamic:
        return None
    batch = torch.export.Dim("batch")

    def shape(t: Tensor) -> Any:
        return {0: batch} if t.dim() and len(t) > 1 else None  # a dimension of 1 is fixed: it may be broadcast

    bound = inspect.signature(net.forward).bind(*args, **kwargs).arguments
    return network_call.map_tensors(bound, shape, lambda other: None)


def _bytes(net: nn.Module) -> int:
    return sum(t.nbytes for t in (*net.parameters(), *net.buffers()))


def _batch_size(batch: Any) -> int:
    sizes = {t.shape[0] for t in network_call.tensors_in(network_call.arguments(batch)) if t.dim()}
    return max(sizes, default=0)


def _resized(batch: Any, size: int) -> Any:
    """Return a batch of ``size`` examples: the first examples of ``batch``, repeated if there are too few."""
    own = _batch_size(batch)

    def resize(t: Tensor) -> Tensor:
        if not t.dim() or (len(t) == 1 and own > 1):
            return t
        return t[torch.arange(len(t) * size // own, device=t.device) % len(t)]

    return network_call.map_tensors(batch, resize)
