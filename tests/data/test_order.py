"""Test that an epoch has each example once, on any number of ranks, and that no rank trains on a single example."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchnorm.data import Order

SHARDS = st.lists(st.integers(0, 12), min_size=1, max_size=5).map(tuple).filter(sum)


def orders(shards, batch_size, world_size, **options):
    try:
        return [Order(shards, batch_size, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
    except ValueError:
        assume(False)


def step(order, epoch, k):
    return order.batch(order.examples(epoch), k)


@given(SHARDS, st.integers(1, 16), st.integers(1, 4), st.booleans(), st.sampled_from(["fixed", "epoch"]))
def test_ranks_together_see_each_example_once(shards, batch_size, world_size, train, shuffle):
    ranks = orders(shards, batch_size, world_size, train=train, shuffle=shuffle, seed=3)
    assert len({len(order) for order in ranks}) == 1
    seen = [step(order, 2, k) for order in ranks for k in range(len(order))]
    assert sorted(np.concatenate(seen)) == list(range(sum(shards)))


@given(SHARDS, st.integers(1, 16), st.integers(1, 4), st.booleans())
def test_a_step_holds_the_same_examples_on_any_number_of_ranks(shards, batch_size, world_size, train):
    ranks = orders(shards, batch_size, world_size, train=train, shuffle="epoch", seed=3)
    (one,) = orders(shards, batch_size, 1, train=train, shuffle="epoch", seed=3)
    for k in range(len(one)):
        parts = [step(order, 1, k) for order in ranks]
        whole = step(one, 1, k)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert ranks[0].step_size(k) == sum(map(len, parts)) <= batch_size
        np.testing.assert_array_equal(np.concatenate(parts), whole)


@given(st.integers(2, 200), st.integers(2, 40), st.integers(1, 4))
def test_no_rank_trains_on_fewer_than_two_examples(n, batch_size, world_size):
    ranks = orders((n,), batch_size, world_size, train=True, shuffle="epoch", seed=0)
    for order in ranks:
        sizes = [len(step(order, 0, k)) for k in range(len(order))]
        assert min(sizes) >= 2
        # Only the last two steps may have smaller batches; the others are full, so their batches have one shape.
        assert {order.step_size(k) for k in range(len(order) - 2)} <= {batch_size}


@given(st.integers(1, 4), st.data())
def test_four_examples_a_rank_always_fit(world_size, data):
    batch_size = data.draw(st.integers(4 * world_size, 64))
    n = data.draw(st.integers(batch_size, 300))
    Order((n,), batch_size, train=True, shuffle="epoch", seed=0, world_size=world_size)


@pytest.mark.parametrize(
    ("n", "batch_size", "world_size"),
    [(1, 8, 1), (9, 1, 1), (3, 2, 1), (100, 3, 2), (0, 8, 1)],
    ids=["one example", "batches of one", "one left over", "one for a rank", "nothing"],
)
def test_impossible_layouts_say_what_to_do(n, batch_size, world_size):
    with pytest.raises(ValueError, match=f"and a batch size of {4 * world_size} or more"):
        Order((n,), batch_size, train=True, shuffle="epoch", seed=0, world_size=world_size)


def test_evaluation_keeps_the_stored_order_and_the_tail():
    order = Order((5, 4), 4, train=False, shuffle="epoch", seed=0)
    assert [step(order, 7, k).tolist() for k in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    last = Order((5, 4), 4, train=False, shuffle="epoch", seed=0, rank=1, world_size=2)
    assert len(step(last, 0, 2)) == 0


def test_fixed_order_lets_the_same_examples_meet_and_a_new_one_does_not():
    """Sec. 4.2.1: shuffling "prevents the same examples from always appearing in a mini-batch together"."""
    fixed, new = (Order((64, 64), 8, train=True, shuffle=s, seed=0) for s in ("fixed", "epoch"))
    np.testing.assert_array_equal(fixed.examples(0), fixed.examples(5))
    assert not np.array_equal(fixed.examples(0), np.arange(128))
    meetings = [{frozenset(step(order, e, 0)) for e in range(6)} for order in (fixed, new)]
    assert [len(m) for m in meetings] == [1, 6]


@given(SHARDS, st.sampled_from(["fixed", "epoch"]), st.integers(0, 3))
def test_examples_are_permuted_within_shards(shards, shuffle, epoch):
    assume(sum(shards) >= 4)
    order = Order(shards, 4, train=True, shuffle=shuffle, seed=1)
    shard_of = np.repeat(np.arange(len(shards)), shards)[order.examples(epoch)]
    assert np.count_nonzero(np.diff(shard_of)) == sum(map(bool, shards)) - 1


def test_shards_come_in_a_new_order_each_epoch():
    order = Order((1,) * 50, 4, train=True, shuffle="epoch", seed=0)
    assert not np.array_equal(order.examples(0), order.examples(1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2: must be from 0 to 1"),
        ({"shuffle": "never"}, "choose 'fixed' or 'epoch'"),
        ({"batch_size": 0}, "at least one example"),
    ],
)
def test_wrong_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Order(**{"shard_sizes": (9,), "batch_size": 4, "train": True, "shuffle": "epoch", "seed": 0, **options})


def test_steps_outside_of_the_epoch_are_refused():
    with pytest.raises(IndexError, match="step 3 is out of range: an epoch has 3 steps"):
        Order((9,), 4, train=False, shuffle="epoch", seed=0).step_size(3)
