"""What reshards between the blocks of a run cost at least, where each block may have layouts of its own, as blocks on
different places have. Used by relaxed and cutting_planes.

A block leaves its value in one layout (a row of the net), the next one reads it in another (a column), which takes
c(row, column). A relaxed step has one solution for all blocks, so that what two blocks take together is divided between
them, by any potentials with

    leaving(row) + entering(column) <= c(row, column)        for all rows and columns

In a run of n blocks there are n - 1 reshards, and each block but the last leaves, each but the first enters:

    sum of c >= sum over all blocks (leaving + entering) - most leaving - most entering

So n times what one block takes with both potentials, less that constant, is a lower bound for any n blocks. Neighbours
that are k of n take k times that, what was left to the first of them less what the last one leaves to the next: between
no two places more than the constant is passed on, and what one place has less the next one has more
(pipeline.memory_bound).

Which potentials prove most depends on what blocks take in these layouts: it is found by the linear program of
cutting_planes, for the layouts of the solutions that it has met. Others get the most that is left to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True, eq=False)
class Potentials:
    """Seconds of some rows and columns of one net."""

    leaving: Mapping[int, float] = field(default_factory=dict)
    entering: Mapping[int, float] = field(default_factory=dict)


def divided(cost_s: np.ndarray, known: Potentials) -> tuple[np.ndarray, np.ndarray]:
    """`known` made complete for the reshards `cost_s` [rows, columns], infinite where there is none: leaving [rows] and
    entering [columns]. No row and no column gets more than the most in `known`, and none nothing is known of."""
    if not known.leaving or not known.entering:
        return np.zeros(cost_s.shape[0]), np.zeros(cost_s.shape[1])
    rows, own_s = list(known.leaving), np.array(list(known.leaving.values()))
    entering_s = np.minimum((cost_s[rows] - own_s[:, None]).min(0), max(known.entering.values()))
    for column, most_s in known.entering.items():
        entering_s[column] = min(entering_s[column], most_s)
    return np.minimum((cost_s - entering_s).min(1), own_s.max()), entering_s


def costs(cost_s: np.ndarray, blocks: int, known: Potentials) -> tuple[np.ndarray, float, float]:
    """The cost of each (row, column), at least 0, and a constant, in seconds for all of `blocks` (at least 2), of which
    any two neighbours take `cost_s` [rows, columns]. Last what the chain loses at its ends, which the constant has."""
    leaving_s, entering_s = divided(cost_s, known)
    each_s = leaving_s[:, None] + entering_s
    least_s = float(each_s.min())
    lost_s = float(leaving_s.max() + entering_s.max())
    return blocks * (each_s - least_s), blocks * least_s - lost_s, lost_s
