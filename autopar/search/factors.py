"""Min-marginals of one net whose readers share reshards, by numpy.

A net over the row r and the columns d_1..d_k of its readers costs the sum over *distinct* d of table[r, d]. With a
number per column for every reader (m_u, the messages) the minimum over all columns is a minimum over the set partitions
of the readers, where all readers of a part B ask for one column: sum_B min_d (table[r, d] + sum_{u in B} m_u[d]). Parts
that pick the same column are charged twice, which is never less than as one part. So one pass over 2^k - 1 tables is
exact, and no k-dimensional table is made. Called by search.messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np


def row_marginal(table: np.ndarray, messages: Sequence[np.ndarray]) -> np.ndarray:
    """[rows]: least over all columns of cost(r, columns) + sum_u messages[u][d_u]. `table` is [rows, columns]."""
    return _best(table, messages, tuple(range(len(messages))))


def column_marginal(table: np.ndarray, messages: Sequence[np.ndarray], use: int, rows: np.ndarray) -> np.ndarray:
    """[columns]: the same with `rows[r]` added, least over rows and the columns of all readers but `use`."""
    others = tuple([u for u in range(len(messages)) if u != use])
    least = None
    for together, alone in _parts(others):
        by_row = rows + _best(table, messages, alone) if alone else rows
        value = np.minimum.reduce(table + by_row[:, None], 0) + _sum(messages, use, together)
        least = value if least is None else np.minimum(least, value, out=least)
    return np.asarray(least)


def _best(table: np.ndarray, messages: Sequence[np.ndarray], uses: tuple[int, ...]) -> np.ndarray:
    """[rows]: least over the set partitions of `uses`, by the part that holds the first of them."""
    least = None
    for together, alone in _parts(uses[1:]):
        value = np.minimum.reduce(table + _sum(messages, uses[0], together), 1)
        if alone:
            value += _best(table, messages, alone)
        least = value if least is None else np.minimum(least, value, out=least)
    return np.asarray(least)


def _sum(messages: Sequence[np.ndarray], first: int, others: tuple[int, ...]) -> np.ndarray:
    """[columns]: the messages of a part."""
    total = messages[first]
    for other in others:
        total = total + messages[other]
    return total


@cache
def _parts(uses: tuple[int, ...]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All ways to take some of `uses` into a part, and to leave the others out of it."""
    return [
        (
            tuple(u for i, u in enumerate(uses) if mask >> i & 1),
            tuple(u for i, u in enumerate(uses) if not mask >> i & 1),
        )
        for mask in range(1 << len(uses))
    ]
