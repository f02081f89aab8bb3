"""Numbers as people read them."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.text import gibibytes, megabytes, numbered, seconds, times


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "-"),
        (12.3, "12.3 s"),
        (0.0123, "12.3 ms"),
        (1e-6, "1 us"),
        (0.9999, "1 s"),
        (2e-9, "2 ns"),
        (1234.0, "1234 s"),
        (0.99951, "1 s"),
        (0.9994, "999 ms"),
        (-1e-16, "-"),
        (1e-16, "-"),
        (-0.0123, "-12.3 ms"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert seconds(value) == text


@given(st.floats(1e-9, 1e5))
def test_seconds_are_right_to_three_digits(value: float) -> None:
    number, unit = seconds(value).split()
    assert float(number) * {"s": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit] == pytest.approx(value, rel=6e-3)
    assert re.fullmatch(r"[\d.]+", number)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.0, "0 B"),
        (1023.0, "1023 B"),
        (1536.0, "1.5 KiB"),
        (3 * 2**20, "3 MiB"),
        (61.25 * 2**30, "61.2 GiB"),
        (500 * 2**30, "500 GiB"),
    ],
)
def test_bytes(value: float | None, text: str) -> None:
    assert gibibytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4.0, "4 B"),
        (3072.0, "3.07 kB"),
        (999_700.0, "1 MB"),
        (999_400.0, "999 kB"),
        (33.55e6, "33.5 MB"),
        (3.36e9, "3.36 GB"),
        (123_456e6, "123 GB"),
    ],
)
def test_bytes_that_travel(value: float, text: str) -> None:
    assert megabytes(value) == text


def test_sizes() -> None:
    assert times((2, 4)) == "2x4" and times(()) == "1"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "stage 3"),
        ([0, 1], "stages 0, 1"),
        ([0, 2, 3, 4], "stages 0, 2 to 4"),
        (range(64), "stages 0 to 63"),
        ([1, 3], "stages 1, 3"),
    ],
)
def test_numbered(numbers: Sequence[int], text: str) -> None:
    assert numbered("stage", numbers) == text
