"""The rows of ``bench kernels``: the layers to measure, and the rows of earlier sessions that are still valid.

A row has the measurements of one layer in one layout, dtype and operation. An earlier row is valid as long as the
kernels' code and the choice of kernels for its layer are unchanged.
"""

from __future__ import annotations

import ast
import hashlib
import json
import platform
import re
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .. import ops
from ..errors import differences
from ..ops.cuda import resident, schedule
from ..ops.cuda.layout import geometry_of


class LayerShape(NamedTuple):
    """The input shape of one layer of a network, at one batch size."""

    network: str
    batch: int
    channels: int
    size: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of the input, (N, C, H, W)."""
        return self.batch, self.channels, self.size, self.size


_CHANNELS = {  # the layers' numbers of channels, by network and by height of the layer's input
    # Paper: Appendix, Figure 5, but with pool projections of 96 channels in 4c and 4d, where the figure prints 128. All
    # layers of 3c and 4e are listed at the height of the module's input, as in the figure, although layers that follow
    # a strided convolution have half that height.
    "inception": {
        112: (64,),
        56: (64, 192),
        28: (32, 64, 96, 128, 160),
        14: (64, 96, 128, 160, 192, 224, 256),
        7: (128, 160, 192, 224, 320, 352),
    },
    "resnet50": {112: (64,), 56: (64, 128, 256), 28: (128, 256, 512), 14: (256, 512, 1024), 7: (512, 2048)},
}


def all_layers() -> list[LayerShape]:
    """Return the layer shapes of Inception and ResNet-50, each at a small and at a large batch size."""
    networks = (("inception", 32), ("inception", 256), ("resnet50", 64), ("resnet50", 256))
    rows = [(name, batch, size, c) for name, batch in networks for size, cs in _CHANNELS[name].items() for c in cs]
    return [LayerShape(name, batch, c, size) for name, batch, size, c in rows]


def short_list() -> list[LayerShape]:
    """Return a few layer shapes of different sizes, for a quick measurement."""
    wanted = {
        "inception": {32: ((64, 112), (192, 56), (96, 28), (160, 14), (352, 7)), 256: ((64, 28), (128, 14), (320, 7))},
        "resnet50": {64: ((256, 56), (512, 28), (1024, 14), (2048, 7)), 256: ((256, 56), (512, 28), (64, 112))},
    }
    return [LayerShape(net, b, c, s) for net, batches in wanted.items() for b, rows in batches.items() for c, s in rows]


def hardware() -> dict[str, Any]:
    """Describe the hardware, the versions and the method, which must be the same for all rows of a result file."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "python": platform.python_version(),
        "method": "median of 11 CUDA-graph replays over inputs of 180 MB, but at most 64 sets; outputs kept",
    }


@cache
def digest(layer: LayerShape, channels_last: bool, dtype: torch.dtype, residual: bool, processors: int) -> str:
    """Return a digest of the kernels' and launchers' code (Python and CUDA), and of the kernels chosen for a row."""
    form = torch.channels_last if channels_last else torch.contiguous_format
    g = geometry_of(torch.empty(layer.shape, device="meta", memory_format=form))
    rules = (resident.choose, schedule.choose)
    chosen = [rule(g, dtype.itemsize, backward, residual, processors) for rule in rules for backward in (False, True)]
    found = hashlib.sha256(repr(chosen).encode())
    for path in sorted((Path(ops.__file__).parent / "cuda").rglob("*")):
        # Leave out schedule.py, because the tilings that it chooses for this row are hashed above.
        if path.suffix in (".py", ".cu") and path.name != "schedule.py":
            found.update(code_of(path).encode())
    return found.hexdigest()[:12]


def code_of(path: Path) -> str:
    """Return a source file's code without comments and formatting; in Python, also without docstrings and imports."""
    source = path.read_text()
    if path.suffix != ".py":
        return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL).split())
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [n for n in node.body if not _is_silent(n)] or [ast.Pass()]
    return ast.dump(tree)


def _is_silent(node: ast.stmt) -> bool:
    """Return whether a statement is an import or a docstring."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or isinstance(node, ast.Import | ast.ImportFrom)


Given = tuple[LayerShape, bool, torch.dtype, bool]  # layer, channels_last, dtype, residual
Key = tuple[Any, ...]


def key_of(layer: LayerShape, channels_last: bool, dtype: torch.dtype, residual: bool) -> Key:
    """Return the key of a row."""
    return (*layer, *names_of(channels_last, dtype, residual))


def is_measured(row: dict[str, Any], compiler: str) -> bool:
    """Return whether a row has the time of ``compiler`` and our time; a row without our time may be "refused" instead.

    ``compiler`` is "compile" or "compile-max", the two modes of torch.compile. A row is refused if our kernels failed
    the error check.

    >>> is_measured({"us": {"compile": [1.0, 2.0]}}, "compile")
    False
    >>> is_measured({"us": {"compile": [1.0, 2.0]}, "refused": "the relative errors are too large"}, "compile")
    True
    """
    return compiler in row["us"] and ("batchnorm" in row["us"] or "refused" in row)


def earlier_rows(path: Path, machine: dict[str, Any], processors: int) -> dict[Key, dict[str, Any]]:
    """Return, by key, the rows of a result file that were measured with the current kernels.

    Raises:
        ValueError: if the file is from other hardware, other software versions or another method.
    """
    if not path.exists():
        return {}
    report = json.loads(path.read_text())
    if other := differences(report["hardware"], {**dict.fromkeys(report["hardware"]), **machine}):
        raise ValueError(
            f"the results in {path} are from other hardware, other versions or another method ({'; '.join(other)}):"
            " choose another --out"
        )
    found = {}
    for row in report["rows"]:
        layer = LayerShape(*(row[name] for name in LayerShape._fields))
        given = layer, row["layout"] == "NHWC", getattr(torch, row["dtype"]), row["op"] == "BN+add+ReLU"
        if row["kernels"] == digest(*given, processors):
            found[key_of(*given)] = row
    return found


def names_of(channels_last: bool, dtype: torch.dtype, residual: bool) -> tuple[str, str, str]:
    """Return the names of a row's layout, dtype and operation."""
    layout, op = "NHWC" if channels_last else "NCHW", "BN+add+ReLU" if residual else "BN+ReLU"
    return layout, str(dtype).removeprefix("torch."), op
