"""Errors, rank correlation and regret against definitions."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.costmodel.metrics import kendall, mean, regret, relative_error

numbers = st.lists(st.integers(1, 30), min_size=2, max_size=8)


@given(numbers, st.randoms(use_true_random=False))
def test_kendall_counts_pairs(values: list[int], random: object) -> None:
    other = sorted(values, key=lambda _: random.random())  # type: ignore[attr-defined]
    pairs = list(itertools.combinations(range(len(values)), 2))
    signs = [
        ((values[i] > values[j]) - (values[i] < values[j]), (other[i] > other[j]) - (other[i] < other[j]))
        for i, j in pairs
    ]
    here, there = sum(a != 0 for a, _ in signs), sum(b != 0 for _, b in signs)
    got = kendall(values, other)
    if not here or not there:
        assert math.isnan(got)
    else:
        assert got == pytest.approx(sum(a * b for a, b in signs) / math.sqrt(here * there))


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=8, unique=True))
def test_the_same_order_is_one_and_the_reverse_minus_one(values: list[int]) -> None:
    assert kendall(values, [v**3 for v in values]) == pytest.approx(1.0)
    assert kendall(values, [-v for v in values]) == pytest.approx(-1.0)


@given(numbers, numbers)
def test_regret_is_never_negative_and_zero_for_the_truth(values: list[int], guesses: list[int]) -> None:
    guesses = (guesses * len(values))[: len(values)]
    assert regret(guesses, values) >= 0
    assert regret(values, values) == 0


def test_regret_is_what_the_first_choice_costs() -> None:
    assert regret([1.0, 2.0, 3.0], [11.0, 10.0, 30.0]) == pytest.approx(0.1)


def test_errors_are_relative_to_the_measurement() -> None:
    assert relative_error(0.9, 1.0) == pytest.approx(-0.1)
    for measured in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="wanted a positive number"):
            relative_error(1.0, measured)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="1 predictions for 2 measurements"):
        kendall([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="0 predictions"):
        regret([], [])


def test_the_mean_leaves_out_what_is_not_known() -> None:
    assert mean([1.0, math.nan, 3.0]) == 2.0
    assert math.isnan(mean([math.nan]))
