import ctypes

import pytest
import torch

from batchnorm.ops.cuda import driver
from batchnorm.ops.cuda.graph_memsets import _Memset, replace_memsets


@pytest.mark.parametrize(
    ("memset", "words"),
    [
        ({"width": 4, "size": 1}, 1),
        ({"width": 10, "size": 4, "value": 7}, 10),
        ({"width": 10, "size": 2}, 5),
        ({"width": 4, "size": 1, "value": 1}, None),  # fill.cu writes words, not bytes
        ({"width": 3, "size": 1}, None),
        ({"width": 4, "size": 4, "height": 2}, None),
        ({"width": 4, "size": 4, "address": 2}, None),
    ],
)
def test_memsets_that_can_be_replaced(memset, words):
    assert _Memset(**{"address": 256, "height": 1, **memset}).words() == words


@pytest.mark.gpu
def test_a_graph_with_replaced_memsets_writes_the_same():
    run = driver.library()
    x = [torch.empty(n, dtype=torch.int32, device="cuda") for n in (1, 5000, 7)]
    y = [torch.empty_like(t) for t in x]

    def step():
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        at = [ctypes.c_uint64(t.data_ptr()) for t in x]
        driver.check(run.cuMemsetD8Async(at[0], 0, ctypes.c_size_t(4), stream))
        driver.check(run.cuMemsetD32Async(at[1], 7, ctypes.c_size_t(5000), stream))
        driver.check(run.cuMemsetD8Async(at[2], 1, ctypes.c_size_t(28), stream))  # this one stays
        for given, to in zip(x, y, strict=True):
            torch.mul(given, 2, out=to)

    step()  # loads the kernel of mul
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        step()
    assert replace_memsets(graph.raw_cuda_graph()) == 2
    graph.instantiate()
    for _ in range(2):
        for tensor in (*x, *y):
            tensor.fill_(-1)
        graph.replay()
        assert [t.unique().tolist() for t in y] == [[0], [14], [2 * 0x01010101]]
