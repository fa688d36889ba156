"""Detect torch tools that read a layer's tensors but silently drop its activation, freezing and other state."""

from __future__ import annotations

from types import FrameType
from typing import NamedTuple


class Tool(NamedTuple):
    """Name a torch tool and what to use instead."""

    name: str
    instead: str
    for_inference: bool  # whether its result is only for evaluation mode


_FOLD = "use batchnorm.fold(net, example)"
# Keyed by the module and name of the function in which the tool reads a layer's running mean, as all of them do.
TOOLS = {
    ("torch.nn.modules.batchnorm", "convert_sync_batchnorm"): Tool(
        "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "set layer.statistics = batchnorm.Sync()", False
    ),
    ("torch.nn.utils.fusion", "fuse_conv_bn_eval"): Tool("torch.nn.utils.fuse_conv_bn_eval", _FOLD, True),
    ("torch.nn.utils.fusion", "fuse_linear_bn_eval"): Tool("torch.nn.utils.fuse_linear_bn_eval", _FOLD, True),
    ("torch.utils.mkldnn", "__init__"): Tool("torch.utils.mkldnn.to_mkldnn", _FOLD, True),
}


def tool_at(frame: FrameType) -> Tool | None:
    """Return the tool whose code a frame runs; None if there is none."""
    return TOOLS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
