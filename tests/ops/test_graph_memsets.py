import ctypes

import pytest
import torch

from batchnorm.ops.cuda import driver, graph_memsets
from batchnorm.ops.cuda.graph_memsets import _Memset, replace_memsets


@pytest.mark.parametrize(
    ("memset", "words"),
    [
        ({"width": 4, "size": 1}, 1),
        ({"width": 10, "size": 4, "value": 7}, 10),
        ({"width": 10, "size": 2}, 5),
        ({"width": 4, "size": 1, "value": 1}, None),  # fill.cu writes words, not bytes
        ({"width": 3, "size": 1}, None),
        ({"width": 0, "size": 4}, None),
        ({"width": 4, "size": 4, "height": 2}, None),
        ({"width": 4, "size": 4, "address": 2}, None),
    ],
)
def test_memsets_that_can_be_replaced(memset, words):
    assert _Memset(**{"address": 256, "height": 1, **memset}).words() == words


KERNEL, MEMSET, ALLOCATION, LOSSY = 0, 2, 10, 402


class Graph:
    """A stand-in for a CUDA graph and for the driver's functions that read and change it."""

    def __init__(self):
        self.kinds, self.edges, self.priorities, self.fills, self.lossy = {}, set(), {}, {}, set()

    def add(self, kind, *before, priority=0):
        node = len(self.kinds) + 1
        self.kinds[node] = kind
        self.priorities[node] = priority
        self.edges |= {(b, node) for b in before}
        return node

    def list(self, nodes, to, count):
        for i, node in enumerate(nodes if to is not None else ()):
            to[i] = node
        count._obj.value = len(nodes)
        return 0

    def cuGraphGetNodes(self, graph, to, count):
        return self.list(sorted(self.kinds), to, count)

    def cuGraphNodeGetType(self, node, kind):
        kind._obj.value = self.kinds[node.value]
        return 0

    def cuGraphMemsetNodeGetParams(self, node, memset):
        memset._obj.address, memset._obj.size, memset._obj.width, memset._obj.height = 256 * node.value, 4, 3000, 1
        return 0

    def cuGraphNodeGetDependencies(self, node, to, count):
        if node.value in self.lossy:
            return LOSSY
        return self.list(sorted(a for a, b in self.edges if b == node.value), to, count)

    def cuGraphNodeGetDependentNodes(self, node, to, count):
        return self.list(sorted(b for a, b in self.edges if a == node.value), to, count)

    def cuGraphAddKernelNode_v2(self, new, graph, before, count, kernel):
        address, words = (
            ctypes.c_uint64.from_address(ctypes.c_void_p.from_address(kernel._obj.arguments + 8 * i).value).value
            for i in range(2)
        )
        new._obj.value = 100 + len(self.fills)
        self.kinds[new._obj.value] = KERNEL
        self.fills[new._obj.value] = (address // 256, words, kernel._obj.grid[0])
        self.edges |= {(before[i], new._obj.value) for i in range(count.value)}
        return 0

    def cuGraphKernelNodeGetAttribute(self, node, attribute, value):
        value[0] = self.priorities[node.value]
        return 0

    def cuGraphKernelNodeSetAttribute(self, node, attribute, value):
        self.priorities[node.value] = value[0]
        return 0

    def cuGraphAddDependencies(self, graph, first, then, count):
        self.edges |= {(first[i], then[i]) for i in range(count.value)}
        return 0

    def cuGraphDestroyNode(self, node):
        del self.kinds[node.value]
        self.edges = {edge for edge in self.edges if node.value not in edge}
        return 0


@pytest.fixture
def graph(monkeypatch):
    made = Graph()
    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(graph_memsets, "_fill", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return made


def test_kernels_take_the_places_of_memsets(graph):
    first = graph.add(KERNEL)
    a = graph.add(MEMSET, first)
    b = graph.add(MEMSET, a)
    low, high = graph.add(KERNEL, b), graph.add(KERNEL, b, priority=-1)
    last = graph.add(MEMSET, low, high)
    assert replace_memsets(1) == 3
    places = {place: node for node, (place, words, blocks) in graph.fills.items() if (words, blocks) == (3000, 3)}
    a, b, last = (places[node] for node in (a, b, last))
    assert graph.kinds == dict.fromkeys((first, a, b, low, high, last), KERNEL)
    assert graph.edges == {(first, a), (a, b), (b, low), (b, high), (low, last), (high, last)}
    assert (graph.priorities[a], graph.priorities[b], graph.priorities[last]) == (-1, -1, 0)


def test_memsets_that_stay(graph):
    graph.lossy = {graph.add(MEMSET, graph.add(KERNEL))}
    assert replace_memsets(1) == 0
    other = graph.add(MEMSET)
    graph.add(ALLOCATION, other)  # the driver cannot remove nodes from a graph with allocations
    before = dict(graph.kinds)
    assert replace_memsets(1) == 0
    assert graph.kinds == before


@pytest.mark.gpu
def test_a_graph_with_replaced_memsets_writes_the_same():
    run = driver.library()
    x = [torch.empty(n, dtype=torch.int32, device="cuda") for n in (1, 5000, 7, 5003)]
    y = [torch.empty_like(t) for t in x]

    def step():
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        at = [ctypes.c_uint64(t.data_ptr()) for t in x]
        driver.check(run.cuMemsetD8Async(at[0], 0, ctypes.c_size_t(4), stream))
        driver.check(run.cuMemsetD32Async(at[1], 7, ctypes.c_size_t(5000), stream))
        driver.check(run.cuMemsetD8Async(at[2], 1, ctypes.c_size_t(28), stream))  # not replaced: it sets bytes to 1
        driver.check(run.cuMemsetD32Async(at[3], 8, ctypes.c_size_t(5003), stream))
        for given, to in zip(x, y, strict=True):
            torch.mul(given, 2, out=to)

    step()  # loads the kernel of mul
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        step()
    assert replace_memsets(graph.raw_cuda_graph()) == 3
    graph.instantiate()
    for _ in range(2):
        for tensor in (*x, *y):
            tensor.fill_(-1)
        graph.replay()
        assert [t.unique().tolist() for t in y] == [[0], [14], [2 * 0x01010101], [16]]
