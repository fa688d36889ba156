import torch
from hypothesis import given
from hypothesis import strategies as st

from batchnorm.ops import Moments, merge
from batchnorm.ops.moments import MomentAccumulator, batch_moments, merge_averages


def moments_of(x):
    m = batch_moments(x, [0])[0]
    return Moments(m.count, m.mean[0], m.var[0])


def stack(*parts):
    return Moments(*(torch.stack(p) for p in zip(*parts, strict=True)))


@given(st.lists(st.integers(0, 9), min_size=2, max_size=5), st.floats(-1e3, 1e3), st.integers(0, 2**31))
def test_merging_parts_gives_the_whole(sizes, mean, seed):
    x = torch.randn(sum(sizes), 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + mean
    got = merge(stack(*(moments_of(p) for p in x.split(sizes))))
    if sum(sizes) == 0:
        assert got.count == 0
        assert got.mean.isfinite().all()
        return
    torch.testing.assert_close(got.count.item(), float(sum(sizes)))
    torch.testing.assert_close(got.mean, x.mean(0))
    torch.testing.assert_close(got.var, x.var(0, correction=0), rtol=1e-9, atol=1e-9)


@given(st.integers(0, 2**31))
def test_merging_is_associative_and_commutative(seed):
    torch.manual_seed(seed)
    a, b, c = (moments_of(torch.randn(n, 3, dtype=torch.float64) * n) for n in (2, 5, 9))
    want = merge(stack(a, b, c))
    torch.testing.assert_close(merge(stack(merge(stack(a, b)), c)), want)
    torch.testing.assert_close(merge(stack(a, merge(stack(c, b)))), want)


def test_an_empty_part_may_hold_anything():
    a = moments_of(torch.tensor([[1.0], [3.0]]))
    empty = Moments(torch.tensor(0.0), torch.tensor([float("nan")]), torch.tensor([float("inf")]))
    torch.testing.assert_close(merge(stack(empty, a)), a)


def test_merging_keeps_digits_of_a_large_mean():
    x = torch.randn(64, 2) + 1e6
    got = merge(stack(*(moments_of(p) for p in x.split(16))))
    torch.testing.assert_close(got.var.double(), x.double().var(0, correction=0), rtol=0.1, atol=0)
    # The means are near 1e6, where float32 values are multiples of 1/16.
    assert (got.mean.double() - x.double().mean(0)).abs().max() <= 1 / 16


def test_merging_reads_no_values_on_the_host():
    parts = Moments(torch.tensor([2.0, 3.0]), torch.randn(2, 4), torch.rand(2, 4))
    compiled = torch.compile(merge, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(parts), merge(parts))


def test_unbiased_variance():
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(moments_of(x).unbiased_var, x.var(0))
    assert moments_of(x[:1]).unbiased_var.eq(0).all()


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.booleans(), st.integers(0, 2**31))
def test_averages_over_batches(sizes, unbiased, seed):
    batches = torch.randn(sum(sizes), 3, generator=torch.Generator().manual_seed(seed)).double().split(sizes)
    kept = [x for x in batches if len(x) > unbiased]
    halves = [MomentAccumulator(unbiased=unbiased) for _ in range(2)]
    for i, x in enumerate(x for x in batches if len(x) > unbiased or len(x) == 0):
        moments = moments_of(x)
        halves[i % 2].add(len(x), moments.mean, moments.unbiased_var if unbiased else moments.var)
    got = merge_averages(half.averages() for half in halves)
    if not kept:
        assert got is None
        return
    m = torch.tensor([float(len(x)) for x in kept]).double()[:, None]
    means, variances = torch.stack([x.mean(0) for x in kept]), torch.stack([x.var(0, correction=0) for x in kept])

    def average(v):
        return (m * v).sum(0) / m.sum()

    assert (got.batches, got.count) == (len(kept), sum(map(len, kept)))
    torch.testing.assert_close(got.mean, average(means))
    torch.testing.assert_close(got.var, average(variances))
    torch.testing.assert_close(got.mean_spread, average((means - average(means)).square()))
    torch.testing.assert_close(got.var_spread, average((variances - average(variances)).square()))
