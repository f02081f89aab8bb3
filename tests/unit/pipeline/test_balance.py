"""Cuts against all cuts there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.pipeline.balance import balance
from autopar.pipeline.orders import Flying
from autopar.pipeline.stretches import Cost, Pieces, memory_bytes
from tests.helpers.examples import examples

PIECES = st.lists(
    st.builds(
        Cost,
        st.integers(1, 9).map(float),
        st.just(0.0),
        st.integers(0, 5).map(float),
        st.integers(0, 2).map(float),
        st.integers(0, 9).map(float),
        st.integers(0, 3).map(float),
    ),
    min_size=3,
    max_size=8,
)


RERUN = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)), min_size=8, max_size=8)
"""Of each piece, where it is run again: seconds more, bytes kept less, bytes that are there meanwhile."""


SENDS = st.lists(st.sampled_from([0.0, 0.5, 3.0, 20.0]), min_size=8, max_size=8)
"""Seconds of a cut in front of each piece."""


BARRED = st.frozensets(st.integers(1, 7), max_size=4)
"""Pieces that no stage may begin with."""


def _keep(*counts: int) -> list[Flying]:
    """So many microbatches for each stage, half of them halfway through their backward."""
    return [Flying(n, n // 2) for n in counts]


def _links_s(bounds: Sequence[int], sends: Sequence[float], barred: Collection[int]) -> list[float]:
    """Seconds of the links of some cuts, but for the cuts that send least."""
    return [
        2 * sends[at]
        for at in bounds
        if sends[at] > min(s for place, s in enumerate(sends) if place and place not in barred)
    ]


def _best(
    kinds: Sequence[Pieces],
    flying: Sequence[Flying],
    limits: Sequence[float],
    sends: Sequence[float],
    barred: Collection[int],
    needed: Collection[int] = (),
) -> float | None:
    """Of all cuts that give each stage a piece of `needed`, or of all where none does, each with as few pieces run
    again as memory wants, from the first on, the least time of the slowest stage or link; None where none fits."""
    every, count = [], len(kinds[0].costs)
    cuts = [*itertools.combinations([place for place in range(1, count) if place not in barred], len(kinds) - 1)]
    for bounds in [cut for cut in cuts if _has(cut, count, needed)] or cuts:
        slowest: list[float] = []
        for here, (a, b), n, limit in zip(kinds, itertools.pairwise((0, *bounds, count)), flying, limits, strict=True):
            fits = [
                k
                for k in range(b - a + 1)
                if memory_bytes(([*here.again[a : a + k], *here.costs[a + k : b]], n)) <= limit
            ]
            slowest += (
                [sum(c.micro_s for c in (*here.again[a : a + fits[0]], *here.costs[a + fits[0] : b]))] if fits else []
            )
        every += [max(*slowest, *_links_s(bounds, sends, barred))] if len(slowest) == len(kinds) else []
    return min(every, default=None)


def _has(bounds: Sequence[int], count: int, needed: Collection[int]) -> bool:
    """Whether each stage between `bounds` has a piece of `needed`."""
    return all(any(a <= piece < b for piece in needed) for a, b in itertools.pairwise((0, *bounds, count)))


def _check(
    kinds: Sequence[Pieces],
    flying: Sequence[Flying],
    limits: Sequence[float],
    sends: Sequence[float],
    barred: Collection[int] = (),
    needed: Collection[int] = (),
) -> None:
    sends, (barred, needed) = (
        sends[: len(kinds[0].costs)],
        (sorted(piece for piece in some if piece < len(kinds[0].costs)) for some in (barred, needed)),
    )
    best = _best(kinds, flying, limits, sends, barred, needed)
    if best is None:
        with pytest.raises(InfeasibleError, match="no cut into"):
            balance(kinds, flying, limits, sends, barred, needed=needed)
        return
    found = balance(kinds, flying, limits, sends, barred, needed=needed)
    assert not set(found.bounds) & set(barred)
    parts = found.parts(kinds)
    assert all(memory_bytes((part, n)) <= limit for part, n, limit in zip(parts, flying, limits, strict=True))
    assert max(
        *(sum(c.micro_s for c in part) for part in parts), *_links_s(found.bounds, sends, barred)
    ) == pytest.approx(best)


def _with_rerun(costs: list[Cost], more: list[tuple[int, int, int]]) -> Pieces:
    return Pieces(
        costs,
        [
            replace(c, micro_s=c.micro_s + s, kept_bytes=max(0.0, c.kept_bytes - k), live_bytes=c.live_bytes + n)
            for c, (s, k, n) in zip(costs, more, strict=False)
        ],
    )


@given(PIECES, RERUN, SENDS, st.integers(2, 3), st.integers(6, 60), BARRED)
def test_the_slowest_stage_is_as_fast_as_any_cut_allows(
    costs: list[Cost],
    more: list[tuple[int, int, int]],
    sends: list[float],
    stages: int,
    limit: int,
    barred: frozenset[int],
) -> None:
    _check([_with_rerun(costs, more)] * stages, _keep(*range(stages, 0, -1)), [float(limit)] * stages, sends, barred)


@given(PIECES, st.lists(st.integers(-1, 1), min_size=8, max_size=8), st.integers(1, 3))
def test_nothing_is_run_again_where_memory_is_not_limited_though_it_may_be_faster(
    costs: list[Cost], more: list[int], stages: int
) -> None:
    """Where other work hides more of what a piece sends."""
    pieces = _with_rerun(costs, [(seconds, 1, 0) for seconds in more])
    cuts = balance([pieces] * stages, _keep(*range(stages, 0, -1)), [math.inf] * stages)
    assert cuts.again == [0] * stages
    ranges = itertools.combinations(range(1, len(costs)), stages - 1)
    least = min(
        max(sum(c.micro_s for c in costs[a:b]) for a, b in itertools.pairwise((0, *bounds, len(costs))))
        for bounds in ranges
    )
    taken = max(sum(c.micro_s for c in costs[a:b]) for a, b in itertools.pairwise((0, *cuts.bounds, len(costs))))
    assert taken == pytest.approx(least, rel=1e-2)


@examples(300)
@given(
    PIECES,
    SENDS,
    st.lists(st.tuples(st.integers(1, 9), st.integers(6, 60)), min_size=2, max_size=4),
    BARRED,
    st.frozensets(st.integers(0, 7), min_size=1, max_size=5),
)
def test_each_stage_has_a_piece_with_parameters_where_it_can(
    costs: list[Cost], sends: list[float], places: list[tuple[int, int]], barred: frozenset[int], needed: frozenset[int]
) -> None:
    """On places of several speeds and memories."""
    places = places[: len(costs)]
    kinds = [
        Pieces(own, own) for own in ([replace(c, micro_s=c.micro_s * slower) for c in costs] for slower, _ in places)
    ]
    _check(kinds, _keep(*range(len(places), 0, -1)), [float(limit) for _, limit in places], sends, barred, needed)


@examples(300)
@given(
    PIECES,
    RERUN,
    SENDS,
    st.lists(st.integers(1, 12), min_size=8, max_size=8),
    st.lists(st.tuples(st.booleans(), st.integers(6, 60)), min_size=2, max_size=4),
)
def test_two_kinds_of_places(
    costs: list[Cost],
    more: list[tuple[int, int, int]],
    sends: list[float],
    others: list[int],
    places: list[tuple[bool, int]],
) -> None:
    """Each piece has another time on each kind, and each place its own memory."""
    places = places[: len(costs)]
    one = _with_rerun(costs, more)
    other = _with_rerun([replace(c, micro_s=float(s)) for c, s in zip(costs, others, strict=False)], more)
    _check(
        [other if kind else one for kind, _ in places],
        _keep(*range(len(places), 0, -1)),
        [float(limit) for _, limit in places],
        sends,
    )


def test_the_faster_place_takes_more() -> None:
    """Of 12 alike pieces, places of speeds 1 and 2 take 4 and 8; one with memory for 6 leaves the others to the slow
    one."""
    slow, fast = ([Cost(micro_s=seconds, rest_bytes=1.0)] * 12 for seconds in (2.0, 1.0))
    kinds = [Pieces(slow, slow), Pieces(fast, fast)]
    assert balance(kinds, _keep(2, 1), [100.0, 100.0]).bounds == [4]
    assert balance(kinds[::-1], _keep(2, 1), [100.0, 100.0]).bounds == [8]
    assert balance(kinds[::-1], _keep(2, 1), [6.0, 100.0]).bounds == [6]


def test_a_slow_place_is_given_a_piece_that_it_can_take() -> None:
    """The first place could take all before the long piece; then the slow one between would have to take that."""
    fast = [Cost(micro_s=s) for s in (1.0, 1.0, 1.0, 3.0, 1.0)]
    slow = [Cost(micro_s=10 * c.micro_s) for c in fast]
    found = balance([Pieces(fast, fast), Pieces(slow, slow), Pieces(fast, fast)], _keep(1, 1, 1), [9.0] * 3)
    assert found.bounds == [2, 3]


def test_a_cut_that_sends_much_is_not_made_where_another_one_is_near() -> None:
    """The head of a language model, its logits and its loss are pieces of their own: between them a cut would balance
    best, and send most."""
    costs = [Cost(2.0), Cost(2.0), Cost(3.0), Cost(1.0)]
    alike = [Pieces(costs, costs)] * 3
    assert balance(alike[:2], _keep(2, 1), [100.0] * 2).bounds == [2]
    assert balance(alike, _keep(3, 2, 1), [100.0] * 3, sends_s=[0.0, 0.1, 0.1, 5.0]).bounds == [1, 2]
    assert (
        balance(alike, _keep(3, 2, 1), [100.0] * 3, sends_s=[5.0, 5.0, 5.0, 5.0]).bounds
        == balance(alike, _keep(3, 2, 1), [100.0] * 3).bounds
    )


MIB = 2.0**20


@pytest.mark.parametrize(
    ("rests", "barred", "why", "missing"),
    [
        ([4, 4, 4, 4], [], r"they need about 8 MiB each, 6 MiB are there", 2),
        ([7, 1, 1, 1], [], r"what no cut takes apart needs 7 MiB of one place, 6 MiB are there", 1),
        ([1, 4, 4, 1], [2], r"what no cut takes apart needs 8 MiB of one place, 6 MiB are there", 2),
        (
            [4, 4, 4],
            [],
            r"even ones would need about 6 MiB each and 6 MiB are there, but no cut is even enough, with what none "
            r"takes apart of up to 4 MiB",
            0,
        ),
    ],
)
def test_what_is_short_is_said(rests: list[int], barred: list[int], why: str, missing: float) -> None:
    """Never that stages need less than there is and do not fit."""
    costs = [Cost(micro_s=1.0, rest_bytes=rest * MIB) for rest in rests]
    with pytest.raises(InfeasibleError, match=f"no cut into 2 stages fits: {why}") as failed:
        balance([Pieces(costs, costs)] * 2, _keep(2, 1), [6 * MIB] * 2, barred=barred)
    assert failed.value.missing_bytes == missing * MIB


@given(PIECES, RERUN, st.integers(2, 3), st.integers(6, 60), BARRED)
def test_what_is_missing_for_a_stretch_is_missing_for_any_cut(
    costs: list[Cost], more: list[tuple[int, int, int]], stages: int, limit: int, barred: frozenset[int]
) -> None:
    kinds, flying = [_with_rerun(costs, more)] * stages, _keep(*range(stages, 0, -1))
    with suppress(InfeasibleError):
        balance(
            kinds,
            flying,
            [float(limit)] * stages,
            barred=(among := sorted(piece for piece in barred if piece < len(costs))),
        )
        return
    with pytest.raises(InfeasibleError) as failed:
        balance(kinds, flying, [float(limit)] * stages, barred=among)
    if "no cut takes apart needs" in str(failed.value):
        with pytest.raises(InfeasibleError):
            balance(kinds, flying, [limit + 0.99 * (failed.value.missing_bytes or 0.0)] * stages, barred=among)
