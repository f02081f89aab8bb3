"""A check whether the branch for masks that select nothing equals the branch for masks that select something, applied
to no rows. Called by export.

    if mask.any(): out[token] += ...            # yes: nothing is added
    if len(token) < 8: continue                 # unknown: a size is compared with another number than 0
    out /= sum(mask.any() for mask in masks)    # no: it counts

The model runs without values twice: with some masks empty, and with all masks full but the writes to rows of these
masks left out. The results are compared as expressions (`capture.tape`). This is done for several sets of masks, chosen
such that for any two masks some set has the first and not the second: so no mask can depend on another unnoticed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from itertools import combinations, count
from typing import Any

from torch import nn

from autopar.capture._torch import OF_MODELS
from autopar.capture.mask_branches import Picking
from autopar.capture.shadow import shadow
from autopar.capture.tape import Tape, played


def nothing_of_nothing(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether `model`, which is on meta and is not changed, gives the same with empty masks as with full masks whose
    writes are left out. False where it selects by no mask, or does not run without values."""
    numbers: dict[Hashable, int] = {}

    def run(picking: Picking) -> Tape:
        return played(shadow(model), (args, dict(kwargs)), numbers, picking=picking)

    full = Picking()
    try:
        run(full)
        return bool(full.seen) and all(
            _same(run(Picking(some, some)), run(Picking(dropped=some))) for some in _apart(len(full.seen))
        )
    except OF_MODELS:
        return False


def _same(one: Tape, other: Tape) -> bool:
    return (one.result, one.changed) == (other.result, other.changed)


def _apart(masks: int) -> Iterator[set[int]]:
    """A small family of sets of the masks 0, 1, ..., such that for any two masks some set has the first and not the
    second."""
    sets = next(n for n in count(2) if math.comb(n, n // 2) >= masks)
    members = list(zip(range(masks), combinations(range(sets), sets // 2), strict=False))
    for number in range(sets):
        yield {mask for mask, where in members if number in where}
