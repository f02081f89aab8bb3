"""The descent along corners of seconds against bytes finds the fastest, and prices few of them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.problem.frontier_descent import ALIKE, descend
from autopar.problem.remat_frontier import Point


def priced(steps_s: list[float]) -> dict[int, float]:
    """The corners that are priced, in order, by number, where each takes so many seconds; of those between two the one
    in the middle comes first."""
    corners = [Point(float(-number), float(number), (str(number),)) for number in range(len(steps_s))]
    seen: dict[int, float] = {}

    def amid(more: Point, less: Point) -> Point | None:
        assert more.nbytes < less.nbytes
        between = corners[int(more.nbytes) + 1 : int(less.nbytes)]
        return between[len(between) // 2] if between else None

    def step_s(corner: Point) -> float:
        number = int(corner.nbytes)
        assert number not in seen, "priced twice"
        seen[number] = steps_s[number]
        return steps_s[number]

    descend(list(dict.fromkeys((corners[0], corners[-1]))), amid, step_s)
    return seen


@st.composite
def valleys(draw: st.DrawFn) -> list[float]:
    """Seconds that fall up to some corner and rise behind it, up to where nothing fits."""
    down, up = (draw(st.lists(st.floats(0.1, 1.0), max_size=20)) for _ in range(2))
    step_s, steps_s = 1.0, [1.0]
    for less in down:
        steps_s.insert(0, step_s := step_s + less)
    step_s = 1.0
    for more in up:
        steps_s.append(step_s := step_s + more)
    return steps_s + [math.inf] * draw(st.integers(0, 10))


@given(valleys())
def test_the_fastest_of_a_valley_is_found(steps_s: list[float]) -> None:
    assert min(priced(steps_s).values()) <= 1.0 * (1 + ALIKE)


@given(st.lists(st.floats(1.0, 2.0), min_size=1, max_size=40))
def test_what_is_found_is_no_slower_than_its_neighbours(steps_s: list[float]) -> None:
    seen = priced(steps_s)
    least_s = min(seen.values())
    fastest = [number for number, step_s in seen.items() if step_s == least_s]
    alike = max(seen.values()) <= least_s * (1 + ALIKE)
    assert alike or any(min(steps_s[max(0, number - 1) : number + 2]) == least_s for number in fastest)


@pytest.mark.parametrize(
    ("steps_s", "many"),
    [
        ([abs(number - 70) + 100.0 for number in range(128)], 16),  # no more than two for each halving
        ([1.0 + 1e-6 * number for number in range(128)], 5),  # all alike
        ([1.0] + 127 * [math.inf], 9),
        ([math.inf] * 9, 2),  # where the fewest bytes do not fit, nothing does
        ([1.0], 1),
    ],
)
def test_few_are_priced(steps_s: list[float], many: int) -> None:
    assert len(priced(steps_s)) <= many
