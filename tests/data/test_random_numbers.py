"""Test that a seed and a position give the same random numbers in all versions, and that these are random enough."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchnorm.data.random_numbers import permutation, seed_at, uniforms


def test_values_never_change():
    # A run may be resumed with a later version of this library or of numpy.
    assert seed_at(0) == 0
    assert seed_at(0, 3, 17) == 5379786626821505065
    assert permutation(5, 8).tolist() == [0, 5, 4, 7, 1, 3, 2, 6]
    np.testing.assert_array_equal(uniforms(7, np.array([2]), 2)[0], [0.3955044117146872, 0.8407837977734168])


@given(st.integers(0, 2**62), st.integers(0, 300))
def test_permutation_has_each_once(key, n):
    assert sorted(permutation(key, n)) == list(range(n))


def test_permutations_of_neighboring_keys_are_unrelated():
    orders = np.array([permutation(seed_at(0, epoch), 1000) for epoch in range(20)])
    correlation = np.corrcoef(orders) - np.eye(20)
    # Each of the 190 correlations has a standard deviation of 1/sqrt(1000); 0.12 is 3.8 times that.
    assert np.abs(correlation).max() < 0.12


def test_uniforms_are_uniform_and_independent():
    u = uniforms(seed_at(1, 2), np.arange(20_000), 4)
    assert u.min() >= 0
    assert u.max() < 1
    np.testing.assert_allclose(u.mean(0), 0.5, atol=0.01)
    np.testing.assert_allclose(u.var(0), 1 / 12, atol=0.003)
    np.testing.assert_allclose(np.corrcoef(u.T), np.eye(4), atol=0.03)
    np.testing.assert_allclose(np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1], 0, atol=0.03)


def test_uniforms_of_an_example_do_not_depend_on_its_batch():
    together = uniforms(3, np.arange(10), 5)
    np.testing.assert_array_equal(together[4:6], uniforms(3, np.array([4, 5]), 5))
