"""Claims that several look at: whoever looks at what, and however often beyond what is enough, the same is proven."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.joint.claim_board import LONG, STEPS, Board, Part

LOOKS = 4
rises = st.lists(st.floats(0.0, 5.0), min_size=LOOKS, max_size=LOOKS)
claims = st.lists(st.tuples(st.floats(0.0, 10.0), rises), min_size=1, max_size=6)


def looked(board: Board, who: int, each: list[tuple[float, list[float]]], enough_s: float) -> bool:
    """One look, which proves so much more of a claim as it rises then."""
    taken = board.take(who, enough_s)
    if taken is None:
        return False
    index, part = taken
    board.tell(index, [part._replace(bound_s=part.bound_s + each[index][1][part.looks], looks=part.looks + 1)])
    return True


@given(claims, st.lists(st.sampled_from([8.0, 9.0, 11.0]), max_size=20))
def test_more_looks_than_are_enough_prove_the_same(each: list[tuple[float, list[float]]], before: list[float]) -> None:
    one, other = (Board([Part(floor_s, 0, 1, 0) for floor_s, _ in each], LOOKS) for _ in range(2))
    for who, beyond_s in enumerate(before):  # another process, that knows of slower plans alone
        looked(other, who % 2, each, beyond_s)
    for board in (one, other):
        while looked(board, 0, each, 8.0):
            pass
        assert not board.open(8.0)
    assert one.proven_s(8.0) == other.proven_s(8.0) >= min(floor_s for floor_s, _ in each)


def test_nobody_looks_at_what_another_one_looks_at_until_it_is_told_or_gone() -> None:
    board = Board([Part(1.0, 0, 3, 0), Part(2.0, 0, 1, 0)], LOOKS)
    assert not board.looked and board.take(0, 9.0) == (0, Part(1.0, 0, 3, 0))
    assert board.take(1, 9.0) == (1, Part(2.0, 0, 1, 0)) and board.take(1, 9.0) is None and board.open(9.0)
    board.tell(0, [Part(4.0, 0, 1, 3), Part(1.0, 1, 3, 0)])
    assert board.looked and board.take(1, 9.0) == (0, Part(1.0, 1, 3, 0))
    board.leave(0)
    assert board.take(0, 9.0) is None
    board.leave(1)
    assert board.take(0, 9.0) == (0, Part(1.0, 1, 3, 0))
    board.tell(0, [Part(5.0, 1, 2, 3), Part(3.0, 2, 3, 0)])
    assert board.proven_s(9.0) == 2.0 and board.proven_s(1.5) == 2.0 and not math.isfinite(board.settled_s)


def test_a_first_look_is_taken_once_at_whatever_claim_is_asked_for() -> None:
    board = Board([Part(1.0, 0, 3, 0), Part(2.0, 0, 2, 0)], LOOKS)
    assert board.first_s(1) is None and board.take_first(0, 1) == Part(2.0, 0, 2, 0)
    assert board.take_first(1, 1) is None and board.first_s(1) is None  # another one is at it
    board.tell(1, [Part(2.5, 0, 2, 1)])
    assert board.first_s(1) == 2.5 and board.take_first(1, 1) is None
    board.tell(1, [Part(4.0, 0, 2, 2)])
    assert board.first_s(1) == 2.5 and board.first_s(0) is None and board.take(1, 9.0) == (0, Part(1.0, 0, 3, 0))


def test_what_cannot_be_looked_at_closer_is_enough_for_the_others() -> None:
    board = Board([Part(1.0, 0, 1, LOOKS - 1), Part(1.5, 0, 1, 0)], LOOKS)
    index, part = board.take(0, 9.0) or pytest.fail("there is one")
    board.tell(index, [part._replace(bound_s=2.0, looks=LOOKS)])
    assert board.settled_s == 2.0 and board.open(9.0)
    index, part = board.take(0, 9.0) or pytest.fail("there is one")
    board.tell(index, [part._replace(bound_s=3.0, looks=1)])
    assert not board.open(9.0) and board.take(0, 9.0) is None and board.proven_s(9.0) == 2.0


def test_of_more_looks_than_are_kept_the_last_one_counts() -> None:
    board = Board([Part(0.0, 0, 1, 0)], 10 * STEPS)
    for number in range(2 * STEPS):
        board.tell(0, [Part(float(number), 0, 1, number)])
    assert board.proven_s(math.inf) == 2 * STEPS - 1 and board.proven_s(3.5) == 4.0


def test_who_is_gone_with_the_board_in_hand_does_not_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.joint.claim_board.GONE_S", 0.01)
    board = Board([Part(1.0, 0, 1, 0)], LOOKS)
    assert board._lock.acquire()
    assert board.open(2.0) and board.take(0, 2.0) == (0, Part(1.0, 0, 1, 0))


def test_long_looks_come_last() -> None:
    """By then a faster plan may be known, above which their bounds need not be exact."""
    board = Board([Part(1.0, 0, 1, LONG), Part(1.5, 0, 1, 0), Part(3.0, 0, 1, 0)], LONG + 1)
    taken = [board.take(0, 2.0) for _ in range(3)]
    assert [None if each is None else each[0] for each in taken] == [1, 0, None]
