"""Replaces indexing with a range over a whole dim by `gather`: `x[arange(b), last]` reads each sample at its own
position.

General indexing may read any sample at any position, so neither dim could be split. `gather` states that each sample
reads itself only; an index of nothing but ranges is the identity.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from passes import edit, facts

aten = torch.ops.aten

RANGES: dict[Any, int] = {aten.arange.default: 0, aten.arange.start: 1, aten.arange.start_step: 1}
"""Operators -> the position of the end among their arguments; the start is before it, the step after it."""

PLACES = (
    aten.argmax.default,
    aten.argmin.default,
    aten.argsort.default,
    aten.argsort.stable,
    aten.bucketize.Tensor,
    aten.searchsorted.Tensor,
)
PLACED = (aten.max.dim, aten.min.dim, aten.sort.default, aten.sort.stable, aten.topk.default)
"""Operators that give positions along a dim, as their result (PLACES) or as the second of two (PLACED)."""
SEEN = (
    aten.reshape.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.to.dtype,
    aten.unsqueeze.default,
)


@dataclass(frozen=True)
class _Indexed:
    """`index(x, indices)` with indices for the adjacent dims from `first` on. `own[i]` is the dim of the index block
    along which index i is a range over the whole dim, None if it is no range; `rank` is the number of dims of the
    block."""

    x: fx.Node
    first: int
    indices: tuple[fx.Node, ...]
    own: tuple[int | None, ...]
    rank: int

    @property
    def named(self) -> list[int]:
        """The dims of the block along which some index is a range."""
        return [dim for dim in self.own if dim is not None]


def ranges(gm: fx.GraphModule) -> fx.GraphModule:
    """needs: functional ops, every change of sizes spelled `reshape`.
    does: replaces an `index` some of whose indices are ranges over whole dims: by a permutation if all are, by `gather`
           or `index_select` if others, of dims side by side, are not.
    gives: no index that is a range over a whole dim, except where others are of dims that are apart."""
    return edit.rewrite(gm, {aten.index.Tensor: _without_ranges})


def _without_ranges(node: fx.Node) -> fx.Node | None:
    """An index without its ranges; None where it has none, or two or more others that are apart."""
    found = _read(node)
    others = [] if found is None else [i for i, own in enumerate(found.own) if own is None]
    if found is None or len(others) == len(found.own):
        return None
    if not others:
        return _turned(found, found.x, found.named, node)
    if others[-1] - others[0] >= len(others):
        return None
    return _taken(found if len(others) == 1 else _as_one(found, others, node), others[0], node)


def _as_one(found: _Indexed, others: list[int], node: fx.Node) -> _Indexed:
    """The same with the dims of indices `others`, which are side by side, as one dim (a cell of a matrix by its row and
    column). A column that there is not is a cell that there is not, and none of another row."""
    begin, end, at = others[0], others[-1] + 1, found.first + others[0]
    sizes = [edit.size(found.x, dim) for dim in range(facts.rank(found.x))]
    x = edit.call(node, aten.reshape.default, found.x, [*sizes[:at], -1, *sizes[found.first + end :]])
    index, cells = found.indices[begin], edit.size(x, at)
    for number in others[1:]:
        size = sizes[found.first + number]
        column = _from_front(found.indices[number], size, node)
        below, above = (edit.call(node, aten.lt.Scalar, column, 0), edit.call(node, aten.ge.Scalar, column, size))
        outside = edit.call(node, aten.bitwise_or.Tensor, below, above)
        index = edit.call(node, aten.add.Tensor, edit.call(node, aten.mul.Tensor, index, size), column)
        index = edit.call(node, aten.masked_fill.Scalar, index, outside, cells)
    indices = (*found.indices[:begin], index, *found.indices[end:])
    return replace(found, x=x, indices=indices, own=(*found.own[:begin], None, *found.own[end:]))


def _read(node: fx.Node) -> _Indexed | None:
    """What `node` indexes and how; None where the indexed dims are not adjacent or no index is a range."""
    x, given = edit.args_of(node).values()
    places = [i for i, index in enumerate(given) if index is not None]
    indices = tuple(given[i] for i in places)
    if places != list(range(places[0], places[0] + len(places))) or any(
        facts.dtype(index).itemsize == 1 for index in indices
    ):
        return None
    indices = _unexpanded(indices)
    rank = max(facts.rank(index) for index in indices)
    own = [_along(index, facts.shape(x)[place], rank) for index, place in zip(indices, places, strict=True)]
    found = _Indexed(x, places[0], indices, tuple(own), rank)
    return found if len(set(found.named)) == len(found.named) else None


def _unexpanded(indices: tuple[fx.Node, ...]) -> tuple[fx.Node, ...]:
    """The indices, as they were before they were expanded where another one has these sizes too."""
    for place, index in enumerate(indices):
        if (given := edit.call_of(index, aten.expand.default)) is not None:
            narrow: tuple[Any, ...] = (*indices[:place], given.args[0], *indices[place + 1 :])
            indices = narrow if _block(narrow) == _block(indices) else indices
    return indices


def _block(indices: tuple[fx.Node, ...]) -> tuple[facts.Size, ...]:
    """The sizes that indices are broadcast to, last dim first."""
    aligned = zip_longest(*(reversed(facts.shape(index)) for index in indices), fillvalue=1)
    return tuple(next((n for n in sizes if n != 1), 1) for sizes in aligned)


def _along(index: fx.Node, size: facts.Size, rank: int) -> int | None:
    """The dim, of `rank`, along which `index` is `arange(size)` and constant in all others; None for any other
    index."""
    shape = facts.shape(index)
    wide = [dim for dim, n in enumerate(shape) if n != 1]
    if len(wide) != 1 or shape[wide[0]] != size:
        return None
    made: Any = index
    while (
        isinstance(made, fx.Node)
        and made.target in (aten.unsqueeze.default, aten.reshape.default, aten.to.dtype)
        and not facts.is_float(made)
    ):
        made = made.args[0]
    if not isinstance(made, fx.Node) or made.target not in RANGES or facts.rank(made) != 1:
        return None
    end = RANGES[made.target]
    zero, steps = made.args[:end], made.args[end + 1 :]
    return wide[0] + rank - len(shape) if zero in ((), (0,)) and steps in ((), (1,)) else None


def _turned(found: _Indexed, x: fx.Node, dims: list[int], node: fx.Node) -> fx.Node:
    """`x` with the dims from the first indexed one on permuted to the order of the block's dims; a dim of the block
    that is not in `dims` has size 1."""
    rank, at = facts.rank(x), found.first
    order = [*range(at), *(at + dims.index(dim) for dim in sorted(dims)), *range(at + len(dims), rank)]
    if order != list(range(rank)):
        x = edit.call(node, aten.permute.default, x, order)
    for dim in range(found.rank):
        if dim not in dims:
            x = edit.call(node, aten.unsqueeze.default, x, at + dim)
    return x


def _taken(found: _Indexed, number: int, node: fx.Node) -> fx.Node | None:
    """`x` read along the one dim whose index, number `number`, is no range. None where that index varies along several
    dims of the block that no range goes along, with others between them."""
    index = found.indices[number]
    missing = found.rank - facts.rank(index)
    shape = (1,) * missing + facts.shape(index)
    kept = [dim for dim in range(found.rank) if shape[dim] != 1]
    free = [dim for dim in kept if dim not in found.own]
    if len(free) > 1:
        return _taken_flat(found, number, free, node)
    for dim in reversed(range(missing, found.rank)):
        if dim not in kept:
            index = edit.call(node, aten.squeeze.dim, index, dim - missing)
    at, along = found.first, found.first + number
    index = _from_front(index, edit.size(found.x, along), node)
    if kept == free:  # the same positions for all
        one = index if free else edit.call(node, aten.unsqueeze.default, index, 0)
        x = edit.call(node, aten.index_select.default, found.x, along, one)
    else:
        x = edit.call(node, aten.gather.default, found.x, along, _spread(found, index, kept, free, along, node))
    if not free:
        return _turned(found, edit.call(node, aten.squeeze.dim, x, along), found.named, node)
    return _turned(found, x, [*found.named[: along - at], *free, *found.named[along - at :]], node)


def _taken_flat(found: _Indexed, number: int, free: list[int], node: fx.Node) -> fx.Node | None:
    """As `_taken` where index `number` varies along several dims `free` of the block (neighbours of points): with these
    dims as one. None where others are between them."""
    index, less = found.indices[number], len(free) - 1
    if free[-1] - free[0] != less:
        return None
    first = free[0] - (found.rank - facts.rank(index))
    sizes = [edit.size(index, dim) for dim in range(facts.rank(index))]
    flat = edit.call(node, aten.reshape.default, index, [*sizes[:first], -1, *sizes[first + less + 1 :]])
    own = tuple(dim if dim is None or dim < free[0] else dim - less for dim in found.own)
    indices = (*found.indices[:number], flat, *found.indices[number + 1 :])
    taken = _taken(replace(found, indices=indices, own=own, rank=found.rank - less), number, node)
    if taken is None:
        return None
    at = found.first + free[0]
    around = [edit.size(taken, dim) for dim in range(facts.rank(taken))]
    sizes = [*around[:at], *sizes[first : first + less + 1], *around[at + 1 :]]
    return edit.call(node, aten.reshape.default, taken, sizes)


def _from_front(index: fx.Node, size: int | fx.Node, node: fx.Node) -> fx.Node:
    """`index` with negative numbers, which count from the end of a dim of `size`, made non-negative: `gather` does not
    take them."""
    if _counts(index):
        return index
    below = edit.call(node, aten.lt.Scalar, index, 0)
    other = edit.call(node, aten.add.Tensor, index, size)
    return edit.call(node, aten.where.self, below, other, index)


def _counts(index: Any) -> bool:
    """Whether the numbers of `index` are known to be non-negative: results of argmax, sort, topk and the like, or
    remainders."""
    while (source := edit.call_of(index, *SEEN)) is not None and not facts.is_float(source.args[0]):  # type: ignore[arg-type]  # a tensor
        index = source.args[0]
    if edit.call_of(edit.part_of(index, 1), *PLACED) is not None or edit.call_of(index, *PLACES) is not None:
        return True
    left = edit.call_of(index, aten.remainder.Scalar, aten.clamp_min.default, aten.clamp.default)
    return left is not None and isinstance(left.args[1], (int, float)) and left.args[1] >= 0


def _spread(found: _Indexed, index: fx.Node, kept: list[int], free: list[int], along: int, node: fx.Node) -> fx.Node:
    """`index`, with the dims `kept` of the block, expanded to the sizes of `x` except along dim `along`."""
    at = along - found.first
    dims = [*found.named[:at], *(free or [-1]), *found.named[at:]]  # of the block, for each indexed dim of x
    order = [kept.index(dim) for dim in dims if dim in kept]
    if order != list(range(len(order))):
        index = edit.call(node, aten.permute.default, index, order)
    shape = facts.shape(found.x)
    has = [False] * found.first + [dim in kept for dim in dims] + [False] * (len(shape) - found.first - len(dims))
    for dim, there in enumerate(has):
        if not there:
            index = edit.call(node, aten.unsqueeze.default, index, dim)
    sizes = [-1 if there or dim == along else edit.size(found.x, dim) for dim, there in enumerate(has)]
    return edit.call(node, aten.expand.default, index, sizes)
