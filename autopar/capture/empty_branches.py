"""Is the branch of masks that pick nothing the one of masks that pick something, with no rows?

    if mask.any(): out[token] += ...            # yes: nothing is added
    if len(token) < 8: continue                 # nobody knows: a size is compared with something else than none
    out /= sum(mask.any() for mask in masks)    # no: it counts

The model runs without values, once with some masks empty, and once with all of them full, but without what these masks write. Its results are compared as expressions
(`capture.tape`). The sets of masks are such that of any two masks there is one that has the first and not the second, so that no mask asks for another.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from itertools import combinations, count
from typing import Any

from torch import nn

from autopar.capture.mask_branches import Picking
from autopar.capture.shadow import shadow
from autopar.capture.tape import Tape, played
from autopar.capture.valueless import UNTOLD


def nothing_of_nothing(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether `model`, which is on meta and stays as it is, gives with masks that pick nothing what it gives without what they write; not where it picks nothing at all, or
    does not run without values."""
    numbers: dict[Hashable, int] = {}

    def run(picking: Picking) -> Tape:
        return played(shadow(model), (args, dict(kwargs)), numbers, picking=picking)

    full = Picking()
    try:
        run(full)
        return bool(full.seen) and all(_same(run(Picking(some, some)), run(Picking(dropped=some))) for some in _apart(len(full.seen)))
    except UNTOLD:
        return False


def _same(one: Tape, other: Tape) -> bool:
    return (one.result, one.changed) == (other.result, other.changed)


def _apart(masks: int) -> Iterator[set[int]]:
    """Few sets of masks 0, 1, ..., of which for any two masks one has the first and not the second: each is in another half of them."""
    sets = next(n for n in count(2) if math.comb(n, n // 2) >= masks)
    members = list(zip(range(masks), combinations(range(sets), sets // 2), strict=False))
    for number in range(sets):
        yield {mask for mask, where in members if number in where}
