"""Replace the memsets in a captured CUDA graph by kernels.

cuDNN clears a counter of four bytes before many convolutions. In a graph, kernels wait longer for a memset than for
another kernel, so it is faster to clear the counter with a kernel.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch

from . import driver

THREADS, WORDS = 256, 4  # of fill.cu: threads per block, and words per thread
_KERNEL, _MEMSET = 0, 2  # CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMSET
_PRIORITY = 8  # CU_LAUNCH_ATTRIBUTE_PRIORITY


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = [
        ("address", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("size", c_uint),  # bytes per element: 1, 2 or 4
        ("width", c_size_t),  # elements per row
        ("height", c_size_t),  # rows
    ]

    def words(self) -> int | None:
        """Return the number of 32-bit words to fill; None if fill.cu cannot replace the memset."""
        count = int(self.width) * int(self.size)
        plain = self.height == 1 and count % 4 == 0 and self.address % 4 == 0
        return count // 4 if plain and count and (self.size == 4 or self.value == 0) else None


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("arguments", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    ]


def replace_memsets(graph: int) -> int:
    """Replace memsets in a captured graph that is not instantiated yet, and return how many were replaced.

    A memset that fill.cu cannot replace stays as it is, for example if it is two-dimensional or does not fill whole
    32-bit words.

    Args:
        graph: the graph's handle, from ``torch.cuda.CUDAGraph.raw_cuda_graph``.
    """
    run = driver.library()
    replaced = 0
    for node in _nodes(run.cuGraphGetNodes, graph) or ():
        if _kind(node) != _MEMSET:
            continue
        memset = _Memset()
        driver.check(run.cuGraphMemsetNodeGetParams(c_void_p(node), byref(memset)))
        words = memset.words()
        before, after = _nodes(run.cuGraphNodeGetDependencies, node), _nodes(run.cuGraphNodeGetDependentNodes, node)
        if words is None or before is None or after is None:
            continue
        new = _add_fill(graph, memset, words, before)
        driver.check(run.cuGraphKernelNodeSetAttribute(new, _PRIORITY, (c_int * 16)(_priority(after))))
        driver.check(run.cuGraphAddDependencies(c_void_p(graph), _array([new.value] * len(after)), *_counted(after)))
        driver.check(run.cuGraphDestroyNode(c_void_p(node)))
        replaced += 1
    return replaced


def _add_fill(graph: int, memset: _Memset, words: int, before: list[int]) -> c_void_p:
    """Add a kernel that does the work of a memset and depends on the nodes ``before``."""
    given = (c_uint64(memset.address), c_uint64(words), c_uint(memset.value))
    pointers = (c_void_p * len(given))(*map(ctypes.addressof, given))
    grid, block = (c_uint * 3)(-(-words // (THREADS * WORDS)), 1, 1), (c_uint * 3)(THREADS, 1, 1)
    kernel = _Kernel(_fill(torch.cuda.current_device()), grid, block, 0, ctypes.addressof(pointers), None, None, None)
    new = c_void_p()
    add = driver.library().cuGraphAddKernelNode_v2
    driver.check(add(byref(new), c_void_p(graph), *_counted(before), byref(kernel)))
    return new


@cache
def _fill(device: int) -> int:
    return driver.load("fill.cu", "fill", (), THREADS, 0, torch.device("cuda", device)).function


def _nodes(query: Any, of: int) -> list[int] | None:
    """Return the nodes that a driver function lists; None if it cannot list them, as with programmatic dependencies."""
    count = c_size_t()
    if query(c_void_p(of), None, byref(count)):
        return None
    found = (c_void_p * count.value)()
    if count.value and query(c_void_p(of), found, byref(count)):
        return None
    return [int(node or 0) for node in found]


def _kind(node: int) -> int:
    kind = c_int()
    driver.check(driver.library().cuGraphNodeGetType(c_void_p(node), byref(kind)))
    return kind.value


def _priority(nodes: list[int]) -> int:
    """Return the priority of the first kernel among ``nodes``; 0, the lowest, if there is none."""
    value = (c_int * 16)()  # CUlaunchAttributeValue, a union of 64 bytes
    for node in nodes:
        if _kind(node) == _KERNEL:
            driver.check(driver.library().cuGraphKernelNodeGetAttribute(c_void_p(node), _PRIORITY, value))
            break
    return int(value[0])


def _array(nodes: list[Any]) -> Any:
    return (c_void_p * len(nodes))(*nodes)


def _counted(nodes: list[int]) -> tuple[Any, c_size_t]:
    return _array(nodes), c_size_t(len(nodes))
