"""What the search for the first difference keeps: sums that ranks make of their own parts, in which errors show."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch

from autopar.layout import local_shape, parse
from autopar.runtime.cuts import own
from autopar.verify.compare import difference
from autopar.verify.digest import local, whole

SIZES = (2, 3)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("R,S1", 0),
        ("S1,S1", 0),
        ("S0,S1", None),
        ("S1/2:4:2,S0", 0),
        ("O1,S1", 1),
        ("P,S0", 1),
        ("S0,P", 0),
        ("S2,O2", 0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bool])
def test_parts_add_up_to_the_whole(text: str, kept: int | None, dtype: torch.dtype) -> None:
    """Parts are uneven, some are empty."""
    layout, value = parse(text), torch.randn(5, 8, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    cut = tuple("R" if entry == "P" else entry for entry in layout)
    wanted, found = whole(value, kept), defaultdict[tuple[int, ...], list[torch.Tensor]](list)
    for coord in itertools.product(*map(range, SIZES)):
        share = own(value, cut, SIZES, coord)
        if "P" in layout:  # the first rank has all, another zeros
            share = share * (coord[layout.index("P")] == 0)
        made = local(share, layout, tuple(value.shape), kept, SIZES, coord)
        after = tuple("R" if entry == "P" else entry for entry in made.layout)
        assert made.shape == tuple(wanted.shape)
        assert tuple(made.local.shape) == local_shape(made.shape, made.layout, SIZES, coord)
        rest = tuple(0 if entry == "P" else c for entry, c in zip(made.layout, coord, strict=True))
        found[rest].append(made.local)
    for coord, parts in found.items():
        assert difference(torch.stack(parts).sum(0), own(wanted, after, SIZES, coord)) < 1e-14
    assert wanted.numel() <= value.numel() // 2


def test_marks_hide_no_error() -> None:
    """Of masked scores: beside -inf, the least number and nan."""
    scores = torch.randn(4, 300, dtype=torch.float64)
    scores[:, 5], scores[:, 6], scores[:, 7] = -math.inf, torch.finfo(torch.float64).min, math.nan
    assert difference(whole(scores.clone(), 0), whole(scores, 0)) == 0.0
    for column, wrong in ((5, 0.0), (7, math.inf), (200, scores[2, 200] + 1e-3)):
        other = scores.clone()
        other[2, column] = wrong
        assert difference(whole(other, 0), whole(scores, 0)) > 1e-6
