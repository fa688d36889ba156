"""Detect torch tools that read a layer's tensors but silently drop its activation and other options."""

from __future__ import annotations

from types import FrameType
from typing import NamedTuple


class Tool(NamedTuple):
    """Describe a torch tool, and what to use instead of it."""

    name: str
    instead: str
    for_inference: bool  # whether the result of the tool is used only for inference


_FOLD = "use batchnorm.fold(net, example)"
# Every tool reads a layer's running mean. A key is the Python module and the name of the function that reads the mean.
TOOLS = {
    ("torch.nn.modules.batchnorm", "convert_sync_batchnorm"): Tool(
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "use layers with statistics=batchnorm.Sync() instead", False
    ),
    ("torch.nn.utils.fusion", "fuse_conv_bn_eval"): Tool("torch.nn.utils.fuse_conv_bn_eval", _FOLD, True),
    ("torch.nn.utils.fusion", "fuse_linear_bn_eval"): Tool("torch.nn.utils.fuse_linear_bn_eval", _FOLD, True),
    ("torch.utils.mkldnn", "__init__"): Tool("torch.utils.mkldnn.to_mkldnn", _FOLD, True),
}


def tool_at(frame: FrameType) -> Tool | None:
    """Return the tool that a stack frame belongs to, or None if the frame runs other code."""
    return TOOLS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
