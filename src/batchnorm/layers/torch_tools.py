"""Refuse those of torch's own tools that read a layer's tensors and would drop the rest of it without a word."""

from __future__ import annotations

from types import FrameType
from typing import NamedTuple


class Tool(NamedTuple):
    """Name a tool of torch, and what to do instead.

    Beyond the paper: keeps fused activations and frozen statistics.
    """

    name: str
    instead: str
    for_inference: bool  # its result runs in evaluation mode only


_FOLD = "use batchnorm.fold(net, example)"
# By the module and the function that read a layer's running mean, which each of them does.
TOOLS = {
    ("torch.nn.modules.batchnorm", "convert_sync_batchnorm"): Tool(
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "set layer.statistics = batchnorm.Sync()", False
    ),
    ("torch.nn.utils.fusion", "fuse_conv_bn_eval"): Tool("torch.nn.utils.fuse_conv_bn_eval", _FOLD, True),
    ("torch.nn.utils.fusion", "fuse_linear_bn_eval"): Tool("torch.nn.utils.fuse_linear_bn_eval", _FOLD, True),
    ("torch.utils.mkldnn", "__init__"): Tool("torch.utils.mkldnn.to_mkldnn", _FOLD, True),
}


def tool_at(frame: FrameType) -> Tool | None:
    """Return the tool that a frame runs, if any."""
    return TOOLS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
