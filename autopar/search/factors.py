"""Min-marginals of one net whose readers share reshards, by numpy.

A net over the row r and the columns d_1..d_k of its readers costs the sum over *distinct* d of table[r, d]. With a
number per column for every reader (m_u, the messages) the minimum over all columns is a minimum over the set partitions
of the readers, where all readers of a part B ask for one column: sum_B min_d (table[r, d] + sum_{u in B} m_u[d]). Parts
that pick the same column are charged twice, which is never less than as one part. So one pass over 2^k - 1 tables is
exact, and no k-dimensional table is made. Called by search.messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def row_marginal(table: np.ndarray, messages: Sequence[np.ndarray]) -> np.ndarray:
    """[rows]: least over all columns of cost(r, columns) + sum_u messages[u][d_u]. `table` is [rows, columns]."""
    return _best(table, messages, tuple(range(len(messages))))


def column_marginal(table: np.ndarray, messages: Sequence[np.ndarray], use: int, rows: np.ndarray) -> np.ndarray:
    """[columns]: the same with `rows[r]` added, least over rows and the columns of all readers but `use`."""
    others = tuple(u for u in range(len(messages)) if u != use)
    if not others:
        return np.asarray(np.minimum.reduce(table + rows[:, None], 0) + messages[use])
    least = np.full(table.shape[1], np.inf)
    for mask in range(1 << len(others)):
        alone = tuple(u for i, u in enumerate(others) if not mask >> i & 1)
        together = sum((messages[u] for i, u in enumerate(others) if mask >> i & 1), messages[use])
        by_row = rows + _best(table, messages, alone) if alone else rows
        np.minimum(least, np.minimum.reduce(table + by_row[:, None], 0) + together, out=least)
    return least


def _best(table: np.ndarray, messages: Sequence[np.ndarray], uses: tuple[int, ...]) -> np.ndarray:
    """[rows]: least over the set partitions of `uses`, by the part that holds the first of them."""
    first, rest = uses[0], uses[1:]
    if not rest:
        return np.asarray(np.minimum.reduce(table + messages[first], 1))
    least = np.full(table.shape[0], np.inf)
    for mask in range(1 << len(rest)):
        alone = tuple(u for i, u in enumerate(rest) if not mask >> i & 1)
        together = sum((messages[u] for i, u in enumerate(rest) if mask >> i & 1), messages[first])
        value = np.minimum.reduce(table + together, 1)
        np.minimum(least, value + _best(table, messages, alone) if alone else value, out=least)
    return least
