"""Weights that are too large to gather whole, gathered and used in tiles: memory-centric tiling, as in ZeRO-3 of
DeepSpeed.

    y = x W^T,  W [o, i] cut along dim 0 over n ranks       tile j of t: rows j o/(n t) ... of every rank's shard, n of
    them at once

The work is cut along x as in data parallelism, the weight lies cut as it rests. The operator gathers a tile, multiplies
and lets it go while the next one is on its way; its backward gathers each again and scatters the gradient of each at
once, so neither the whole weight nor its whole gradient is ever there. A weight whose rows are outputs (linear) gives
columns of the result, one whose rows are inputs (matmul) takes columns of x and gives parts of a sum, one whose rows
are looked up (embedding) gives the rows that are in the tile and is not gathered again.

Bytes and seconds are those of autopar.runtime.algorithms.tiled, which the tests count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.layout import is_shard
from autopar.rules.arguments import given
from autopar.rules.language import Call, Option, Tensor, Use
from autopar.rules.site import InnerCollective, Site
from passes import ops

aten = torch.ops.aten
NAMES = {"tiles": 1, "lookup_tiles": 0}
"""The algorithms without their number of tiles: of products, and of lookups; which operand is the weight. The other one
of the first two has the rows of the result."""
COUNTS = tuple(2**power for power in range(1, 11))
"""The numbers of tiles that there are algorithms for."""

OPERATORS: dict[Any, str] = {
    aten.embedding.default: "lookup_tiles",
    **dict.fromkeys((aten.linear.default, aten.matmul.default, aten.mm.default, ops.affine), "tiles"),
}
"""Operators that can gather their weight in tiles, and the algorithm."""
BY_OUTPUTS = (aten.linear.default,)
"""Those whose weight has a row per output; rows of other products are inputs."""

LARGE = 1 / 16
"""Of a device's memory: weights of fewer bytes are not offered in tiles."""

SHARD = Use("S0", "S0")


def name(target: Any, count: int) -> str:
    """The algorithm of an operator of OPERATORS that gathers so many tiles."""
    return f"{OPERATORS[target]}{count}"


def tiles(run: str) -> int:
    """How many tiles an algorithm gathers, 1 where it is another one."""
    return int(run[len(run.rstrip("0123456789")) :]) if run.rstrip("0123456789") in NAMES else 1


def weight_at(run: str) -> int:
    """Which operand an algorithm of NAMES gathers."""
    return NAMES[run.rstrip("0123456789")]


def tiled(options: Sequence[Option]) -> int:
    """How many tiles an operator gathers that does `options`, one per axis."""
    return math.prod(tiles(option.run) for option in options)


def counts(call: Call, ways: int, memory_bytes: float) -> tuple[int, ...]:
    """The numbers of tiles that are offered on an axis of `ways` ranks of `memory_bytes` each: none of a weight that is
    not large, else powers of two until a tile is small, as far as they cut every shard evenly."""
    if ways < 2 or not can(call):
        return ()
    weight = call.ins[NAMES[OPERATORS[call.target]]]
    nbytes, rows = math.prod(weight.sizes) * weight.itemsize, weight.sizes[0]
    return tuple(n for n in COUNTS if nbytes / n * 2 > LARGE * memory_bytes < nbytes and rows % (ways * n) == 0)


def can(call: Call) -> bool:
    """Whether there is an algorithm for a call: of a matrix with a known number of rows, all of whose gradients count
    as they are."""
    if call.target not in OPERATORS or (
        call.target is aten.embedding.default and any(given(call)[name] for name in ("scale_grad_by_freq", "sparse"))
    ):
        return False
    weight = call.ins[NAMES[OPERATORS[call.target]]]
    return len(weight.shape) == 2 and isinstance(weight.shape[0], int)


def in_tiles(target: Any, options: Sequence[Option], counts: Sequence[int]) -> list[Option]:
    """Those of the `options` of an operator of OPERATORS that cut its rows and use the weight whole, with the weight
    gathered in tiles instead."""
    weight = NAMES[OPERATORS[target]]
    return [
        replace(
            option,
            factor=f"{option.factor}/{name(target, count)}",
            run=name(target, count),
            ins=_with(option.ins, weight, _as_it_rests(option.ins[weight])),
        )
        for option in options
        if not option.run and is_shard(option.ins[1 - weight].value) and option.ins[weight].value == "R"
        for count in counts
    ]


def _as_it_rests(use: Use) -> Use:
    return SHARD if use.grad == "P" else Use("S0", use.grad)


def _with(ins: tuple[Use, ...], at: int, use: Use) -> tuple[Use, ...]:
    return (*ins[:at], use, *ins[at + 1 :])


def as_worked(option: Option) -> Option:
    """The option with the operands as the kernels see them: weights that are gathered in tiles are whole."""
    if tiles(option.run) == 1:
        return option
    return replace(option, ins=_with(option.ins, weight_at(option.run), Use("R", "P")))


def weight_of(site: Site) -> int:
    """Which operand is gathered in tiles."""
    return weight_at(site.options[site.axis].run)


def _weight(site: Site) -> Tensor:
    return site.operands[weight_of(site)]


def _again(site: Site) -> bool:
    """Whether the backward needs the weight."""
    return site.operands[1 - weight_of(site)].grad


def tile_bytes(site: Site) -> float:
    """One gathered tile."""
    return site.local_bytes(weight_of(site)) * site.ways / _count(site)


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
    return int(_again(site))


def _others_again(site: Site) -> int:
    return _others(site) * _again(site)


def _last_scattered(site: Site) -> int:
    return int(_weight(site).grad)


def _others_scattered(site: Site) -> int:
    return _others(site) * _weight(site).grad


FORWARD = (
    InnerCollective("all_gather", tile_bytes, _first),
    InnerCollective("all_gather", tile_bytes, _others, hidden=True),
)
BACKWARD = (
    InnerCollective("all_gather", tile_bytes, _first_again),
    InnerCollective("all_gather", tile_bytes, _others_again, hidden=True),
    InnerCollective("reduce_scatter", gradient_bytes, _others_scattered, hidden=True),
    InnerCollective("reduce_scatter", gradient_bytes, _last_scattered, last=True),
)


def forward_bytes(site: Site) -> tuple[float, float]:
    """Bytes of gathered tiles, and of whole gradients, at the fullest moment of the forward: the tile that is used and
    the next one."""
    return 2 * tile_bytes(site), 0.0


def backward_bytes(site: Site) -> tuple[float, float]:
    """The same of the backward. With three tiles or more, two are there beside the gradient of the one before, which is
    on its way. With two the second is there alone by then; the gradient of the first is made beside it, and cast where
    gradients are summed in another dtype."""
    tile, whole, x, weight = tile_bytes(site), gradient_bytes(site), _again(site), _weight(site).grad
    made = whole + (tile if site.wider > 1 else 0.0)
    if not (x and weight):
        return 2 * tile * x, made * weight
    moments = [(2 * tile, whole if _count(site) > 2 else 0.0), (tile, made)]
    return max(moments, key=sum)


def moved_bytes(site: Site) -> tuple[float, float]:
    """Bytes that are read and written beside one pass over operands and result, forward and backward: x once more for
    each further tile, results and gradients put in their place, sums that add up; of lookups a result for each tile, of
    which some rows count."""
    assert site.call is not None, "tiles of a call"
    more, x, y = _count(site) - 1, site.local_bytes(1 - weight_of(site)), _result_bytes(site)
    if weight_of(site) == 0:
        return (more + 1) * (x + 3 * y), (more + 1) * (x + 2 * y)
    if site.call.target in BY_OUTPUTS:
        return more * x + 2 * y, 2 * y + more * 4 * x
    return 2 * x + more * 3 * y, 4 * x + more * y


def _result_bytes(site: Site) -> float:
    """The result on one rank: as many rows as x, or ids, as wide as the weight gives."""
    assert site.call is not None, "tiles of a call"
    rows, weight = site.operands[1 - weight_of(site)], _weight(site)
    lead = range(len(rows.shape) - weight_of(site))
    wide = weight.sizes[0] if site.call.target in BY_OUTPUTS else site.local(weight_of(site), 1)
    return site.local(1 - weight_of(site), *lead) * wide * weight.itemsize
