"""When gathers over several axes go on, and what is there on the way: the runtime's timetable against the prediction of
memory."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from autopar.buckets import BUCKET_BYTES
from autopar.layout import crosses, legs, moving, steps
from autopar.memory.ahead import Unit, begin_ahead
from autopar.memory.storages import Book
from autopar.prefetching import LEAVES_AHEAD, ends
from autopar.runtime.leaves import due
from autopar.runtime.prefetch import timetable


@dataclass(frozen=True)
class Part:
    """A gather of a plan, with the bytes that each of its collectives brings."""

    unit: int
    brings: tuple[float, ...]

    @property
    def nbytes(self) -> float:
        """Those of the result."""
        return self.brings[-1]

    @property
    def legs(self) -> int:
        """Its collectives."""
        return len(self.brings)


def _plan(seed: int, units: int) -> list[Part]:
    """Units of one to four gathers over one to three axes of 2 to 8 ranks; small ones too."""
    draw = random.Random(seed)
    return [
        Part(unit, tuple(whole / n**k for k in reversed(range(draw.randint(1, 3)))))
        for unit in range(units)
        for whole in [draw.choice([1e3, 6e6, 2e7, 9e7]) for _ in range(draw.randint(1, 4))]
        for n in [draw.choice([2, 4, 8])]
    ]


def test_each_collective_has_a_unit_of_its_own() -> None:
    plan = [Part(unit, (1e6, 8e7)) for unit in range(5) for _ in range(2)]
    assert timetable(plan, BUCKET_BYTES) == {
        # all of the first unit, then of the next one, and the first collectives of the third
        0: (0, 1, 0, 1, 2, 3, 4, 5, 2, 3),
        2: (6, 7, 4, 5),
        4: (8, 9, 6, 7),
        6: (8, 9),
        8: (),
    }


@pytest.mark.parametrize("seed", range(30))
def test_what_a_unit_needs_is_behind_nothing_that_it_does_not_need(seed: int) -> None:
    """Collectives of one axis run in the order in which they begin: a table that is cut over two axes was behind the
    gathers of all blocks in the background."""
    plan = _plan(seed, 9)
    for at, begins in timetable(plan, BUCKET_BYTES).items():
        needed = [plan[number].unit == plan[at].unit for number in begins]
        assert needed == sorted(needed, reverse=True)


def test_a_pass_that_gathers_nothing_has_nothing_to_begin() -> None:
    assert timetable([], BUCKET_BYTES) == {}


def test_small_units_wait_for_the_first_collectives_of_the_next_one_alone() -> None:
    """Four units of 6 MB are on their way at a time, but second collectives, for which compute waits, have begun for
    one of them: those of all began with the first unit, behind the first collectives of all."""
    plan = [Part(unit, (1e6, 6e6)) for unit in range(12)]
    begins = timetable(plan, BUCKET_BYTES)
    assert begins[0] == (0, 0, 1, 2, 3, 4, 5, 1)
    assert all(begins[at] == (at + 5, at + 1) for at in range(1, 7)) and begins[7] == (8,) and begins[11] == ()


@pytest.mark.parametrize("seed", range(30))
def test_every_collective_begins_once_and_in_time(seed: int) -> None:
    plan = _plan(seed, 9)
    nbytes = [sum(part.nbytes for part in plan if part.unit == unit) for unit in range(9)]
    begins = timetable(plan, BUCKET_BYTES)
    begun, starts = [0] * len(plan), sorted(begins)
    for unit, at in enumerate(starts):
        for number in begins[at]:
            begun[number] += 1
        for n in range(at, len(plan)):
            early = plan[n].unit - unit - 1  # one collective is left for each unit that is still to come
            assert begun[n] >= plan[n].legs - max(0, early)
            assert begun[n] == sum(plan[n].unit < end for end in ends(nbytes, unit, plan[n].legs))
            if begun[n] > 1:  # of units behind those only what is small
                assert sum(nbytes[unit + plan[n].legs - begun[n] + 1 : plan[n].unit]) < 0.1 * BUCKET_BYTES
        ahead = [n for n in range(at, len(plan)) if plan[n].unit > unit and begun[n]]
        assert sum(nbytes[u] for u in {plan[n].unit for n in ahead}) >= min(BUCKET_BYTES, sum(nbytes[unit + 1 :]))
    assert begun == [part.legs for part in plan]


@pytest.mark.parametrize("seed", range(30))
def test_bytes_on_the_way_are_those_that_are_predicted(seed: int) -> None:
    """All units walked: what the runtime holds when a unit has begun, before it takes its first weight, is what is
    there in the prediction."""
    plan = _plan(seed, 9)
    book, units = Book(), []
    for unit in range(9):
        book.step(str(unit))
        units.append(Unit())
        for part in (part for part in plan if part.unit == unit):
            storage = book.new("gathered weights", "", "", part.nbytes)
            storage.takes = (0.0, *part.brings[:-1])
            units[-1].add(storage)
    begin_ahead(book, units)
    totals = book.totals()
    begun, begins = [0] * len(plan), timetable(plan, BUCKET_BYTES)
    for unit, at in enumerate(sorted(begins)):
        for number in begins[at]:
            begun[number] += 1
        held = sum(sum(part.brings[max(0, begun[n] - 2) : begun[n]]) for n, part in enumerate(plan) if n >= at)
        assert totals[unit + 1] == pytest.approx(held), unit


def test_one_rule_says_which_steps_are_in_the_background() -> None:
    sizes = (2, 1, 4)
    way = steps(("S0", "S0", "S1"), ("R", "R", "R"), sizes)
    *each, rest = legs(way, lambda step: crosses(step, sizes))
    assert [leg[-1].kind for leg in each] == ["all_gather"] * 2 and all(step.kind == "slice" for step in rest)
    assert tuple(leg[-1] for leg in each) == moving(way, sizes)
    assert [step for leg in (*each, rest) for step in leg] == list(way)


@pytest.mark.parametrize("seed", range(10))
def test_leaves_of_the_next_block_are_on_their_way(seed: int) -> None:
    """All collectives of its buckets, and of LEAVES_AHEAD at least; of those behind them one less for each block."""
    draw = random.Random(seed)
    sizes = [draw.randint(1, 4) for _ in range(5)]  # buckets of each block
    until = [sum(sizes[: block + 1]) for block, size in enumerate(sizes) for _ in range(size)]
    takes = [draw.randint(0, 3) for _ in until]
    begun = [0] * len(takes)
    for done in range(len(takes) + 1):
        for number in due(takes, until, begun, done):
            begun[number] += 1
        end = done
        for behind in range(3):
            begin, least = end, 1 if behind else LEAVES_AHEAD
            end = min(len(takes), max(begin + least, until[begin])) if begin < len(takes) else begin
            assert begun[begin:end] == [max(0, legs - behind) for legs in takes[begin:end]]
        assert not any(begun[end:])
    assert begun == takes and due(takes, until, begun, len(takes)) == []
