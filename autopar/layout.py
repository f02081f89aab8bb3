"""Layouts, and the steps that lead from one to another.

A layout has one entry per mesh axis:

    R            replicated
    S<d>         tensor dim d is cut into contiguous chunks, as torch.chunk cuts (the last ones may be short or empty)
    S<d>/<k>     dim d is k equal sections side by side (q, k, v in one weight), and each section is cut
    S<d>/<a:b:c> the same with sections of sizes a : b : c
    P            each rank holds a part of a sum; Pmax, Pmin: of a maximum, a minimum
    O<c>         coordinate c holds the whole value, the others nothing: dim 0 is empty there (operator placement)

and is written `"S0,R"`. Where several axes cut the same dim, the earlier axis is the major one.

`steps(src, dst, sizes)` is the one place that decides which collectives a change of layout takes: the cost model prices
these steps and the runtime executes them, so price and execution cannot drift apart.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from autopar.errors import LayoutError

Entry = str
Layout = tuple[Entry, ...]
Part = TypeVar("Part")

PARTIAL = ("P", "Pmax", "Pmin")
NO_GRAD: Entry = "-"  # the gradient entry of a value that has no gradient


@dataclass(frozen=True, slots=True)
class Step:
    """One collective (or local operation) of a reshard, on one mesh axis.

    `kind` is all_gather, all_reduce, reduce_scatter, all_to_all, broadcast (from the one coordinate that has the
    value), slice (keep the own chunk; for O<c>, keep all on c and nothing elsewhere) or mask (a partial sum that is the
    value on one coordinate, 0 or that of O<c>, and zeros elsewhere). `before` and `after` are whole layouts.
    """

    kind: str
    axis: int
    before: Layout
    after: Layout


MOST_SECTIONS, DIGITS = 1 << 20, 18
"""The most sections of one dim, and the most digits of a number in a layout: no tensor has more."""
LOCAL = ("slice", "mask")
"""Kinds of steps that a rank does by itself, without a collective."""


def parse(text: str) -> Layout:
    """`"S0,R"` -> `("S0", "R")`. Raises LayoutError on anything that is not a layout."""
    layout = tuple(part.strip() for part in text.split(",")) if text else ()
    for entry in layout:
        _parts(entry)
    return layout


def show(layout: Layout) -> str:
    """The text of a layout, the inverse of `parse`."""
    return ",".join(layout)


def is_shard(entry: Entry) -> bool:
    """Whether the entry cuts a dim."""
    return entry[0] == "S"


def is_partial(entry: Entry) -> bool:
    """Whether each rank holds a part of a sum (or of a maximum, a minimum)."""
    return entry[0] == "P"


def is_placed(entry: Entry) -> bool:
    """Whether one coordinate holds the whole value and the others zeros."""
    return entry[0] == "O"


def placed_on(entry: Entry) -> int:
    """The coordinate that an O entry names; raises LayoutError on other entries."""
    _parts(entry)
    if not is_placed(entry):
        raise LayoutError(f"entry {entry!r} names no coordinate")
    return int(entry[1:])


def absent(layout: Layout, coord: Sequence[int]) -> bool:
    """Whether the rank at `coord` holds nothing under `layout`, because the value is placed on another coordinate."""
    return any(is_placed(e) and placed_on(e) != c for e, c in zip(layout, coord, strict=True))


def dim_of(entry: Entry) -> int:
    """The tensor dim that an S entry cuts; raises LayoutError on other entries."""
    dim = _parts(entry)[0]
    if dim is None:
        raise LayoutError(f"entry {entry!r} cuts no dim")
    return dim


def sections_of(entry: Entry) -> tuple[int, ...]:
    """The relative sizes of the sections of an S entry; `(1,)` for a plain one."""
    return _parts(entry)[1]


def in_order(entry: Entry) -> bool:
    """Whether the parts of all ranks under an S entry lie one behind the other in memory, as collectives cut and join
    them: along dim 0, without sections."""
    return dim_of(entry) == 0 and len(sections_of(entry)) == 1


def shard(dim: int, sections: Sequence[int] = (1,)) -> Entry:
    """The entry that cuts `dim`, section by section where there is more than one; empty sections do not count."""
    sections = [size for size in sections if size] or [1]
    if len(sections) == 1:
        return f"S{dim}"
    unit = math.gcd(*sections)
    weights = [s // unit for s in sections]
    if all(w == 1 for w in weights):
        return f"S{dim}/{len(weights)}"
    return f"S{dim}/{':'.join(map(str, weights))}"


@cache
def _parts(entry: Entry) -> tuple[int | None, tuple[int, ...]]:
    """The dim that an entry cuts (None: it cuts none), and the relative sizes of its sections. Raises LayoutError for
    text that is no entry."""
    if entry == "R" or entry in PARTIAL:
        return None, (1,)
    if entry[:1] == "O" and _number(entry[1:]):
        return None, (1,)
    head, slash, tail = entry.partition("/")
    if head[:1] == "S" and _number(head[1:]):
        if not slash:
            return int(head[1:]), (1,)
        weights = tail.split(":")
        if all(_number(w) and int(w) > 0 for w in weights) and (len(weights) > 1 or int(tail) <= MOST_SECTIONS):
            sections = tuple(map(int, weights)) if len(weights) > 1 else (1,) * int(weights[0])
            if len(sections) > 1:
                return int(head[1:]), sections
    raise LayoutError(
        f"{entry!r} is not a layout entry; expected R, P, Pmax, Pmin, O1, S0, S2/3 (of at most {MOST_SECTIONS} "
        "sections) or S2/4:1:1"
    )


def _number(text: str) -> bool:
    """Whether `text` is a whole number in plain digits, no longer than a size can be."""
    return text.isascii() and text.isdigit() and len(text) <= DIGITS


@cache
def cutters(layout: Layout, dim: int) -> tuple[int, ...]:
    """The axes that cut tensor dim `dim`, major first."""
    return tuple(a for a, e in enumerate(layout) if is_shard(e) and dim_of(e) == dim)


def ways_of(layout: Layout, dim: int, sizes: Sequence[int]) -> int:
    """Over how many ranks of a mesh of so many `sizes` tensor dim `dim` is cut."""
    return math.prod(sizes[axis] for axis in cutters(layout, dim))


def divisible(size: int, ways: int) -> str:
    """Words for an error: the sizes next to `size` that divide evenly by `ways`."""
    below, above = size // ways * ways, -(-size // ways) * ways
    return f"{below} or {above}" if below else str(above)


@cache
def crowded(layout: Layout) -> tuple[int, ...]:
    """The tensor dims that more than one axis cuts."""
    dims = [dim_of(e) for e in layout if is_shard(e)]
    return tuple(sorted({dim for dim in dims if dims.count(dim) > 1}))


@cache
def consistent(layout: Layout) -> bool:
    """Whether all the axes that cut one dim agree on its sections (otherwise no rank order describes the pieces)."""
    found: dict[int, tuple[int, ...]] = {}
    return all(found.setdefault(dim_of(e), sections_of(e)) == sections_of(e) for e in layout if is_shard(e))


def fraction(layout: Layout, sizes: Sequence[int]) -> float:
    """The share of the whole tensor that one rank holds; under O<c> the one at c."""
    ways = 1
    for entry, n in zip(layout, sizes, strict=True):
        if is_shard(entry):
            ways *= n
    return 1.0 / ways


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """`[start, stop)` of chunk `index` when `size` is cut as torch.chunk cuts it (trailing chunks may be empty)."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def pieces(size: int, layout: Layout, dim: int, sizes: Sequence[int], coord: Sequence[int]) -> list[tuple[int, int]]:
    """The `[start, stop)` ranges of dim `dim` that the rank at `coord` holds, one per section."""
    if dim == 0 and absent(layout, coord):
        return []
    axes = cutters(layout, dim)
    if not axes:
        return [(0, size)]
    sections = sections_of(layout[axes[0]])
    unit, rest = divmod(size, sum(sections))
    if rest and len(sections) > 1:
        raise LayoutError(f"dim {dim} of size {size} has no sections {sections}")
    bounds, start = [], 0
    for weight in sections:
        length = size if len(sections) == 1 else weight * unit
        lo, hi = start, start + length
        for axis in axes:
            first, last = chunk(hi - lo, sizes[axis], coord[axis])
            lo, hi = lo + first, lo + last
        bounds.append((lo, hi))
        start += length
    return bounds


def local_shape(shape: Sequence[int], layout: Layout, sizes: Sequence[int], coord: Sequence[int]) -> tuple[int, ...]:
    """The shape of the part that the rank at `coord` holds of a tensor of shape `shape`."""
    return tuple(sum(hi - lo for lo, hi in pieces(n, layout, d, sizes, coord)) for d, n in enumerate(shape))


@cache
def most_elements(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...]) -> int:
    """The elements on the rank that holds the most of a tensor of `shape`: the first of every axis that cuts it,
    because later chunks are never longer."""
    cut = tuple(e if is_shard(e) else "R" for e in layout)
    return math.prod(local_shape(shape, cut, sizes, (0,) * len(sizes)))


def fits(shape: Sequence[int], layout: Layout, sizes: Sequence[int], even_dims: Sequence[int] = ()) -> bool:
    """Whether a tensor of `shape` can lie so: every section divides evenly, dims in `even_dims` too, no rank is forced
    empty."""
    if not consistent(layout):
        return False
    for dim, size in enumerate(shape):
        axes = cutters(layout, dim)
        if not axes:
            continue
        exact = len(sections_of(layout[axes[0]])) > 1 or dim in even_dims
        if size < math.prod(sizes[a] for a in axes) or (exact and not _divides(size, layout, axes, sizes)):
            return False
    return all(dim_of(e) < len(shape) for e in layout if is_shard(e))


def even(shape: Sequence[int], layout: Layout, sizes: Sequence[int]) -> bool:
    """Whether all ranks have equal parts of a tensor of `shape`."""
    return all(_divides(size, layout, axes, sizes) for dim, size in enumerate(shape) if (axes := cutters(layout, dim)))


def _divides(size: int, layout: Layout, axes: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether a dim of `size`, and every section of it, divides evenly among the `axes` that cut it."""
    sections, ways = sections_of(layout[axes[0]]), math.prod(sizes[a] for a in axes)
    unit, rest = divmod(size, sum(sections))
    return not rest and all(weight * unit % ways == 0 for weight in sections)


@cache
def steps(src: Layout, dst: Layout, sizes: tuple[int, ...]) -> tuple[Step, ...]:
    """The cheapest sequence of steps from `src` to `dst` on a mesh of axis sizes `sizes`, by bytes received per rank.

    Deterministic, and independent of tensor and cluster, so that every rank and every later version of the plan does
    the same. Raises LayoutError when the layouts do not belong to that mesh.
    """
    if not len(src) == len(dst) == len(sizes):
        raise LayoutError(f"layouts {show(src)} and {show(dst)} do not belong to a mesh of {len(sizes)} axes")
    for layout in (src, dst):
        if not consistent(layout):
            raise LayoutError(f"layout {show(layout)} cuts one dim into different sections on different axes")
    changed = [axis for axis in range(len(sizes)) if src[axis] != dst[axis]]
    if len(changed) == 1 and sizes[changed[0]] > 1 and (kind := _kind(src, dst, changed[0])):
        return (Step(kind, changed[0], src, dst),)  # one collective on one axis: no way round is cheaper
    queue: list[tuple[float, int, Layout, tuple[Step, ...]]] = [(0.0, 0, src, ())]
    via = [tuple(dict.fromkeys(("R", a, b))) for a, b in zip(src, dst, strict=True)]
    done: dict[Layout, None] = {}
    tie = 0
    while queue:
        spent, _, here, path = heapq.heappop(queue)
        if here == dst:
            return path
        if here in done:
            continue
        done[here] = None
        for step, weight in _moves(here, via, sizes):
            if step.after not in done:
                tie += 1
                heapq.heappush(queue, (spent + weight + 1e-4, tie, step.after, (*path, step)))
    raise LayoutError(f"no way from layout {show(src)} to {show(dst)}")


def legs(parts: Sequence[Part], moves: Callable[[Part], bool]) -> list[tuple[Part, ...]]:
    """`parts` (the steps of a reshard in order) divided into legs: each leg ends with a collective, a part that `moves`
    between ranks; the last leg has only local parts and may be empty.

    This is the one rule of what runs in the background for weights and their gradients: the collective that ends a leg.
    It begins when the collective of the leg before is done and the local parts after that have run. Compute in between
    hides it; local parts count as compute. `parts` are steps in the runtime, seconds in prices and in the simulator.
    """
    found: list[list[Part]] = [[]]
    for part in parts:
        found[-1].append(part)
        if moves(part):
            found.append([])
    return [tuple(leg) for leg in found]


def moving(way: Sequence[Step], sizes: Sequence[int]) -> tuple[Step, ...]:
    """The steps between ranks: the collectives."""
    return tuple(step for step in way if crosses(step, sizes))


def crosses(step: Step, sizes: Sequence[int]) -> bool:
    """Whether a step is a collective, over two ranks or more."""
    return step.kind not in LOCAL and sizes[step.axis] > 1


def _moves(here: Layout, via: Sequence[tuple[Entry, ...]], sizes: tuple[int, ...]) -> list[tuple[Step, float]]:
    """The steps from `here` that bring one axis to another of its entries in `via`, with the share of the tensor that a
    rank receives."""
    out = []
    for axis, entry in enumerate(here):
        if sizes[axis] == 1:
            out += [(Step("slice", axis, here, _put(here, axis, e)), 0.0) for e in via[axis] if e != entry]
            continue
        for target in via[axis]:
            if target != entry and (move := _move(here, axis, target, sizes)):
                out.append(move)
    return out


@cache
def _move(here: Layout, axis: int, target: Entry, sizes: tuple[int, ...]) -> tuple[Step, float] | None:
    """The one collective that brings `axis` to `target`, with the share of the tensor that a rank receives; None where
    there is none."""
    after = _put(here, axis, target)
    kind = _kind(here, after, axis)
    if kind is None:
        return None
    n = sizes[axis]
    held = fraction(here, sizes) * (n - 1) / n
    weight = {
        "all_gather": held * n,
        "all_reduce": 2 * held,
        "reduce_scatter": held,
        "all_to_all": held,
        "broadcast": held,
    }
    return Step(kind, axis, here, after), weight.get(kind, 1e-6)


def _put(layout: Layout, axis: int, entry: Entry) -> Layout:
    """`layout` with `entry` on one axis."""
    return (*layout[:axis], entry, *layout[axis + 1 :])


@cache
def _kind(before: Layout, after: Layout, axis: int) -> str | None:
    """The collective that does this one change on one axis, or None where no single one does."""
    src, dst = before[axis], after[axis]
    if (is_shard(src) and not _is_minor(before, axis)) or (is_shard(dst) and not _is_minor(after, axis)):
        return None
    if not consistent(after):
        return None
    if is_shard(src):
        if dst == "R":
            return "all_gather"
        return "all_to_all" if is_shard(dst) and dim_of(src) != dim_of(dst) else None
    if is_placed(src):
        return {"R": "broadcast", "P": "mask"}.get(dst)
    if src == "R":
        return "slice" if is_shard(dst) or is_placed(dst) else "mask" if dst == "P" else None
    if dst == "R":
        return "all_reduce"
    return "reduce_scatter" if src == "P" and is_shard(dst) else None


def _is_minor(layout: Layout, axis: int) -> bool:
    """Whether no later axis cuts the dim that `axis` cuts: only such an axis can be changed by itself."""
    return cutters(layout, dim_of(layout[axis]))[-1] == axis
