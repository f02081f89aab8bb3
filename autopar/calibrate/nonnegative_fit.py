"""Fits of a few constants that cannot be negative, to times that are sometimes far off.

Relative errors count, as times differ by orders of magnitude; and their amounts more than their squares (iteratively
reweighted least squares), so that one sample that was disturbed does not bend the fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

ROUNDS = 12  # fits, each with samples weighted by the errors of the one before
LEAST = 1e-3  # relative errors below this weigh no more than it: the reweighting has no division by zero


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Coefficients >= 0 with rows x coefficients ~ seconds, of the least sum of relative errors found; and the mean of
    these errors.

    Of columns that nothing needs the coefficient is 0. Raises ValueError without a sample.
    """
    if not rows or len(rows) != len(seconds):
        raise ValueError(f"a fit of {len(rows)} rows to {len(seconds)} times; wanted as many, and at least one")
    matrix = np.array(rows, float) / np.array(seconds, float)[:, None]
    weights = np.ones(len(seconds))
    best, least = np.zeros(matrix.shape[1]), np.inf
    for _ in range(ROUNDS):
        found = _nonnegative(matrix * np.sqrt(weights)[:, None], np.sqrt(weights))
        errors = np.abs(matrix @ found - 1)
        if errors.sum() < least:
            best, least = found, float(errors.sum())
        weights = 1 / np.maximum(errors, LEAST)
    return [float(each) for each in best], least / len(seconds)


def _nonnegative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The least squares with coefficients >= 0: the best over all subsets of the few columns whose plain solution is
    positive. Where that of all columns is, it is the best."""
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(target @ target)
    for count in range(columns, 0, -1):
        if count < columns and (best > 0).all():
            break
        for chosen in map(list, itertools.combinations(range(columns), count)):
            part = matrix[:, chosen]
            # columns may differ by many orders of magnitude
            scale = np.maximum(np.linalg.norm(part, axis=0), np.finfo(float).tiny)
            solved = np.linalg.lstsq(part / scale, target)[0] / scale
            rest = float(np.square(part @ solved - target).sum())
            if (solved > 0).all() and rest < least * (1 - 1e-9):
                best, least = np.zeros(columns), rest
                best[chosen] = solved
    return best
