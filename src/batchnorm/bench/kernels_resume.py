"""How ``bench.kernels`` goes on where an earlier sitting stopped: what a row is known by, and of which kernels."""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
import time
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from .. import ops
from ..ops.cuda import resident, schedule
from ..ops.cuda.layout import geometry_of
from ..results import environment
from .layers import Layer


def hardware() -> dict[str, Any]:
    """Return what a reader needs to know to repeat the measurement, and what must agree between two sittings."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "method": "median of 11 CUDA-graph replays over inputs of more than 180 MB, outputs kept; forward and backward",
    }


def provenance(commit: str | None) -> dict[str, Any]:
    """Return what every row says of its origin."""
    return {"commit": environment(commit)["commit"], "date": time.strftime("%Y-%m-%d")}


@cache
def digest(layer: Layer, channels_last: bool, dtype: torch.dtype, residual: bool, processors: int) -> str:
    """Return a digest of what a row measures: the kernels, what launches them, and which of them a layer gets."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    g = geometry_of(torch.empty(layer.shape, device="meta", memory_format=form))
    rules = (resident.choose, schedule.choose)
    chosen = [rule(g, dtype.itemsize, backward, residual, processors) for rule in rules for backward in (False, True)]
    found = hashlib.sha256(repr(chosen).encode())
    for path in sorted((Path(ops.__file__).parent / "cuda").rglob("*")):
        if path.suffix in (".py", ".cu") and path.name != "schedule.py":  # what the rules chose counts, not the rules
            found.update(code_of(path).encode())
    return found.hexdigest()[:12]


def code_of(path: Path) -> str:
    """Return what a source file computes: its code without comments, docstrings, imports and layout."""
    source = path.read_text()
    if path.suffix == ".cu":
        return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL).split())
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [n for n in node.body if not _is_silent(n)] or [ast.Pass()]
    return ast.dump(tree)


def _is_silent(node: ast.stmt) -> bool:
    """Say whether a statement is an import or a docstring."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or isinstance(node, ast.Import | ast.ImportFrom)


Given = tuple[Layer, bool, torch.dtype, bool]  # channels_last? residual?
Key = tuple[Any, ...]


def key_of(layer: Layer, channels_last: bool, dtype: torch.dtype, residual: bool) -> Key:
    """Return what a row is known by."""
    return (*layer, *names_of(channels_last, dtype, residual))


def earlier_rows(path: Path, machine: dict[str, Any], processors: int) -> dict[Key, dict[str, Any]]:
    """Return the rows of earlier sittings that are of the same kernels.

    Raises:
        ValueError: where they are of another machine or software.
    """
    if not path.exists():
        return {}
    report = json.loads(path.read_text())
    if report["hardware"] != machine:
        raise ValueError(f"{path} is of {report['hardware']}, and this is {machine}: give another --out")
    found = {}
    for row in report["rows"]:
        layer = Layer(*(row[name] for name in Layer._fields))
        given = layer, row["layout"] == "NHWC", getattr(torch, row["dtype"]), row["op"] == "BN+add+ReLU"
        if row["kernels"] == digest(*given, processors):
            found[key_of(*given)] = row
    return found


def names_of(channels_last: bool, dtype: torch.dtype, residual: bool) -> tuple[str, str, str]:
    """Return how a row calls its layout, type and operation."""
    layout, op = "NHWC" if channels_last else "NCHW", "BN+add+ReLU" if residual else "BN+ReLU"
    return layout, str(dtype).removeprefix("torch."), op
