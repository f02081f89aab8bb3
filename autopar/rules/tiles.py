"""Weights that are too large to gather whole, gathered and used in tiles: memory-centric tiling, as in ZeRO-3 of DeepSpeed.

    y = x W^T,  W [o, i] cut along dim 0 over n ranks       tile j of t: rows j o/(n t) ... of every rank's shard, n of them at once

The work is cut along x as in data parallelism, the weight lies cut as it rests. The operator gathers a tile, multiplies and lets it go while the
next one is on its way; its backward gathers each again and scatters the gradient of each at once, so neither the whole weight nor its whole
gradient is ever there. A weight whose rows are outputs (linear) gives columns of the result, one whose rows are inputs (matmul) takes columns
of x and gives parts of a sum.

Bytes and seconds are those of autopar.runtime.algorithms.tiled, which the tests count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.layout import is_shard
from autopar.rules.language import Call, Option, Use
from autopar.rules.site import Inner, Site

aten = torch.ops.aten
ROWS, WEIGHT = 0, 1
NAME = "tiles"
COUNTS = tuple(2**power for power in range(1, 11))
"""The numbers of tiles that there are algorithms for."""

BY_OUTPUTS: dict[Any, bool] = {aten.linear.default: True, aten.matmul.default: False, aten.mm.default: False}
"""Operators that can gather their second operand in tiles, and whether its rows are outputs (else inputs)."""

LARGE = 1 / 16
"""Of a device's memory: weights of fewer bytes are not offered in tiles."""

SHARD = Use("S0", "S0")


def name(count: int) -> str:
    """The algorithm of so many tiles."""
    return f"{NAME}{count}"


def tiles(run: str) -> int:
    """How many tiles an algorithm gathers, 1 where it is another one."""
    return int(run.removeprefix(NAME)) if run.startswith(NAME) else 1


def tiled(options: Sequence[Option]) -> int:
    """How many tiles an operator gathers that does `options`, one per axis."""
    return math.prod(tiles(option.run) for option in options)


def counts(call: Call, ways: int, memory_bytes: float) -> tuple[int, ...]:
    """The numbers of tiles that are offered on an axis of `ways` ranks of `memory_bytes` each: none of a weight that is not large, else powers of two
    until a tile is small, as far as they cut every shard evenly."""
    weight = call.ins[WEIGHT] if call.target in BY_OUTPUTS else None
    if ways < 2 or weight is None or len(weight.shape) != 2 or not isinstance(weight.shape[0], int):
        return ()
    nbytes, rows = math.prod(weight.sizes) * weight.itemsize, weight.sizes[0]
    return tuple(n for n in COUNTS if nbytes / n * 2 > LARGE * memory_bytes < nbytes and rows % (ways * n) == 0)


def in_tiles(options: Sequence[Option], counts: Sequence[int]) -> list[Option]:
    """Those of the `options` of an operator of BY_OUTPUTS that cut its rows and use the weight whole, with the weight gathered in tiles instead."""
    return [replace(option, factor=f"{option.factor}/{name(count)}", run=name(count), ins=_as_it_rests(option.ins))
            for option in options if not option.run and is_shard(option.ins[ROWS].value) and option.ins[WEIGHT].value == "R" for count in counts]


def _as_it_rests(ins: tuple[Use, ...]) -> tuple[Use, ...]:
    rests = SHARD if ins[WEIGHT].grad == "P" else Use("S0", ins[WEIGHT].grad)
    return (*ins[:WEIGHT], rests, *ins[WEIGHT + 1:])


def as_worked(option: Option) -> Option:
    """The option with the operands as the kernels see them: weights that are gathered in tiles are whole."""
    if tiles(option.run) == 1:
        return option
    return replace(option, ins=(*option.ins[:WEIGHT], Use("R", "P"), *option.ins[WEIGHT + 1:]))


def tile_bytes(site: Site) -> float:
    """One gathered tile."""
    return site.local_bytes(WEIGHT) * site.ways / _count(site)


def gradient_bytes(site: Site) -> float:
    """The whole gradient of a tile, in the dtype in which gradients of the weight are summed."""
    return tile_bytes(site) * site.wider


def _count(site: Site) -> int:
    return tiles(site.options[site.axis].run)


def _first(site: Site) -> int:
    return 1


def _others(site: Site) -> int:
    return _count(site) - 1


def _first_again(site: Site) -> int:
    return int(site.operands[ROWS].grad)


def _others_again(site: Site) -> int:
    return _others(site) * site.operands[ROWS].grad


def _last_scattered(site: Site) -> int:
    return int(site.operands[WEIGHT].grad)


def _others_scattered(site: Site) -> int:
    return _others(site) * site.operands[WEIGHT].grad


FORWARD = (Inner("all_gather", tile_bytes, _first), Inner("all_gather", tile_bytes, _others, hidden=True))
BACKWARD = (Inner("all_gather", tile_bytes, _first_again), Inner("all_gather", tile_bytes, _others_again, hidden=True),
            Inner("reduce_scatter", gradient_bytes, _others_scattered, hidden=True), Inner("reduce_scatter", gradient_bytes, _last_scattered))


def forward_bytes(site: Site) -> tuple[float, float]:
    """Bytes of gathered tiles, and of whole gradients, at the fullest moment of the forward: the tile that is used and the next one."""
    return 2 * tile_bytes(site), 0.0


def backward_bytes(site: Site) -> tuple[float, float]:
    """The same of the backward. With three tiles or more, two are there beside the gradient of the one before, which is on its way. With two the second
    is there alone by then; the gradient of the first is made beside it, and cast where gradients are summed in another dtype."""
    tile, whole, x, weight = tile_bytes(site), gradient_bytes(site), site.operands[ROWS].grad, site.operands[WEIGHT].grad
    made = whole + (tile if site.wider > 1 else 0.0)
    if not (x and weight):
        return 2 * tile * x, made * weight
    moments = [(2 * tile, whole if _count(site) > 2 else 0.0), (tile, made)]
    return max(moments, key=sum)


def moved_bytes(site: Site, *, by_outputs: bool) -> tuple[float, float]:
    """Bytes that are read and written beside one pass over operands and result, forward and backward: x once more for each further tile, results
    and gradients put in their place, sums that add up."""
    more, x, y = _count(site) - 1, site.local_bytes(ROWS), _result_bytes(site)
    if by_outputs:
        return more * x + 2 * y, 2 * y + more * 4 * x
    return 2 * x + more * 3 * y, 4 * x + more * y


def _result_bytes(site: Site) -> float:
    """The result on one rank: as many rows as x, as wide as the weight gives."""
    assert site.call is not None, "tiles of a call"
    lead = range(len(site.operands[ROWS].shape) - 1)
    wide = site.operands[WEIGHT].sizes[0] if BY_OUTPUTS[site.call.target] else site.local(WEIGHT, 1)
    return site.local(ROWS, *lead) * wide * site.operands[ROWS].itemsize
