"""Fits: constants are found again from times with noise, and one wild sample does not bend them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.calibrate.nonnegative_fit import fit

SIZES = [1 << power for power in range(10, 26, 2)]
noise = st.lists(st.floats(-0.03, 0.03), min_size=len(SIZES), max_size=len(SIZES))


@given(st.floats(1e-6, 1e-2), st.floats(1e8, 1e11), noise)
def test_start_and_rate_are_found_again(start: float, rate: float, off: list[float]) -> None:
    seconds = [(start + size / rate) * (1 + each) for size, each in zip(SIZES, off, strict=True)]
    (found, slope), error = fit([(1.0, size) for size in SIZES], seconds)
    for size in SIZES:
        assert found + slope * size == pytest.approx(start + size / rate, rel=0.08)
    assert error <= 0.06


@given(st.integers(0, len(SIZES) - 1), st.floats(3.0, 30.0))
def test_one_disturbed_sample_changes_nothing(which: int, times: float) -> None:
    seconds = [1e-4 + size / 2e9 for size in SIZES]
    seconds[which] *= times
    (start, slope), _ = fit([(1.0, size) for size in SIZES], seconds)
    assert start == pytest.approx(1e-4, rel=0.01) and slope == pytest.approx(1 / 2e9, rel=0.01)


@given(st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=9))
def test_no_coefficient_is_negative(seconds: list[float]) -> None:
    rows = [(1.0, float(i), float(i * i)) for i in range(len(seconds))]
    assert min(fit(rows, seconds)[0]) >= 0


def test_nothing_to_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        fit([], [])
