"""What reshards between blocks of one run take at least: against every way to choose layouts for each block."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.joint import block_chains
from autopar.joint.block_chains import Potentials

SECONDS = st.floats(-4.0, 4.0)


@st.composite
def chains(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, Potentials]:
    """Reshards [rows, columns] of which some cannot be made, what a block takes that reads one column and leaves one
    row [rows, columns], the number of blocks, and potentials of some rows and columns, right or not."""
    rows, columns, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(2, 4))
    some = st.one_of(st.floats(0.0, 4.0), st.just(math.inf))
    cost_s, own_s = (
        np.array(draw(st.lists(each, min_size=rows * columns, max_size=rows * columns))).reshape(rows, columns)
        for each in (some, st.floats(0.0, 4.0))
    )
    leaving = draw(st.dictionaries(st.integers(0, rows - 1), SECONDS))
    entering = draw(st.dictionaries(st.integers(0, columns - 1), SECONDS))
    return cost_s, own_s, blocks, Potentials(leaving, entering)


@given(chains())
@settings(max_examples=200, deadline=None)
def test_no_layouts_of_the_blocks_take_less(chain: tuple[np.ndarray, np.ndarray, int, Potentials]) -> None:
    cost_s, own_s, blocks, known = chain
    each_s, fixed_s, _ = block_chains.costs(cost_s, blocks, known)
    proven_s = float((blocks * own_s + each_s).min()) + fixed_s
    kinds = list(np.ndindex(own_s.shape))  # of a block: the row that it leaves, the column that it reads
    least_s = min(
        sum(own_s[kind] for kind in picked)
        + sum(cost_s[before[0], after[1]] for before, after in itertools.pairwise(picked))
        for picked in itertools.product(kinds, repeat=blocks)
    )
    assert (each_s >= 0.0).all()
    assert proven_s <= least_s + 1e-9


def test_nothing_is_known_without_potentials() -> None:
    each_s, fixed_s, _ = block_chains.costs(np.ones((2, 3)), 4, Potentials())
    assert not each_s.any()
    assert fixed_s == 0.0
