"""Gathers of leaves once per step (runtime.leaves): which share of them is prefetched.

The leaves of a run of blocks are gathered in the order in which the weights are read, all those of a block while the
block before it runs. So all are prefetched but those of the first block, before which nothing computes.
"""

from __future__ import annotations

import math

import numpy as np

from autopar.buckets import BUCKET_BYTES
from autopar.problem.graph import Program


def in_a_row(program: Program, scope: str) -> float:
    """How many blocks there are per block that has no compute before it: all of the run of `scope`; infinitely many
    where another run comes before it."""
    return program.runs[scope].count if scope == next(iter(program.runs)) else math.inf


def share_ahead(nbytes: np.ndarray, count: float) -> np.ndarray:
    """The share of leaves that are prefetched before their block begins, where a block of `count` (`in_a_row`) has
    `nbytes` of them: all but those of the first block, or of as many small ones as it takes to have half a bucket. 1
    where there are none."""
    exposed = np.maximum(1.0, np.ceil(BUCKET_BYTES / 2 / np.maximum(1.0, nbytes))) / count
    return np.where(nbytes > 0.0, np.maximum(0.0, 1.0 - exposed), 1.0)
