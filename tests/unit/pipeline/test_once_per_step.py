"""Sums of gradients after every microbatch, in the buckets of one stage."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.cost.comm import collective_s
from autopar.pipeline.once_per_step import Sums, Update, each_s

FULL_BYTES = 25e6
AXIS = Cluster.parse("h100:1x4").mesh((4,)).axes[0]


def _sums(*each_bytes: float) -> tuple[Sums, ...]:
    return (Sums("all together", each_bytes, FULL_BYTES, (("reduce_scatter", AXIS, 1.0),)),)


def _takes_s(nbytes: float) -> float:
    return collective_s("reduce_scatter", nbytes, AXIS)


def test_nothing_hides_of_less_than_one_bucket() -> None:
    stage = [(1.0, _sums(8e6)), (1.0, _sums(8e6)), (1.0, _sums())]
    assert each_s(stage, 0.1) == pytest.approx(_takes_s(16e6))


def test_a_full_bucket_hides_under_what_comes_behind_it() -> None:
    """But for its share of the compute units."""
    assert each_s([(1.0, _sums(20e6, 8e6)), (1.0, ())], 0.1) == pytest.approx(0.1 * _takes_s(28e6))
    assert each_s([(1.0, _sums(20e6, 8e6)), (1.0, _sums(2e6))], 0.1) == pytest.approx(
        0.1 * _takes_s(28e6) + _takes_s(2e6)
    )
    assert each_s([(1.0, _sums(20e6, 8e6)), (1.0, ())], 1.0) == pytest.approx(_takes_s(28e6))  # cores that do both


def test_a_scatter_over_a_second_axis_sends_what_the_first_left() -> None:
    """It was priced with all bytes of the bucket."""
    node, gpu = Cluster.parse("h100:2x4").mesh((2, 4)).axes
    both = Sums("both axes", (30e6,), FULL_BYTES, (("reduce_scatter", node, 1.0), ("reduce_scatter", gpu, 1.0)))
    wanted_s = collective_s("reduce_scatter", 30e6, node) + collective_s("reduce_scatter", 15e6, gpu)
    assert each_s([(1.0, (both,))], 0.1) == pytest.approx(wanted_s)


def test_gradients_come_when_their_share_of_the_bytes_is_done() -> None:
    """The larger of two comes first, after three quarters of the backward: half of its scatter is left in the end."""
    large_s, small_s = _takes_s(75e6), _takes_s(25e6)
    assert each_s([(2 * large_s, _sums(25e6, 75e6))], 0.0) == pytest.approx(0.5 * large_s + small_s)


pieces = st.lists(st.tuples(st.floats(0.0, 1e-3), st.lists(st.floats(1e3, 4e7), max_size=4)), min_size=1, max_size=6)


@given(pieces, st.floats(0.0, 1.0))
def test_no_less_shows_than_the_last_bucket_and_no_more_than_all(
    stage: list[tuple[float, list[float]]], contention: float
) -> None:
    buckets, filling = [], 0.0
    for _, each_bytes in stage:
        for nbytes in reversed(each_bytes):
            filling += nbytes
            if filling >= FULL_BYTES:
                buckets.append(filling)
                filling = 0.0
    buckets += [filling] if filling else []
    all_s, last_s = sum(map(_takes_s, buckets)), _takes_s(filling) if filling else 0.0
    found_s = each_s([(seconds, _sums(*each_bytes)) for seconds, each_bytes in stage], contention)
    assert contention * all_s * (1 - 1e-9) <= found_s <= all_s * (1 + 1e-9)
    assert found_s >= last_s * (1 - 1e-9)


def test_a_weight_that_a_place_has_once_is_stepped_once() -> None:
    update = Update({"embedding": None, "head": None}, 3.0)
    assert update.too_many_s(["embedding", "layers", "layers", "head"]) == 3.0
    assert update.too_many_s(["layers", "head"]) == 0.0
