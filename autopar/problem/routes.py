"""Routes between layouts on one mesh: the steps of every change of layout, and what they cost for a tensor of a given
size.

A *route* is the list of steps (`layout.steps`) from a source layout to a target layout. Routes are numbered in the
order in which they are asked for, and two routes that differ only in the names of tensor dims share a number, so a
search that asks for the same few routes of thousands of tensors computes each once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np

from autopar.buckets import PACKED, travels_alone
from autopar.cluster import Mesh
from autopar.cost.comm import LOCAL, bucket_copies_s, collective_s, copies_s, group_bytes, link_shares, step_s
from autopar.layout import Entry, Layout, Step, dim_of, fraction, is_placed, is_shard, moving, sections_of, shard, steps
from autopar.problem.hiding import LOCAL_AXIS, Load, split

NO_STEP = -1
"""Fills up the rows of an array of steps, where routes have different numbers of them."""

BY_ITSELF = math.inf
"""For the bytes of its bucket: of a tensor that has collectives of its own there (autopar.buckets.travels_alone)."""

LARGE_BYTES = 1e9
"""A size at which the latency of a collective is negligible."""


class RouteTable(NamedTuple):
    """An array of routes: `numbers` are those of the distinct ones, and `at` [...] indexes `numbers`."""

    numbers: tuple[int, ...]
    at: np.ndarray

    @staticmethod
    def of(numbers: Sequence[Sequence[int]]) -> RouteTable:
        """The table with the routes of these numbers, [...]."""
        distinct, at = np.unique(np.array(numbers, int), return_inverse=True)
        return RouteTable(tuple(distinct.tolist()), at.reshape(np.shape(numbers)))


@dataclass(eq=False, slots=True)
class _Sized:
    """Cached results for tensors of one size in buckets of one size.

    loads       number of a step -> its copies and its collective
    step_s      number of a step -> its seconds
    by_axis_s   number of a step -> its seconds by axis (`_step_by_axis_s`)
    route_s     number of a route -> its seconds
    waited_s    share `later` (`waited_s`) -> number of a route -> the seconds that compute waits for
    """

    loads: dict[int, list[Load]] = field(default_factory=dict)
    step_s: dict[int, float] = field(default_factory=dict)
    by_axis_s: dict[int, list[float]] = field(default_factory=dict)
    route_s: dict[int, float] = field(default_factory=dict)
    waited_s: dict[float, dict[int, float]] = field(default_factory=dict)


class Routes:
    """The routes on `mesh` that were asked for so far, with their prices.

    Sizes of tensors are `size_bytes`, of the whole tensor on one device. `bucket_bytes`, where it is not 0, are the
    bytes of the bucket on a rank in which the tensor travels with others: it then costs its share of the bucket's
    collectives, so that the latency is divided, and is copied into the bucket and out of it. A large
    tensor travels by itself (autopar.buckets).
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.sizes = mesh, tuple(mesh.sizes)
        self._numbers: dict[Layout, dict[Layout, int]] = {}  # source -> target -> number of the route
        self._alike: dict[tuple[Layout, Layout], int] = {}  # (source, target) with renamed dims -> number of the route
        self._step_numbers: dict[Step, int] = {}
        self._steps: list[Step] = []
        self._routes: list[list[int]] = []  # for each route, the numbers of its steps
        self._padded_routes = np.zeros((0, 1), int)
        self._gathers: list[bool] = []
        self._result_share: list[float] = []
        # the larger share of the tensor on a rank, of the two ends; infinite where buckets cannot take the steps
        self._packed_share: list[float] = []
        self._collectives: list[int] = []
        self._intermediate_share: list[float] = []
        # number of a route -> the share of the tensor on a rank before each of its collectives
        self._shares: dict[int, list[float]] = {}
        self._of_size: dict[tuple[float, float], _Sized] = {}  # by size_bytes and bucket_bytes

    def table(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> RouteTable:
        """[sources, targets]: the route from each source to each target."""
        src, dst = list(dict.fromkeys(sources)), list(dict.fromkeys(targets))
        at_src, at_dst = {s: i for i, s in enumerate(src)}, {d: i for i, d in enumerate(dst)}
        found = RouteTable.of([self._from(source, dst) for source in src])
        return RouteTable(found.numbers, found.at[np.ix_([at_src[s] for s in sources], [at_dst[d] for d in targets])])

    def number(self, source: Layout, target: Layout) -> int:
        """The number of the route from `source` to `target`."""
        known = self._numbers.setdefault(source, {})
        return known[target] if target in known else self._find(known, source, target)

    def _from(self, source: Layout, targets: Sequence[Layout]) -> list[int]:
        """The numbers of the routes from `source` to each of `targets`."""
        known = self._numbers.setdefault(source, {})
        return [known[target] if target in known else self._find(known, source, target) for target in targets]

    def seconds(self, table: RouteTable, size_bytes: float, bucket_bytes: float = 0.0) -> np.ndarray:
        """[...]: seconds of each route, all its steps one after the other."""
        if bucket_bytes:
            found = [self._bucket_s(number, size_bytes, bucket_bytes) for number in table.numbers]
        else:
            known = self._sized(size_bytes, 0.0)
            found = [self._route_s(known, number, size_bytes, 0.0) for number in table.numbers]
        return np.array(found, float)[table.at]

    def _bucket_s(self, number: int, size_bytes: float, bucket_bytes: float) -> float:
        """Seconds of one route of a tensor in a bucket of `bucket_bytes`."""
        own_bytes = self._own_bucket(number, size_bytes, bucket_bytes)
        return self._route_s(self._sized(size_bytes, own_bytes), number, size_bytes, own_bytes)

    def _route_s(self, known: _Sized, number: int, size_bytes: float, bucket_bytes: float) -> float:
        """Seconds of one route, `known` or computed."""
        found = known.route_s.get(number)
        if found is None:
            found = known.route_s[number] = sum(
                [self._step_s(known, index, size_bytes, bucket_bytes) for index in self._routes[number]]
            )
        return found

    def _own_bucket(self, number: int, size_bytes: float, bucket_bytes: float) -> float:
        """`bucket_bytes` of a tensor on one route; BY_ITSELF where it is too large to be packed, 0 where its steps are
        not those of buckets."""
        share = self._packed_share[number]
        if not bucket_bytes or math.isinf(share):
            return 0.0
        return BY_ITSELF if travels_alone(share * size_bytes) else bucket_bytes

    def loads(self, source: Layout, target: Layout, size_bytes: float, bucket_bytes: float = 0.0) -> tuple[Load, ...]:
        """The loads of one route, in order: the collective of each step, and the local copies before or after it. Their
        sum is the `seconds` of the route."""
        number = self.number(source, target)
        return tuple(self._route_loads(number, size_bytes, self._own_bucket(number, size_bytes, bucket_bytes)))

    def kinds(self, source: Layout, target: Layout) -> tuple[tuple[str, int], ...]:
        """(kind, mesh axis) of each step of one route. Tensors share a bucket only where these are equal."""
        return tuple(
            [(self._steps[index].kind, self._steps[index].axis) for index in self._routes[self.number(source, target)]]
        )

    def held_bytes(self, source: Layout, target: Layout, size_bytes: float) -> list[float]:
        """Bytes on a rank before each collective of one route."""
        number = self.number(source, target)
        if number not in self._shares:
            self._shares[number] = [
                fraction(step.before, self.sizes)
                for step in moving([self._steps[index] for index in self._routes[number]], self.sizes)
            ]
        return [size_bytes * share for share in self._shares[number]]

    def seconds_by_axis(self, table: RouteTable, size_bytes: float, bucket_bytes: float) -> np.ndarray:
        """[distinct routes, 1 + 6 axes]: the quantities of problem.net_seconds.NetSeconds for each of
        `table.numbers`."""
        axes, numbers = len(self.sizes), list(table.numbers)
        buckets = (0.0, bucket_bytes, BY_ITSELF)
        which = [buckets.index(self._own_bucket(number, size_bytes, bucket_bytes)) for number in numbers]
        distinct, at = np.unique(3 * self._padded[numbers] + np.array(which)[:, None], return_inverse=True)
        rows = np.array([self._step_by_axis_s(key // 3, size_bytes, buckets[key % 3]) for key in distinct.tolist()])
        each = rows[at.reshape(len(table.numbers), -1)]
        later, moving = each.copy(), slice(1, 1 + 2 * axes)
        later[np.arange(len(each)), each[..., moving].any(-1).argmax(1)] = 0.0  # all but the first collective
        whole, later = each.sum(1), later.sum(1)
        return np.concatenate(
            [whole[:, :1], whole[:, moving], later[:, moving], whole[:, moving.stop :], later[:, moving.stop :]], 1
        )

    def _step_by_axis_s(self, step: int, size_bytes: float, bucket_bytes: float) -> list[float]:
        """[1 + 3 axes] of one step: seconds of local copies; then by axis those of all-gathers, those of other
        collectives, and both times the share of the axis's busiest link that they use. All 0 for NO_STEP."""
        known = self._sized(size_bytes, bucket_bytes)
        if step not in known.by_axis_s:
            axes = len(self.sizes)
            row = known.by_axis_s[step] = [0.0] * (1 + 3 * axes)
            for load in self._step_loads(known, step, size_bytes, bucket_bytes) if step != NO_STEP else ():
                if load.axis == LOCAL_AXIS:
                    row[0] += load.seconds
                else:
                    row[1 + axes * (load.kind != "all_gather") + load.axis] += load.seconds
                    row[1 + 2 * axes + load.axis] += load.seconds * load.shares.get(self.busiest_level[load.axis], 0.0)
        return known.by_axis_s[step]

    @cached_property
    def busiest_level(self) -> list[str]:
        """For each axis, the level of the cluster whose link large collectives use most; empty for an axis of one
        rank."""
        each = [link_shares("all_gather", LARGE_BYTES, axis) for axis in self.mesh.axes]
        return [max(shares, key=shares.__getitem__, default="") for shares in each]

    @property
    def _padded(self) -> np.ndarray:
        """[routes, most steps]: the numbers of the steps of each route, NO_STEP after the last."""
        if len(self._padded_routes) < len(self._routes):
            self._padded_routes = np.full((len(self._routes), max(1, *map(len, self._routes))), NO_STEP)
            for row, route in zip(self._padded_routes, self._routes, strict=True):
                row[: len(route)] = route
        return self._padded_routes

    def _sized(self, size_bytes: float, bucket_bytes: float) -> _Sized:
        key = size_bytes, bucket_bytes
        if key not in self._of_size:
            self._of_size[key] = _Sized()
        return self._of_size[key]

    def _step_s(self, known: _Sized, index: int, size_bytes: float, bucket_bytes: float) -> float:
        if index not in known.step_s:
            known.step_s[index] = (
                sum(load.seconds for load in self._step_loads(known, index, size_bytes, bucket_bytes))
                if bucket_bytes
                else step_s(self._steps[index], size_bytes, self.mesh)
            )
        return known.step_s[index]

    def _route_loads(self, number: int, size_bytes: float, bucket_bytes: float) -> list[Load]:
        known = self._sized(size_bytes, bucket_bytes)
        return [
            load for index in self._routes[number] for load in self._step_loads(known, index, size_bytes, bucket_bytes)
        ]

    def _step_loads(self, known: _Sized, index: int, size_bytes: float, bucket_bytes: float) -> list[Load]:
        if index not in known.loads:
            known.loads[index] = self._loads_of(self._steps[index], size_bytes, bucket_bytes)
        return known.loads[index]

    def _loads_of(self, step: Step, size_bytes: float, bucket_bytes: float) -> list[Load]:
        """The loads of one step: a local one alone, or a collective (of a bucket, the tensor's share) with the copies
        around it, which follow a gather and precede others."""
        axis, nbytes = self.mesh.axes[step.axis], group_bytes(step, size_bytes, self.sizes)
        if step.kind in LOCAL:
            whole_s = step_s(step, size_bytes, self.mesh)
            return [Load(LOCAL_AXIS, whole_s, {}, step.kind)] if whole_s else []
        packed = bucket_bytes not in (0.0, BY_ITSELF)
        together = max(nbytes, bucket_bytes) if packed else nbytes
        share = nbytes / together if together else 1.0
        moved_s = share * collective_s(step.kind, together, axis)
        copied_s = (
            bucket_copies_s(step, size_bytes, self.mesh, share if packed else None)
            if bucket_bytes
            else copies_s(step, size_bytes, self.mesh)
        )
        moved = [Load(step.axis, moved_s, link_shares(step.kind, together, axis), step.kind, nbytes)] if moved_s else []
        copies = [Load(LOCAL_AXIS, copied_s, {}, "copy")] if copied_s else []
        return [*moved, *copies] if step.kind == "all_gather" else [*copies, *moved]

    def waited_s(
        self, table: RouteTable, size_bytes: float, bucket_bytes: float = 0.0, *, later: float = 0.0
    ) -> np.ndarray:
        """[...]: seconds of each route that compute waits for where its collectives run in the background
        (`hiding.split`): those of its local copies, and the share `later` of those of its collectives after the first
        one."""
        found = []
        for number in table.numbers:
            own_bytes = self._own_bucket(number, size_bytes, bucket_bytes)
            known = self._sized(size_bytes, own_bytes).waited_s.setdefault(later, {})
            if number not in known:
                known[number] = self._route_waited_s(number, size_bytes, own_bytes, later)
            found.append(known[number])
        return np.array(found, float)[table.at]

    def _route_waited_s(self, number: int, size_bytes: float, bucket_bytes: float, later: float) -> float:
        waited, behind = split(self._route_loads(number, size_bytes, bucket_bytes))
        return sum(load.seconds for load in waited) + later * sum(load.seconds for load in behind[1:])

    def gathers(self, table: RouteTable) -> np.ndarray:
        """bool [...]: whether each route has an all-gather."""
        return np.array([self._gathers[number] for number in table.numbers], bool)[table.at]

    def result_share(self, table: RouteTable) -> np.ndarray:
        """[...]: the share of the whole tensor that the result of each route has on a rank: that of the last step which
        allocates a tensor, NaN where none does."""
        return np.array([self._result_share[number] for number in table.numbers], float)[table.at]

    def intermediate_share(self, table: RouteTable) -> np.ndarray:
        """[...]: the shares of the whole tensor on a rank between the collectives of each route, added up: 0 where
        there is one collective at most."""
        return np.array([self._intermediate_share[number] for number in table.numbers], float)[table.at]

    def collectives(self, table: RouteTable) -> np.ndarray:
        """[...]: the number of collectives of each route."""
        return np.array([self._collectives[number] for number in table.numbers], float)[table.at]

    def _find(self, known: dict[Layout, int], source: Layout, target: Layout) -> int:
        ends = renamed(source, target)
        number = known[target] = self._alike.setdefault(ends, len(self._routes))
        if number < len(self._routes):
            return number
        route = steps(*ends, self.sizes)
        self._routes.append([self._step_number(step) for step in route])
        self._gathers.append(any(step.kind == "all_gather" for step in route))
        moved = moving(route, self.sizes)
        self._collectives.append(len(moved))
        self._intermediate_share.append(sum(fraction(step.before, self.sizes) for step in moved[1:]))
        made = [s.after for s in route if not is_placed(s.after[s.axis])]
        self._packed_share.append(
            max(fraction(source, self.sizes), fraction(target, self.sizes))
            if all(step.kind in PACKED for step in route if self.sizes[step.axis] > 1)
            else math.inf
        )
        self._result_share.append(fraction(made[-1], self.sizes) if made else math.nan)
        return number

    def _step_number(self, step: Step) -> int:
        if step not in self._step_numbers:
            self._step_numbers[step] = len(self._steps)
            self._steps.append(step)
        return self._step_numbers[step]


@cache
def renamed(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Both layouts with their tensor dims renumbered in the order in which they occur; dim 0 keeps its number, since
    collectives along it need no copies. All other dims cost the same, so the route between the renamed layouts has the
    price of that between the given ones."""
    dims = {0: 0}
    for entry in (*source, *target):
        if is_shard(entry):
            dims.setdefault(dim_of(entry), len(dims))
    if all(dim == number for dim, number in dims.items()):
        return source, target
    first, second = (
        tuple(_along(dims[dim_of(e)], e) if is_shard(e) else e for e in layout) for layout in (source, target)
    )
    return first, second


@cache
def _along(dim: int, entry: Entry) -> Entry:
    """`entry` with its shards along tensor dim `dim`."""
    return shard(dim, sections_of(entry))
