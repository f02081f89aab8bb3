"""The largest size that fits, against trying them all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autopar.memory.largest import largest

# bytes per size, and beside it
PIECES = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 400)), min_size=1, max_size=4)


@given(PIECES, st.integers(0, 3000), st.integers(1, 7), st.integers(0, 300), st.integers(0, 2))
def test_it_is_the_last_that_fits(pieces: list[tuple[int, int]], limit: int, step: int, most: int, power: int) -> None:
    """Peaks are the highest of several lines; sometimes they grow with the square."""

    def peak(size: int) -> float:
        return max(slope * size * (size if power == 2 else 1) + rest for slope, rest in pieces)

    wanted = max((n for n in range(step, most + 1, step) if peak(n) <= limit), default=0)
    assert largest(peak, limit, step, most) == wanted


def test_few_sizes_are_tried_on_a_line() -> None:
    tried: list[int] = []

    def peak(size: int) -> float:
        tried.append(size)
        return 60e9 + 1.5e6 * size

    assert largest(peak, 80e9, 8, 1 << 22) == 13328
    assert len(tried) <= 8
    tried.clear()
    assert largest(peak, 80e12, 8, 1 << 22) == 1 << 22 == tried[-1], "where all fits, the largest is looked at first"
    assert len(tried) == 2
