"""Cuts against all cuts there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.pipeline.balance import Cost, balance, memory_bytes

PIECES = st.lists(st.builds(Cost, st.integers(1, 9).map(float), st.just(0.0), st.integers(0, 5).map(float), st.integers(0, 9).map(float),
                            st.integers(0, 3).map(float)), min_size=3, max_size=8)


def _slowest(costs: list[Cost], bounds: list[int]) -> float:
    cuts = [0, *bounds, len(costs)]
    return max(sum(c.micro_s for c in costs[a:b]) for a, b in itertools.pairwise(cuts))


@given(PIECES, st.integers(2, 3), st.integers(10, 60))
def test_the_slowest_stage_is_as_fast_as_any_cut_allows(costs: list[Cost], stages: int, limit: int) -> None:
    flying = list(range(stages, 0, -1))

    def fits(bounds: tuple[int, ...]) -> bool:
        cuts = [0, *bounds, len(costs)]
        return all(memory_bytes(costs[a:b], n) <= limit for (a, b), n in zip(itertools.pairwise(cuts), flying, strict=True))

    every = [bounds for bounds in itertools.combinations(range(1, len(costs)), stages - 1) if fits(bounds)]
    if not every:
        with pytest.raises(InfeasibleError, match="no cut into"):
            balance(costs, flying, float(limit))
        return
    found = balance(costs, flying, float(limit))
    assert fits(tuple(found))
    assert _slowest(costs, found) == min(_slowest(costs, list(bounds)) for bounds in every)
