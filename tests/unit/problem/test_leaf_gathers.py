"""What of the leaves of a block is ahead: no buckets hold more than is said, whatever of its weights is gathered."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.buckets import BUCKET_BYTES
from autopar.prefetching import LEAVES_AHEAD
from autopar.problem.leaf_gathers import Leaves, first_bytes, share_ahead

sizes = st.sampled_from([0.0, 0.1, 0.3, 0.6, 0.9, 1.0, 1.2, 3.0, 5.0])
weights = st.lists(st.lists(sizes, min_size=1, max_size=4), min_size=1, max_size=7)


def held_bytes(chosen: list[float]) -> float:
    """What the first buckets hold, filled one after the other (runtime.leaves)."""
    buckets = [0.0]
    for nbytes in chosen:
        buckets[-1] += nbytes
        if buckets[-1] >= BUCKET_BYTES:
            buckets.append(0.0)
    return sum(buckets[:LEAVES_AHEAD])


@given(weights, st.data())
def test_the_first_buckets_hold_no_more(each: list[list[float]], data: st.DataObject) -> None:
    options = [np.array(one) * BUCKET_BYTES for one in each]
    most, less = first_bytes(options)
    chosen = [float(data.draw(st.sampled_from(list(one)))) for one in options]
    said = most - sum(part for part, nbytes in zip(less, chosen, strict=True) if nbytes >= BUCKET_BYTES)
    assert held_bytes(chosen) <= said * (1 + 1e-12) + 1e-6
    assert min(less) >= 0.0 and most <= sum(float(one.max()) for one in options) + LEAVES_AHEAD * BUCKET_BYTES


def said_s(leaves: Leaves, rows: list[int]) -> np.ndarray:
    """[BOUNDS] seconds that are late at least, by each bound, with one choice of each weight."""
    return sum(leaves.late_s(index)[:, row, 0, 0] for index, row in enumerate(rows)) - leaves.most_s[:, 0]


@given(weights, st.data())
def test_leaves_are_as_late_as_is_said_at_least(each: list[list[float]], data: st.DataObject) -> None:
    options = [np.array(one) * BUCKET_BYTES for one in each]
    seconds = [np.array([[[data.draw(st.floats(0.0, 3.0)) * (nbytes > 0)]] for nbytes in one]) for one in options]
    packs = [np.array([[data.draw(st.booleans())] for _ in one]) for one in options]
    leaves, rows = Leaves(options, seconds, packs, 4), [data.draw(st.integers(0, len(one) - 1)) for one in options]
    chosen = [float(one[row]) for one, row in zip(options, rows, strict=True)]
    all_s, whole = sum(own[row].item() for own, row in zip(seconds, rows, strict=True)), sum(chosen)
    late_s = all_s * (1 - leaves.share * held_bytes(chosen) / whole) if whole else 0.0
    assert said_s(leaves, rows).max() <= late_s + 1e-9


def test_of_weights_that_fill_the_first_buckets_it_is_said_exactly() -> None:
    """Projections that may be whole or cut, in front of large ones: whole ones are two buckets, cut ones are in buckets
    with the large ones."""
    options = [np.array(one) * BUCKET_BYTES for one in ([0.5, 1.3], [0.5, 1.3], [3.0], [3.0], [3.0])]
    seconds = [one[:, None, None] / BUCKET_BYTES for one in options]
    leaves = Leaves(options, seconds, [np.ones((len(one), 1), bool) for one in options], 10**9)
    assert first_bytes(options) == (
        pytest.approx(7 * BUCKET_BYTES),
        pytest.approx([2.2 * BUCKET_BYTES, 2.2 * BUCKET_BYTES, 0.0, 0.0, 0.0]),
    )
    assert said_s(leaves, [-1] * 5).max() == pytest.approx(9.0)


def test_of_large_weights_behind_others_that_are_not_gathered_it_is_said_exactly() -> None:
    """Of three large weights two are ahead. The bound of all ways to fill two buckets says less, as small ones may be
    in front of the first and of the second."""
    options = [np.array(one) * BUCKET_BYTES for one in ([0.0, 0.5, 1.3], [0.0, 0.5, 1.3], *[[0.5, 3.0]] * 3)]
    seconds = [one[:, None, None] / BUCKET_BYTES for one in options]
    leaves = Leaves(options, seconds, [np.ones((len(one), 1), bool) for one in options], 10**9)
    first, *behind = said_s(leaves, [0, 0, 1, 1, 1])
    assert first < 2.5 and max(behind) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("each", "count", "share"),
    [
        ([0.5, 0.6, 3.0, 3.0], math.inf, 4.1 / 7.1),  # a bucket of two weights, one of one, and what comes too late
        ([0.5, 0.6, 3.0, 3.0], 4, 4.1 / 7.1 * 3 / 4),  # nothing hides the leaves of the first block
        ([0.05, 0.05], 20, 15 / 20),  # nor those of so many small blocks as fill half a bucket
        ([0.05, 0.05], 4, 0.0),
        ([0.0, 0.0], 4, 1.0),  # nothing is gathered
    ],
)
def test_the_share_of_bytes_that_is_ahead_is_in_the_first_buckets(
    each: list[float], count: float, share: float
) -> None:
    assert LEAVES_AHEAD == 2
    assert share_ahead([nbytes * BUCKET_BYTES for nbytes in each], count) == pytest.approx(share)
