"""Numbers that say how good predictions are."""

from __future__ import annotations

import math
from collections.abc import Sequence


def relative_error(predicted: float, measured: float) -> float:
    """(predicted - measured) / measured. Raises ValueError unless `measured` is positive."""
    if not measured > 0:
        raise ValueError(f"measured is {measured}; wanted a positive number")
    return predicted / measured - 1.0


def kendall(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Kendall's tau-b: pairs in the same order less pairs in the other, ties on either side taken out of the count.

    NaN where one side is constant: there is no order to compare.
    """
    if len(predicted) != len(measured):
        raise ValueError(f"{len(predicted)} predictions for {len(measured)} measurements")
    agree = here = there = 0
    for i in range(len(predicted)):
        for j in range(i):
            a, b = predicted[i] - predicted[j], measured[i] - measured[j]
            here += a != 0
            there += b != 0
            agree += (a * b > 0) - (a * b < 0)
    return agree / math.sqrt(here * there) if here and there else math.nan


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """How much longer the configuration takes that is predicted to be the fastest than the one that is: 0.02 is 2 %."""
    if not predicted or len(predicted) != len(measured):
        raise ValueError(f"{len(predicted)} predictions for {len(measured)} measurements")
    first = min(range(len(predicted)), key=predicted.__getitem__)
    return measured[first] / min(measured) - 1.0


def mean(numbers: Sequence[float]) -> float:
    """The mean of all that are not NaN; NaN of none."""
    known = [number for number in numbers if not math.isnan(number)]
    return sum(known) / len(known) if known else math.nan
