"""Weights that are too large to gather whole, gathered and used in tiles: memory-centric tiling, as DeepSpeed has it
for ZeRO-3.

    y = x W^T, W [o, i] cut along dim 0 over n ranks        tile j of t: part j of t of every rank's shard,
                                                            n * (o / (n t)) rows

The work is cut along the rows of x, as in data parallelism; the weight rests cut. The operator gathers a tile,
multiplies by it and frees it, while the next tile is gathered. Its backward gathers each tile again and scatters the
tile's gradient at once, so that neither the whole weight nor its whole gradient ever exists. What a tile gives depends
on what a row of the weight is: an output (linear) gives columns of the result; an input (matmul) takes columns of x and
gives a partial sum; a row of a table (embedding) gives the rows of the result whose ids are in the tile, and its
backward does not gather.

Bytes and seconds are those of autopar.runtime.algorithms.tiled, which tests count."""

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
"""Algorithm (of products, of lookups), without its number of tiles -> which operand is the weight. The other one of the
first two operands has the rows of the result."""
COUNTS = tuple(2**power for power in range(1, 11))
"""The numbers of tiles for which there are algorithms."""

OPERATORS: dict[Any, str] = {
    aten.embedding.default: "lookup_tiles",
    **dict.fromkeys((aten.linear.default, aten.matmul.default, ops.affine), "tiles"),
}
"""Operators that can gather their weight in tiles -> their algorithm."""
BY_OUTPUTS = (aten.linear.default,)
"""Operators whose weight has a row per output; in other products a row of the weight is an input."""

LARGE_SHARE = 1 / 16
"""A share of a device's memory: weights of at most so many bytes are not offered in tiles."""

SHARD = Use("S0", "S0")


def name(target: Any, count: int) -> str:
    """The name of the algorithm of an operator of OPERATORS with `count` tiles."""
    return f"{OPERATORS[target]}{count}"


def tiles(run: str) -> int:
    """The number of tiles of an algorithm; 1 where it is not one of NAMES."""
    return int(run[len(run.rstrip("0123456789")) :]) if run.rstrip("0123456789") in NAMES else 1


def weight_at(run: str) -> int:
    """The number of the operand that an algorithm of NAMES gathers."""
    return NAMES[run.rstrip("0123456789")]


def tiled(options: Sequence[Option]) -> int:
    """The number of tiles of an operator with `options`, one per axis."""
    return math.prod(tiles(option.run) for option in options)


def counts(call: Call, ways: int, memory_bytes: float) -> tuple[int, ...]:
    """The numbers of tiles that are offered on an axis of `ways` ranks with `memory_bytes` each. None for a weight of
    at most LARGE_SHARE of that memory. Else the powers of two t that cut every shard evenly, up to the first for which
    a tile is at most LARGE_SHARE of the memory."""
    if ways < 2 or not can(call):
        return ()
    weight = call.ins[NAMES[OPERATORS[call.target]]]
    nbytes, rows = math.prod(weight.sizes) * weight.itemsize, weight.sizes[0]
    return tuple(n for n in COUNTS if nbytes / n * 2 > LARGE_SHARE * memory_bytes < nbytes and rows % (ways * n) == 0)


def can(call: Call) -> bool:
    """Whether a call has an algorithm with tiles: its weight is a matrix with a static number of rows, and its gradient
    is dense and unscaled."""
    if call.target not in OPERATORS or (
        call.target is aten.embedding.default and any(given(call)[name] for name in ("scale_grad_by_freq", "sparse"))
    ):
        return False
    weight = call.ins[NAMES[OPERATORS[call.target]]]
    return len(weight.shape) == 2 and isinstance(weight.shape[0], int)


def in_tiles(target: Any, options: Sequence[Option], counts: Sequence[int]) -> list[Option]:
    """For each of `options` that cuts rows of x (or ids) and has the weight whole: the same with the weight gathered in
    tiles, for each number of tiles in `counts`."""
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
    """The use of a weight that the operator itself gathers: cut along dim 0, as it rests. `use` is that of the plain
    option, whose gradient is a partial sum if the weight has one."""
    return SHARD if use.grad == "P" else Use("S0", use.grad)


def _with(ins: tuple[Use, ...], at: int, use: Use) -> tuple[Use, ...]:
    """`ins` with `use` for operand number `at`."""
    return (*ins[:at], use, *ins[at + 1 :])


def as_worked(option: Option) -> Option:
    """The option with the layouts of operands as kernels see them: a weight that is gathered in tiles is whole."""
    if tiles(option.run) == 1:
        return option
    return replace(option, ins=_with(option.ins, weight_at(option.run), Use("R", "P")))


def weight_of(site: Site) -> int:
    """The number of the operand that is gathered in tiles."""
    return weight_at(site.options[site.axis].run)


def _weight(site: Site) -> Tensor:
    return site.operands[weight_of(site)]


def _again(site: Site) -> bool:
    """Whether the backward needs the weight: x has a gradient."""
    return site.operands[1 - weight_of(site)].grad


def tile_bytes(site: Site) -> float:
    """Bytes of one gathered tile."""
    return site.local_bytes(weight_of(site)) * site.ways / _count(site)


def gradient_bytes(site: Site) -> float:
    """Bytes of the whole gradient of a tile, in the dtype in which gradients of the weight are summed."""
    return tile_bytes(site) * site.wider


def _count(site: Site) -> int:
    return tiles(site.options[site.axis].run)


# the functions below say how often each collective of FORWARD and BACKWARD runs


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
    """Bytes of (gathered tiles, whole gradients) when the forward has most: the tile in use and the next one."""
    return 2 * tile_bytes(site), 0.0


def backward_bytes(site: Site) -> tuple[float, float]:
    """Bytes of (gathered tiles, whole gradients) when the backward has most.

    With three tiles or more: two tiles, and the gradient of the tile before, whose scatter is not done. With two, there
    is only the second tile by then: it, and the gradient of the first, which is made and, where gradients are summed in
    another dtype, cast."""
    tile, whole, x, weight = tile_bytes(site), gradient_bytes(site), _again(site), _weight(site).grad
    made = whole + (tile if site.wider > 1 else 0.0)
    if not (x and weight):
        return 2 * tile * x, made * weight
    moments = [(2 * tile, whole if _count(site) > 2 else 0.0), (tile, made)]
    return max(moments, key=sum)


def moved_bytes(site: Site) -> tuple[float, float]:
    """Bytes that a call reads and writes in addition to one pass over operands and result, (forward, backward; of the
    latter one over the gradient of the result for each gradient that is made). For each further tile x, or the gradient
    of the result, is read again; parts of results and of gradients are copied to their places, and partial sums are
    written and added up; a lookup writes a whole result for each tile."""
    assert site.call is not None, "tiles of a call"
    more, x, y = _count(site) - 1, site.local_bytes(1 - weight_of(site)), _result_bytes(site)
    if weight_of(site) == 0:
        return (more + 1) * (x + 3 * y), (more + 1) * (x + 2 * y)
    again, learns = _again(site), _weight(site).grad
    if site.call.target in BY_OUTPUTS:
        return more * x + 2 * y, 2 * y + more * (4 * again + learns) * x
    return 2 * x + more * 4 * y, (again + learns) * (2 * x + more * y)


def _result_bytes(site: Site) -> float:
    """Bytes of the local result: as many rows as x (or ids), as wide as the weight makes it."""
    assert site.call is not None, "tiles of a call"
    rows, weight = site.operands[1 - weight_of(site)], _weight(site)
    lead = range(len(rows.shape) - weight_of(site))
    wide = weight.sizes[0] if site.call.target in BY_OUTPUTS else site.local(weight_of(site), 1)
    return site.local(1 - weight_of(site), *lead) * wide * weight.itemsize
