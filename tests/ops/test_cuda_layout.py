"""Test memory layouts, plans, and how kernels divide offsets: they multiply by a precomputed number and shift."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from batchnorm.ops.cuda import cached_pass, layout, schedule


def test_layouts():
    x = torch.empty(4, 6, 5, 5)
    assert layout.geometry_of(x) == (False, 6, 100, 25, 150, 25, False)
    assert layout.geometry_of(x.contiguous(memory_format=torch.channels_last)) == (True, 6, 100, 25, 6, 1, False)
    assert layout.geometry_of(torch.empty(7, 3)) == (True, 3, 7, 1, 3, 1, False)
    assert layout.geometry_of(x[:, 1:3]) == (False, 2, 100, 25, 150, 25, False)
    assert layout.geometry_of(x[:, :, ::2]) is None
    assert layout.geometry_of(torch.empty(2**16, 1, device="meta").expand(2**16, 2**16)) is None
    big = torch.empty(2**8, 2**8, 2**8, 2**8, device="meta")
    assert layout.geometry_of(big).wide


def test_dense_strides_are_torchs():
    x = torch.empty(4, 6, 5, 3)
    for form in (torch.contiguous_format, torch.channels_last):
        y = x.contiguous(memory_format=form)
        assert layout.dense_strides(layout.geometry_of(y), tuple(y.shape)) == y.stride()


@given(width=st.integers(2, 2**20), n=st.integers(0, 2**31 - 1))
def test_division_by_multiplication(width, n):
    g = layout.Geometry(False, 1, width, width, width, width, False)
    p = schedule.make(g, 16, "stream", 64, 0, 1, 0, 4)  # 16-byte items, so each access is one item
    *_, units, magic, shift = cached_pass.numbers(g, p)
    assert units == width
    assert ((n * (magic % 2**32)) >> 32) >> shift == n // width


@given(
    rows=st.integers(2, 2**22),
    channels=st.integers(1, 4096),
    nhwc=st.booleans(),
    itemsize=st.sampled_from([2, 4]),
    backward=st.booleans(),
)
def test_every_plan_covers_its_tensor(rows, channels, nhwc, itemsize, backward):
    g = layout.Geometry(nhwc, channels, rows, rows, channels if nhwc else channels * rows, 1 if nhwc else rows, False)
    p = schedule.choose(g, itemsize, backward, False, 132)
    units = rows if nhwc else rows // p.V
    assert (p.parts - 1) * p.share < units <= p.parts * p.share  # no part is empty
    assert p.slices * (p.V if nhwc else 1) >= channels
    assert p.share % 8 == 0
    assert p.path != "once" or p.share <= p.T * p.R
    # Programs that wait for each other must all run at once: with 128 registers per thread, 16 warps fit on each of the
    # 132 processors. A plan may use at most half of these, so that a second launch can run at the same time.
    assert p.path != "once" or p.alone or p.parts <= 132 * 16 // p.warps // 2
