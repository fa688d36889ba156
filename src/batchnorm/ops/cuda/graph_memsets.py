"""Replace memsets in a captured CUDA graph with kernels.

cuDNN clears a four-byte counter before many convolutions. In a graph, a kernel starts with a longer delay after a
memset than after another kernel, so it is faster to clear the counter with a kernel.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import driver

SOURCE = Path(__file__).with_name("fill.cu")
THREADS = 256  # threads per block
WORDS = 4  # number of 32-bit words that a thread of fill.cu writes
# CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_MEMSET, CU_GRAPH_NODE_TYPE_MEM_ALLOC and CU_GRAPH_NODE_TYPE_MEM_FREE
_KERNEL, _MEMSET, _MEMORY = 0, 2, (10, 11)
_PRIORITY = 8  # CU_LAUNCH_ATTRIBUTE_PRIORITY
_LOSSY = 402  # CUDA_ERROR_LOSSY_QUERY


class _Memset(ctypes.Structure):
    """The driver's struct CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = [
        ("address", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("size", c_uint),  # bytes per element: 1, 2 or 4
        ("width", c_size_t),  # elements per row
        ("height", c_size_t),
    ]

    def words(self) -> int | None:
        """Return the number of 32-bit words to fill, or None if fill.cu cannot replace the memset."""
        count = int(self.width) * int(self.size)
        plain = self.height == 1 and count % 4 == 0 and self.address % 4 == 0
        return count // 4 if plain and count and (self.size == 4 or self.value == 0) else None


class _Kernel(ctypes.Structure):
    """The driver's struct CUDA_KERNEL_NODE_PARAMS_v2."""

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

    A memset is replaced only if it is one-dimensional, fills aligned 32-bit words with zeros or with one 32-bit value,
    and has no programmatic dependencies (with these, a kernel may start before the previous kernel ends). If the graph
    allocates or frees memory, no memset is replaced, because the driver does not remove nodes from such a graph.

    Args:
        graph: the graph's handle, from ``torch.cuda.CUDAGraph.raw_cuda_graph``.
    """
    run = driver.library()
    kinds = {node: _kind(node) for node in _nodes(run.cuGraphGetNodes, graph) or ()}
    if any(kind in _MEMORY for kind in kinds.values()):
        return 0
    replaced = 0
    # A new kernel gets the highest priority of the kernels that depend on it. If a memset B depends on a memset A, B
    # must already be a kernel when A is replaced, so that A's kernel gets B's priority. So replace the memsets in
    # reverse order.
    for node in (node for node, kind in reversed(kinds.items()) if kind == _MEMSET):
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
    given = (c_uint64(memset.address), c_uint64(words), c_uint(memset.value))
    pointers = (c_void_p * len(given))(*map(ctypes.addressof, given))
    grid, block = (c_uint * 3)(-(-words // (WORDS * THREADS)), 1, 1), (c_uint * 3)(THREADS, 1, 1)
    kernel = _Kernel(_fill(torch.cuda.current_device()), grid, block, 0, ctypes.addressof(pointers), None, None, None)
    new = c_void_p()
    add = driver.library().cuGraphAddKernelNode_v2
    driver.check(add(byref(new), c_void_p(graph), *_counted(before), byref(kernel)))
    return new


@cache
def _fill(device: int) -> int:
    return driver.load(SOURCE, "fill", (), THREADS, 0, torch.device("cuda", device)).function


def _nodes(query: Any, of: int) -> list[int] | None:
    """Return the nodes that the driver function ``query`` lists for the graph or node ``of``.

    Return None if a dependency is programmatic, because ``query`` then fails.
    """
    count = c_size_t()
    result = query(c_void_p(of), None, byref(count))
    found = (c_void_p * count.value)()
    if not result and count.value:
        result = query(c_void_p(of), found, byref(count))
    if result == _LOSSY:
        return None
    driver.check(result)
    return [int(node or 0) for node in found]


def _kind(node: int) -> int:
    kind = c_int()
    driver.check(driver.library().cuGraphNodeGetType(c_void_p(node), byref(kind)))
    return kind.value


def _priority(nodes: list[int]) -> int:
    """Return the highest priority (the lowest number) of the kernels among ``nodes``, or 0 if no node is a kernel."""
    found = [0]
    for node in nodes:
        if _kind(node) == _KERNEL:
            value = (c_int * 16)()  # the driver's union CUlaunchAttributeValue, which has 64 bytes
            driver.check(driver.library().cuGraphKernelNodeGetAttribute(c_void_p(node), _PRIORITY, value))
            found.append(value[0])
    return min(found)


def _array(nodes: list[Any]) -> Any:
    return (c_void_p * len(nodes))(*nodes)


def _counted(nodes: list[int]) -> tuple[Any, c_size_t]:
    return _array(nodes), c_size_t(len(nodes))
