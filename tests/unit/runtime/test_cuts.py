"""cut, take, join and own against each other and against plain slicing, for any size, sections and mesh."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar._torch import TorchDispatchMode
from autopar.errors import RunError
from autopar.layout import local_shape, parse, pieces, steps
from autopar.runtime.cuts import check_shape, cut, join, own, pad, take
from autopar.runtime.moves import scatter_parts

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def _coords(sizes):
    return list(itertools.product(*map(range, sizes)))


@given(SIZES, st.integers(0, 17), st.data())
def test_own_is_the_pieces_of_the_layout(sizes, size, data):
    layout = tuple(data.draw(st.sampled_from(["R", "S0", "S1"])) for _ in sizes)
    whole = torch.arange(size * 5).reshape(size, 5)
    for coord in _coords(sizes):
        part = own(whole, layout, sizes, coord)
        assert tuple(part.shape) == local_shape(whole.shape, layout, sizes, coord)
        rows = [r for lo, hi in pieces(size, layout, 0, sizes, coord) for r in range(lo, hi)]
        columns = [c for lo, hi in pieces(5, layout, 1, sizes, coord) for c in range(lo, hi)]
        assert torch.equal(part, whole[rows][:, columns])


@given(SIZES, st.integers(0, 17), st.sampled_from([(1,), (1, 1, 1), (4, 1, 1)]), st.data())
def test_join_undoes_take(sizes, size, sections, data):
    axis = data.draw(st.integers(0, len(sizes) - 1))
    entry = "S0" if len(sections) == 1 else f"S0/{':'.join(map(str, sections))}"
    if len(sections) > 1:
        size = size * sum(sections) * math.prod(sizes)
    coarse = tuple(entry if a < axis and data.draw(st.booleans()) else "R" for a in range(len(sizes)))
    fine = (*coarse[:axis], entry, *coarse[axis + 1 :])
    whole = torch.arange(size)
    for coord in _coords(sizes):
        local = own(whole, coarse, sizes, coord)
        how = cut(size, coarse, fine, axis, sizes, coord)
        parts = [take(local, 0, ranges) for ranges in how.ranges]
        assert torch.equal(parts[coord[axis]], own(whole, fine, sizes, coord))
        assert tuple(map(len, parts)) == how.lengths
        longest = max(how.lengths)
        assert torch.equal(join([pad(p, 0, longest) for p in parts], 0, how), local)
        if how.even:
            assert torch.equal(torch.cat(parts), local)


def test_a_wrong_local_shape_says_what_was_wanted():
    with pytest.raises(
        RunError, match=r"reshard w: the rank at \(1,\) has a tensor of shape \(3,\), wanted \(2,\).*layout S0"
    ):
        check_shape(torch.ones(3), ("S0",), (5,), (2,), (1,), "reshard w")


class _Copied(TorchDispatchMode):
    """Adds up the bytes that `cat` and `stack` write."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::cat", "aten::stack"):
            self.nbytes += found.nbytes
        return found


@pytest.mark.parametrize(("entry", "copies"), [("S0", 0), ("S0/2", 1), ("S0/3", 1), ("S0/2:1", 1), ("S1", 1)])
def test_what_ranks_get_of_a_scatter_is_copied_as_often_as_priced(entry: str, copies: int) -> None:
    """cost.comm.step_s has one copy, and none of even parts side by side along dim 0."""
    x, layout, sizes = torch.arange(48.0).reshape(12, 4), parse(entry), (2,)
    (step,) = steps(("P",), layout, sizes)
    mesh: Any = SimpleNamespace(sizes=sizes, coord=(1,))
    with _Copied() as copied:
        parts, dim, length = scatter_parts(x, step, tuple(x.shape), mesh)
    assert copied.nbytes == copies * x.nbytes
    for rank, part in enumerate(parts):
        assert torch.equal(part, own(x, layout, sizes, (rank,)))
    assert length == parts.shape[1 + dim]
