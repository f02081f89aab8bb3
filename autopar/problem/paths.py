"""The ways between layouts on one mesh, as numbers: found once for all the tensors that take them.

    Paths.ways      which way leads from each source to each target
    Paths.seconds   what each way costs for a tensor of some size
    Paths.loads     the same of one way, step by step
    Paths.moved     the same of all ways, by axis
    Paths.gathers   whether an all-gather is among its steps
    Paths.halfway   the share of the tensor that comes on the way, before the last collective
    Paths.held      the share of the tensor that the last new tensor on the way is, NaN where no memory is taken
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from autopar.cluster import Mesh
from autopar.cost.comm import LOCAL, collective_s, group_bytes, link_shares, step_s
from autopar.layout import Entry, Layout, Step, dim_of, fraction, is_placed, is_shard, moving, sections_of, shard, steps
from autopar.problem.hiding import LOCAL_AXIS, Load, split

NO_STEP = -1

LARGE_BYTES = 1e9
"""Of a collective whose starts count for nothing."""


class Ways(NamedTuple):
    """Many ways: the `numbers` of the distinct ones, and `at` [...] which of them is where."""

    numbers: tuple[int, ...]
    at: np.ndarray

    @staticmethod
    def of(ids: Sequence[Sequence[int]]) -> Ways:
        """The ways with these numbers."""
        distinct, at = np.unique(np.array(ids, int), return_inverse=True)
        return Ways(tuple(distinct.tolist()), at.reshape(np.shape(ids)))


@dataclass(eq=False, slots=True)
class _Sized:
    """What was found for tensors of one size that go in buckets of one size: by number of a step its loads, its seconds and these by axis, by number of a way its
    seconds, and by what of it hides those that are waited for."""

    loads: dict[int, list[Load]] = field(default_factory=dict)
    steps: dict[int, float] = field(default_factory=dict)
    ways: dict[int, float] = field(default_factory=dict)
    waited: dict[float, dict[int, float]] = field(default_factory=dict)
    rows: dict[int, list[float]] = field(default_factory=dict)


class Paths:
    """All the ways that were asked for so far, numbered in that order."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.sizes = mesh, tuple(mesh.sizes)
        self._ids: dict[Layout, dict[Layout, int]] = {}
        self._alike: dict[tuple[Layout, Layout], int] = {}  # by ends whose dims are renamed: their ways cost the same
        self._steps: dict[Step, int] = {}
        self._order: list[Step] = []
        self._way: list[list[int]] = []  # of each way: its steps by number
        self._table = np.zeros((0, 1), int)
        self._gathers: list[bool] = []
        self._held: list[float] = []
        self._collectives: list[int] = []
        self._halfway: list[float] = []
        self._shares: dict[int, list[float]] = {}  # of a way: the share of a tensor that a rank has in front of each collective
        self._of_size: dict[tuple[float, float], _Sized] = {}  # by bytes of a tensor, of a bucket

    def ways(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> Ways:
        """[sources, targets]: the way from each to each."""
        src, dst = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
        at_src, at_dst = {s: i for i, s in enumerate(src)}, {d: i for i, d in enumerate(dst)}
        found = Ways.of([[self.number(source, target) for target in dst] for source in src])
        return Ways(found.numbers, found.at[np.ix_([at_src[s] for s in sources], [at_dst[d] for d in targets])])

    def number(self, source: Layout, target: Layout) -> int:
        """The number of one way."""
        known = self._ids.setdefault(source, {})
        return known[target] if target in known else self._find(known, source, target)

    def seconds(self, ways: Ways, size_bytes: float, bucket_bytes: float = 0.0) -> np.ndarray:
        """Seconds of each way for a tensor of `size_bytes`; where it goes in buckets of `bucket_bytes` on a rank, its share of one."""
        known = self._sized(size_bytes, bucket_bytes)
        for number in ways.numbers:
            if number not in known.ways:
                known.ways[number] = sum([self._a_step_s(known, index, size_bytes, bucket_bytes) for index in self._way[number]])
        return np.array([known.ways[number] for number in ways.numbers], float)[ways.at]

    def loads(self, source: Layout, target: Layout, size_bytes: float, bucket_bytes: float = 0.0) -> tuple[Load, ...]:
        """What one way takes, as `seconds`: each step's collective, and local copies around it."""
        return tuple(self._way_loads(self._sized(size_bytes, bucket_bytes), self.number(source, target), size_bytes, bucket_bytes))

    def kinds(self, source: Layout, target: Layout) -> tuple[tuple[str, int], ...]:
        """The steps of one way, each with its axis: what goes in one bucket has the same ones."""
        return tuple([(self._order[index].kind, self._order[index].axis) for index in self._way[self.number(source, target)]])

    def held_bytes(self, source: Layout, target: Layout, size_bytes: float) -> list[float]:
        """Bytes of a tensor of `size_bytes` on a rank in front of each collective of one way."""
        number = self.number(source, target)
        if number not in self._shares:
            self._shares[number] = [fraction(step.before, self.sizes) for step in moving([self._order[index] for index in self._way[number]], self.sizes)]
        return [size_bytes * share for share in self._shares[number]]

    def moved(self, ways: Ways, size_bytes: float, bucket_bytes: float = 0.0) -> np.ndarray:
        """[distinct ways, 1 + 6 axes]: what each takes (problem.net_seconds); `ways.at` says which of them is where."""
        known, axes = self._sized(size_bytes, bucket_bytes), len(self.sizes)
        distinct, at = np.unique(self._padded[list(ways.numbers)], return_inverse=True)
        rows = np.array([self._row(known, step, size_bytes, bucket_bytes) for step in distinct.tolist()])
        each = rows[at.reshape(len(ways.numbers), -1)]
        later, moving = each.copy(), slice(1, 1 + 2 * axes)
        later[np.arange(len(each)), each[..., moving].any(-1).argmax(1)] = 0.0  # all but the first collective
        whole, later = each.sum(1), later.sum(1)
        return np.concatenate([whole[:, :1], whole[:, moving], later[:, moving], whole[:, moving.stop:], later[:, moving.stop:]], 1)

    def _row(self, known: _Sized, step: int, size_bytes: float, bucket_bytes: float) -> list[float]:
        """Of a step the seconds of local copies; by axis those of gathers, of other collectives, and of both by the share that they take of the axis's link."""
        if step not in known.rows:
            axes = len(self.sizes)
            row = known.rows[step] = [0.0] * (1 + 3 * axes)
            for load in self._step_loads(known, step, size_bytes, bucket_bytes) if step != NO_STEP else ():
                if load.axis == LOCAL_AXIS:
                    row[0] += load.seconds
                else:
                    row[1 + axes * (load.kind != "all_gather") + load.axis] += load.seconds
                    row[1 + 2 * axes + load.axis] += load.seconds * load.shares.get(self.link[load.axis], 0.0)
        return known.rows[step]

    @cached_property
    def link(self) -> list[str]:
        """Of each axis the level of the cluster whose link large collectives take most of."""
        each = [link_shares("all_gather", LARGE_BYTES, axis) for axis in self.mesh.axes]
        return [max(shares, key=shares.__getitem__, default="") for shares in each]

    @property
    def _padded(self) -> np.ndarray:
        """[ways, most steps]: the steps of each way, NO_STEP behind the last."""
        if len(self._table) < len(self._way):
            self._table = np.full((len(self._way), max(1, *map(len, self._way))), NO_STEP)
            for row, way in zip(self._table, self._way, strict=True):
                row[:len(way)] = way
        return self._table

    def _sized(self, size_bytes: float, bucket_bytes: float) -> _Sized:
        key = size_bytes, bucket_bytes
        if key not in self._of_size:
            self._of_size[key] = _Sized()
        return self._of_size[key]

    def _a_step_s(self, known: _Sized, index: int, size_bytes: float, bucket_bytes: float) -> float:
        if index not in known.steps:
            known.steps[index] = (sum(load.seconds for load in self._step_loads(known, index, size_bytes, bucket_bytes)) if bucket_bytes else
                                  step_s(self._order[index], size_bytes, self.mesh))
        return known.steps[index]

    def _way_loads(self, known: _Sized, number: int, size_bytes: float, bucket_bytes: float) -> list[Load]:
        return [load for index in self._way[number] for load in self._step_loads(known, index, size_bytes, bucket_bytes)]

    def _step_loads(self, known: _Sized, index: int, size_bytes: float, bucket_bytes: float) -> list[Load]:
        if index not in known.loads:
            known.loads[index] = self._loads_of(self._order[index], size_bytes, bucket_bytes)
        return known.loads[index]

    def _loads_of(self, step: Step, size_bytes: float, bucket_bytes: float) -> list[Load]:
        axis, nbytes = self.mesh.axes[step.axis], group_bytes(step, size_bytes, self.sizes)
        whole_s, alone_s = step_s(step, size_bytes, self.mesh), collective_s(step.kind, nbytes, axis)
        if step.kind in LOCAL:
            return [Load(LOCAL_AXIS, whole_s, {}, step.kind)] if whole_s else []
        together = max(nbytes, bucket_bytes)
        share = nbytes / together if together else 1.0
        moved = [Load(step.axis, share * collective_s(step.kind, together, axis), link_shares(step.kind, together, axis), step.kind)] if alone_s else []
        copies = [Load(LOCAL_AXIS, whole_s - alone_s, {}, "copy")] if whole_s > alone_s else []
        return [*moved, *copies] if step.kind == "all_gather" else [*copies, *moved]

    def waited_s(self, ways: Ways, size_bytes: float, bucket_bytes: float = 0.0, *, later: float = 0.0) -> np.ndarray:
        """Seconds of each way that compute waits for where its collectives run in the background (`hiding.split`), of a tensor of `size_bytes`; with the share
        `later` of all of these but the first."""
        known = self._sized(size_bytes, bucket_bytes).waited.setdefault(later, {})
        for number in ways.numbers:
            if number not in known:
                known[number] = self._waited_s(number, size_bytes, bucket_bytes, later)
        return np.array([known[number] for number in ways.numbers], float)[ways.at]

    def _waited_s(self, number: int, size_bytes: float, bucket_bytes: float, later: float) -> float:
        waited, behind = split(self._way_loads(self._sized(size_bytes, bucket_bytes), number, size_bytes, bucket_bytes))
        return sum(load.seconds for load in waited) + later * sum(load.seconds for load in behind[1:])

    def gathers(self, ways: Ways) -> np.ndarray:
        """bool: whether each way has an all-gather."""
        return np.array([self._gathers[number] for number in ways.numbers], bool)[ways.at]

    def held(self, ways: Ways) -> np.ndarray:
        """The share of the whole tensor that a rank gets memory for, NaN where it gets none: the last step on the way that makes a tensor."""
        return np.array([self._held[number] for number in ways.numbers], float)[ways.at]

    def halfway(self, ways: Ways) -> np.ndarray:
        """The share of the whole tensor that is on a rank on each way, between its first collective and its last one: 0 where that is one."""
        return np.array([self._halfway[number] for number in ways.numbers], float)[ways.at]

    def collectives(self, ways: Ways) -> np.ndarray:
        """How many collectives each way takes, one after the other."""
        return np.array([self._collectives[number] for number in ways.numbers], float)[ways.at]

    def _find(self, known: dict[Layout, int], source: Layout, target: Layout) -> int:
        ends = renamed(source, target)
        number = known[target] = self._alike.setdefault(ends, len(self._way))
        if number < len(self._way):
            return number
        path = steps(*ends, self.sizes)
        self._way.append([self._number(step) for step in path])
        self._gathers.append(any(step.kind == "all_gather" for step in path))
        moved = moving(path, self.sizes)
        self._collectives.append(len(moved))
        self._halfway.append(sum(fraction(step.before, self.sizes) for step in moved[1:]))
        made = [s.after for s in path if not is_placed(s.after[s.axis])]
        self._held.append(fraction(made[-1], self.sizes) if made else math.nan)
        return number

    def _number(self, step: Step) -> int:
        if step not in self._steps:
            self._steps[step] = len(self._order)
            self._order.append(step)
        return self._steps[step]


@cache
def renamed(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Both layouts with tensor dims numbered in the order in which they are met: `layout.steps` treats all dims alike, and prices all but
    the first, which needs no copies; so the way between them is the same but for their names."""
    dims = {0: 0}
    for entry in (*source, *target):
        if is_shard(entry):
            dims.setdefault(dim_of(entry), len(dims))
    if all(dim == number for dim, number in dims.items()):
        return source, target
    first, second = (tuple(_on(dims[dim_of(e)], e) if is_shard(e) else e for e in layout) for layout in (source, target))
    return first, second


@cache
def _on(dim: int, entry: Entry) -> Entry:
    """`entry`, cutting another dim."""
    return shard(dim, sections_of(entry))
