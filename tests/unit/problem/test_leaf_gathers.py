"""Which share of the leaves of a run of blocks is gathered before their block begins."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.buckets import BUCKET_BYTES
from autopar.problem.leaf_gathers import share_ahead


@pytest.mark.parametrize(
    ("nbytes", "count", "share"),
    [
        (7.1, math.inf, 1.0),  # another run computes before the first block
        (7.1, 4, 3 / 4),  # nothing hides the leaves of the first block
        (0.1, 20, 15 / 20),  # nor those of so many small blocks as fill half a bucket
        (0.1, 4, 0.0),
        (0.0, 4, 1.0),  # nothing is gathered
    ],
)
def test_all_leaves_but_those_of_the_first_block_are_ahead(nbytes: float, count: float, share: float) -> None:
    assert share_ahead(np.array([nbytes * BUCKET_BYTES]), count) == pytest.approx([share])
