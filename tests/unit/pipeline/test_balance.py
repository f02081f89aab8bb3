"""Cuts against all cuts there are."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.pipeline.balance import Cost, balance, memory_bytes

PIECES = st.lists(st.builds(Cost, st.integers(1, 9).map(float), st.just(0.0), st.integers(0, 5).map(float), st.integers(0, 9).map(float),
                            st.integers(0, 3).map(float)), min_size=3, max_size=8)


RERUN = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)), min_size=8, max_size=8)
"""Of each piece, where it is run again: seconds more, bytes kept less, bytes that are there meanwhile."""


SENDS = st.lists(st.sampled_from([0.0, 0.5, 3.0, 20.0]), min_size=8, max_size=8)
"""Seconds of a cut in front of each piece."""


@given(PIECES, RERUN, SENDS, st.integers(2, 3), st.integers(6, 60))
def test_the_slowest_stage_is_as_fast_as_any_cut_allows(costs: list[Cost], more: list[tuple[int, int, int]], sends: list[float], stages: int,
                                                        limit: int) -> None:
    """Of all cuts, each with as few pieces run again as memory wants, from the first on; links are as slow as a stage that takes as long,
    but for the cuts that send least."""
    sends = sends[:len(costs)]
    least = min(sends[1:])
    flying = list(range(stages, 0, -1))
    again = [replace(c, micro_s=c.micro_s + s, kept_bytes=max(0.0, c.kept_bytes - k), live_bytes=c.live_bytes + n)
             for c, (s, k, n) in zip(costs, more, strict=False)]

    def best(bounds: tuple[int, ...]) -> float | None:
        slowest = 0.0
        for (a, b), n in zip(itertools.pairwise((0, *bounds, len(costs))), flying, strict=True):
            fits = [k for k in range(b - a + 1) if memory_bytes([*again[a:a + k], *costs[a + k:b]], n) <= limit]
            if not fits:
                return None
            slowest = max(slowest, sum(c.micro_s for c in (*again[a:a + fits[0]], *costs[a + fits[0]:b])))
        return max([slowest, *(2 * sends[at] for at in bounds if sends[at] > least)])

    every = [seconds for bounds in itertools.combinations(range(1, len(costs)), stages - 1) if (seconds := best(bounds)) is not None]
    if not every:
        with pytest.raises(InfeasibleError, match="no cut into"):
            balance(costs, flying, float(limit), again, sends)
        return
    found = balance(costs, flying, float(limit), again, sends)
    parts = found.parts(costs, again)
    assert all(memory_bytes(part, n) <= limit for part, n in zip(parts, flying, strict=True))
    assert max([*(sum(c.micro_s for c in part) for part in parts), *(2 * sends[at] for at in found.bounds if sends[at] > least)]) == pytest.approx(min(every))


def test_a_cut_that_sends_much_is_not_made_where_another_one_is_near() -> None:
    """The head of a language model, its logits and its loss are pieces of their own: between them a cut would balance best, and send most."""
    costs = [Cost(2.0), Cost(2.0), Cost(3.0), Cost(1.0)]
    assert balance(costs, [2, 1], 100.0).bounds == [2]
    assert balance(costs, [3, 2, 1], 100.0, sends_s=[0.0, 0.1, 0.1, 5.0]).bounds == [1, 2]
    assert balance(costs, [3, 2, 1], 100.0, sends_s=[5.0, 5.0, 5.0, 5.0]).bounds == balance(costs, [3, 2, 1], 100.0).bounds
