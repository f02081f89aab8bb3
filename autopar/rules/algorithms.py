"""Splits that need more than the plain operator on shards: for each runtime algorithm the collectives inside it, by
which problem, memory and simulate price it. The algorithms themselves are in autopar.runtime.algorithms.

bag              rows of a table, in bags: those of other ranks count nothing, and nothing is sent
embedding        rows of other ranks are masked to zero: nothing is sent
cross_entropy    two all-reduces of one number per row: the maximum and the sum of exponentials
causal_rows      queries are a chunk of rows, keys and values whole and cut to what the rows may see: nothing is
                 sent
own_heads        query heads of groups are cut, keys and values whole: each rank takes the heads of its queries,
                 nothing is sent
ring             queries, keys and values are chunks of rows: keys and values go round under the work, their
                 gradients behind them
halo             an image is cut along a spatial dim: neighbours send the rows that windows read, and gradients back
own_experts      tokens are whole, each rank computes the rows of its own experts: nothing is sent
own_groups       rows are whole, each rank multiplies those of its own groups: nothing is sent
expert_dispatch  tokens and experts are cut: numbers of rows, rows and results go all to all, and their gradients
                 back
tiles<n>         rows are cut, the weight as it rests: it is gathered and used in n tiles, their gradients are
                 scattered one by one
lookup_tiles<n>  the same of the table of an embedding
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.layout import dim_of, is_placed, is_shard
from autopar.rules import experts, halo, ring, ring_memory, tiles
from autopar.rules.language import Option
from autopar.rules.site import InnerCollective, Inside, Keeping, Site, once


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What prices and counts know of one runtime algorithm.

    `forward` and `backward` are the collectives inside one call, in the order in which they run.

    `pace` is the FLOPs of the rank that has most, over the mean of all ranks.

    `alone`: no second axis may cut the dims that this one cuts. `apart` are operands for which that holds, of the dim
    that this axis cuts in them.

    `travels` are operands whose shards are sent as they are; where these are even, all ranks send the same number of
    bytes.

    `inside` is what the operator keeps, reads and writes in addition to its operands and outputs. `keeps` is what the
    backward keeps, where that is not what the plain operator keeps on shards.

    `follow` are operands that no minor axis may cut along the dim of operand 0 that this axis cuts (`_behind`).

    `gathers` are functions that give, for the forward and for the backward, the most bytes of (gathered weights, whole
    gradients of weights) that exist at one time; `takes` are functions that give those of everything else that exists
    only while the algorithm runs, where that is not what the plain operator takes on shards."""

    forward: tuple[InnerCollective, ...] = ()
    backward: tuple[InnerCollective, ...] = ()
    pace: Callable[[Site], float] = once
    alone: bool = False
    travels: tuple[int, ...] = ()
    inside: Inside | None = None
    keeps: Callable[[Site], Keeping] | None = None
    follow: tuple[int, ...] = ()
    apart: tuple[int, ...] = ()
    gathers: tuple[Callable[[Site], tuple[float, float]], ...] = ()
    takes: tuple[Callable[[Site], float], ...] = ()

    def inner(self, *, training: bool) -> tuple[InnerCollective, ...]:
        """The collectives inside one call, those of the backward included when training."""
        return (*self.forward, *(self.backward if training else ()))


def agree(options: Sequence[Option]) -> bool:
    """Whether one operator can run `options` together, one per axis, major first."""
    return not any(
        option.run and (_crowded(axis, options) or _behind(axis, options) or _aside(axis, options))
        for axis, option in enumerate(options)
    )


def _crowded(axis: int, options: Sequence[Option]) -> bool:
    """Whether another axis cuts a dim that the algorithm on `axis` wants to cut alone."""
    algorithm = ALGORITHMS[options[axis].run]
    cut = [
        (i, dim_of(use.value))
        for i, use in enumerate(options[axis].ins)
        if is_shard(use.value) and (algorithm.alone or i in algorithm.apart)
    ]
    others = [other for index, other in enumerate(options) if index != axis]
    return any(_cuts(other, i, dim) for other in others for i, dim in cut)


def _behind(axis: int, options: Sequence[Option]) -> bool:
    """Whether a minor axis cuts what should follow operand 0 on `axis`: of 8 query heads on 2 x 2 ranks the second has
    2 and 3, but of 2 key heads cut by the minor axis it has the second, which those do not attend to."""
    dim = dim_of(options[axis].ins[0].value) if is_shard(options[axis].ins[0].value) else -1
    return any(_cuts(minor, i, dim) for minor in options[axis + 1 :] for i in ALGORITHMS[options[axis].run].follow)


def _aside(axis: int, options: Sequence[Option]) -> bool:
    """Whether an algorithm that gathers weights would run on only some of the ranks of another axis (a placed value);
    all ranks must take part in a gather."""
    return bool(ALGORITHMS[options[axis].run].gathers) and any(
        is_placed(use.value) for option in options for use in (*option.ins, *option.outs)
    )


def _cuts(option: Option, operand: int, dim: int) -> bool:
    """Whether `option` cuts `dim` of an operand."""
    value = option.ins[operand].value
    return is_shard(value) and dim_of(value) == dim


def _statistic(site: Site) -> float:
    """Bytes of one number per row of operand 0, in float32 or wider."""
    return site.local(0, *range(len(site.operands[0].shape) - 1)) * max(4, site.operands[0].itemsize)


ALGORITHMS: dict[str, Algorithm] = {
    "bag": Algorithm(),
    "causal_rows": Algorithm(pace=ring.later_rows),
    "cross_entropy": Algorithm(forward=(InnerCollective("all_reduce", _statistic),) * 2),
    "embedding": Algorithm(),
    "expert_dispatch": Algorithm(experts.FORWARD, experts.BACKWARD),
    "halo": Algorithm(halo.FORWARD, halo.BACKWARD, alone=True, travels=(halo.IMAGE,), inside=halo.INSIDE),
    "own_experts": Algorithm(),
    "own_groups": Algorithm(),
    "own_heads": Algorithm(follow=(ring.KEY, ring.VALUE)),
    "ring": Algorithm(
        ring.FORWARD,
        ring.BACKWARD,
        ring.pace,
        alone=True,
        travels=(ring.QUERY, ring.KEY, ring.VALUE),
        keeps=ring_memory.kept,
        takes=(ring_memory.forward_bytes, ring_memory.backward_bytes),
    ),
    **{
        f"{name}{count}": Algorithm(
            tiles.FORWARD,
            tiles.BACKWARD,
            travels=(weight,),
            apart=(weight,),
            gathers=(tiles.forward_bytes, tiles.backward_bytes),
        )
        for name, weight in tiles.NAMES.items()
        for count in tiles.COUNTS
    },
}
