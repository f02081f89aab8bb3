"""Thresholds of the garbage collector are as they were behind `seldom`, whatever happens inside."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from autopar.garbage import THRESHOLDS, seldom


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_nested_and_failing() -> None:
    gc.set_threshold(700, 10, 10)
    with pytest.raises(ValueError, match="inside"), seldom():
        assert gc.get_threshold() == THRESHOLDS
        with seldom():
            assert gc.get_threshold() == THRESHOLDS
        assert gc.get_threshold() == THRESHOLDS
        raise ValueError("inside")
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("own", [(0, 10, 10), (2 * THRESHOLDS[0], 10, 10)])
def test_who_collects_less_still_does(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with seldom():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own
