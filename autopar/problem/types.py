"""What a search sees: numbers only.

    Problem   nodes with choices, nets (one tensor and everything that reads it), overlap groups, a memory limit
    Solution  one choice index per node, with the bound that the search has proven
    Cost      what a Solution costs, by part

The cost of a solution x (the same for every strategy, `Problem.evaluate`):

    time   = sum_v  cost_s[v][x_v] (choices without a lane)
           + sum over stretches of the largest sum_v cost_s[v][x_v] of one of its lanes
             (compute, and collectives inside operators)
           + sum_t  sum over the *distinct* (use layouts) d that the readers of t ask for of net cost_s[t][x_producer,
                    d] (nets without an overlap group: always exposed)
           + sum_g  max(0, comm_g - hide_g)                        nets and nodes of overlap group g
    where a net of a group adds the share `shown` of its cost to what is always exposed and the rest to comm_g
    memory = sum_v  memory_bytes[v][x_v] + sum_t (the same sum over distinct d) memory_bytes[t][x_producer, d]

Readers that ask for the same layout of the same tensor share one reshard: it is priced once and emitted once.
Infinite entries mark pairs that cannot be: a solution that uses one is infeasible.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.errors import InfeasibleError
from autopar.text import gibibytes

Picks = tuple[int, ...]  # for each node of a Problem the number of its choice


@dataclass(frozen=True, eq=False)
class Node:
    """One decision. `cost_s` (seconds per step) and `memory_bytes` (per device) have one entry per choice.

    `hide_s` is the part of `cost_s` under which collectives of overlap group `group` can hide (`group` -1: none can).
    `lane` says in which lane each choice works, -1 for on all ranks (None: all choices do). The lanes of one stretch
    work at the same time, on different ranks.
    """

    name: str
    labels: tuple[str, ...]
    cost_s: np.ndarray
    memory_bytes: np.ndarray
    hide_s: np.ndarray
    group: int = -1
    lane: np.ndarray | None = None  # int[choices]
    # the part of `memory_bytes` that is there only while its scope runs (None: nothing)
    live_bytes: np.ndarray | None = None

    def in_lane(self, lane: int) -> np.ndarray:
        """`cost_s` of the choices that work in `lane` (-1: in none), zero for the others."""
        if self.lane is None:
            return self.cost_s if lane < 0 else np.zeros_like(self.cost_s)
        return np.where(self.lane == lane, self.cost_s, 0.0)


@dataclass(frozen=True, eq=False)
class Groups:
    """Choices by their layout: `order` has those of one layout side by side, `starts` says where each layout begins
    there, `used` which layouts these are."""

    order: np.ndarray
    starts: np.ndarray
    used: np.ndarray

    @staticmethod
    def of(layouts: np.ndarray) -> Groups:
        """From the number of the layout of each choice."""
        order = np.argsort(layouts, kind="stable")
        ordered = layouts[order]
        starts = np.concatenate([[0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1])
        return Groups(order, starts, ordered[starts])


@dataclass(frozen=True, eq=False)
class Use:
    """One reader of a net: for each choice of node `node`, which column of the net's tables it asks for."""

    node: int
    column: np.ndarray  # int[choices of node]

    @cached_property
    def asks(self) -> list[int]:
        """`column` as plain numbers, to be read one by one."""
        found: list[int] = self.column.tolist()
        return found

    @cached_property
    def groups(self) -> Groups:
        """The choices of the node by the column that they ask for."""
        return Groups.of(self.column)


@dataclass(frozen=True, eq=False)
class Net:
    """One tensor: its producer, its readers and what each change of layout costs.

    `row[c]` is the row of choice c of the producer. `cost_s[row, column]` in seconds per step, `memory_bytes` likewise
    per device. `group` is the overlap group in whose compute the cost can hide, -1 where it is always exposed. `shown`
    is the share of the cost that is exposed in any case: steps that compute waits for, and the time by which background
    collectives slow compute down.
    """

    name: str
    producer: int
    row: np.ndarray  # int[choices of producer]
    uses: tuple[Use, ...]
    cost_s: np.ndarray
    memory_bytes: np.ndarray
    group: int = -1
    shown: np.ndarray | float = 0.0  # [rows, columns], or the same for all
    # the part of `memory_bytes` that is there only while its scope runs (None: nothing)
    live_bytes: np.ndarray | None = None

    @cached_property
    def makes(self) -> list[int]:
        """`row` as plain numbers, to be read one by one."""
        found: list[int] = self.row.tolist()
        return found

    @cached_property
    def groups(self) -> Groups:
        """The choices of the producer by the row that they make."""
        return Groups.of(self.row)

    @cached_property
    def shown_s(self) -> np.ndarray:
        """The part of `cost_s` that is always exposed; forbidden entries are infinite here."""
        if self.group < 0:
            return self.cost_s
        forbidden = np.isinf(self.cost_s)
        return np.where(forbidden, np.inf, self.shown * np.where(forbidden, 0.0, self.cost_s))

    @cached_property
    def hideable_s(self) -> np.ndarray:
        """The part of `cost_s` that can hide under compute of its group; always finite, 0 where there is no group."""
        share = 0.0 if self.group < 0 else 1.0 - self.shown
        return share * np.where(np.isinf(self.cost_s), 0.0, self.cost_s)


@dataclass(frozen=True)
class Cost:
    """Seconds per step and bytes per device of one solution."""

    time_s: float
    memory_bytes: float
    compute_s: float
    exposed_s: float
    hidden_s: float

    @property
    def feasible(self) -> bool:
        return bool(np.isfinite(self.time_s))


@dataclass(frozen=True)
class Solution:
    """One choice index per node of the problem.

    `bound_s` is a proven lower bound on the time of every feasible solution (0 when nothing is proven); `strategy` and
    `note` say where it comes from.
    """

    choice: Picks
    strategy: str
    bound_s: float = 0.0
    optimal: bool = False
    note: str = ""


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes, nets, overlap groups 0..groups-1 and the memory limit in bytes per device (inf: none).

    `lanes[l]` is the stretch of lane l: lanes of one stretch work side by side, stretches one after the other.
    """

    nodes: tuple[Node, ...]
    nets: tuple[Net, ...]
    groups: int = 0
    memory_limit_bytes: float = float("inf")
    name: str = ""
    lanes: tuple[int, ...] = ()
    _check: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        if self._check:
            for v, node in enumerate(self.nodes):
                _check_node(node, v, self.groups, len(self.lanes))
            for net in self.nets:
                _check_net(net, self.nodes, self.groups)

    def with_limit(self, limit_bytes: float, name: str | None = None) -> Problem:
        """The same with another memory limit, and another name if one is given."""
        return replace(self, memory_limit_bytes=limit_bytes, name=self.name if name is None else name, _check=False)

    def shown(self) -> Problem:
        """The same without overlap: all collectives are exposed."""
        nodes = tuple([replace(node, group=-1) for node in self.nodes])
        return replace(
            self, nodes=nodes, nets=tuple([replace(net, group=-1) for net in self.nets]), groups=0, _check=False
        )

    def paid(self, byte_s: float) -> Problem:
        """The same with a price in seconds on each byte, in place of a memory limit. Nets with a group are exempt:
        gathered weights, which are held for one block and the next only."""
        nodes = tuple([replace(node, cost_s=node.cost_s + byte_s * node.memory_bytes) for node in self.nodes])
        nets = tuple(
            [replace(net, cost_s=net.cost_s + byte_s * net.memory_bytes) if net.group < 0 else net for net in self.nets]
        )
        return replace(self, nodes=nodes, nets=nets, memory_limit_bytes=float("inf"), _check=False)

    def barred(self, other: Problem) -> Problem:
        """The same without the choices that are forbidden in `other`, a Problem with the same nodes."""
        nodes = [
            replace(node, cost_s=np.where(np.isinf(there.cost_s), np.inf, node.cost_s))
            for node, there in zip(self.nodes, other.nodes, strict=True)
        ]
        return replace(self, nodes=tuple(nodes), _check=False)

    def evaluate(self, choice: Picks) -> Cost:
        """What `choice` costs; solver-free, and what every strategy is scored by.

        Raises InfeasibleError when the memory limit is exceeded or a forbidden pair is used.
        """
        cost = self.price(choice)
        if not cost.feasible:
            raise InfeasibleError(f"problem {self.name}: the solution uses a forbidden pair of layouts")
        if cost.memory_bytes > self.memory_limit_bytes * (1 + 1e-9):
            raise InfeasibleError(
                f"problem {self.name}: the solution needs {gibibytes(cost.memory_bytes)} per device, "
                f"{gibibytes(self.memory_limit_bytes)} are there"
            )
        return cost

    def price(self, choice: Picks) -> Cost:
        """As `evaluate`, without raising: a forbidden pair costs infinity, and memory may exceed the limit."""
        comm, hide = np.zeros(self.groups), np.zeros(self.groups)
        compute, exposed, memory = 0.0, 0.0, 0.0
        lanes = np.zeros((len(self.lanes), 1))
        for node, c in zip(self.nodes, choice, strict=True):
            if node.lane is None or node.lane[c] < 0:
                compute += node.cost_s.item(c)
            else:
                lanes[node.lane[c]] += node.cost_s[c]
            memory += node.memory_bytes.item(c)
            if node.group >= 0:
                hide[node.group] += node.hide_s[c]
        for net in self.nets:
            row = net.makes[choice[net.producer]]
            for column in sorted({use.asks[choice[use.node]] for use in net.uses}):
                memory += net.memory_bytes.item(row, column)
                exposed += net.shown_s.item(row, column)
                if net.group >= 0:
                    comm[net.group] += net.hideable_s[row, column]
        compute += float(self.abreast_s(lanes)[0])
        over = np.maximum(0.0, comm - hide)
        late = float(over.sum())
        return Cost(
            compute + exposed + late,
            memory,
            compute,
            exposed + late,
            float(comm.sum()) - late if np.isfinite(late) else 0.0,
        )

    def beside(self, node: Node) -> np.ndarray | float:
        """[choices] how many lanes work at the same time as the one of each choice, itself counted; 1 for work that is
        in no lane."""
        if node.lane is None:
            return 1.0
        return np.array([1.0 if lane < 0 else self.lanes.count(self.lanes[lane]) for lane in node.lane])

    def abreast_s(self, lanes: np.ndarray) -> np.ndarray:
        """Seconds of work in lanes: [lanes, n] seconds in each lane -> [n], the sum over stretches of the longest lane
        in each."""
        total = np.zeros(lanes.shape[1])
        for stretch in dict.fromkeys(self.lanes):
            total += lanes[[s == stretch for s in self.lanes]].max(0)
        return total


def _check_node(node: Node, index: int, groups: int, lanes: int) -> None:
    """Raises ValueError where the node could not be priced."""
    if not 0 < len(node.labels) == len(node.cost_s) == len(node.memory_bytes) == len(node.hide_s):
        raise ValueError(f"node {node.name}: labels, cost_s, memory_bytes and hide_s differ in length or are empty")
    if np.isnan(node.cost_s).any() or not (np.isfinite(node.memory_bytes) & np.isfinite(node.hide_s)).all():
        raise ValueError(f"node {node.name}: only cost_s may be infinite, and nothing may be NaN")
    if node.lane is not None and not (
        len(node.lane) == len(node.labels) and node.lane.min() >= -1 and node.lane.max() < lanes
    ):
        raise ValueError(f"node {node.name}: lane wants {len(node.labels)} entries in -1..{lanes - 1}, got {node.lane}")
    if not -1 <= node.group < groups:
        raise ValueError(f"node {node.name} is in overlap group {node.group}, the problem has 0..{groups - 1}")


def _check_net(net: Net, nodes: tuple[Node, ...], groups: int) -> None:
    """Raises ValueError where the net could not be priced, or shared reshards would not be exact."""
    if net.cost_s.shape != net.memory_bytes.shape:
        raise ValueError(f"net {net.name}: cost_s is {net.cost_s.shape}, memory_bytes {net.memory_bytes.shape}")
    _check_index(f"net {net.name}: row", net.row, nodes[net.producer], net.cost_s.shape[0])
    if not net.uses:
        raise ValueError(f"net {net.name} has no reader: leave it out")
    for use in net.uses:
        if use.node == net.producer:
            raise ValueError(f"net {net.name}: {nodes[use.node].name} reads what it produces")
        _check_index(
            f"net {net.name}: column of {nodes[use.node].name}", use.column, nodes[use.node], net.cost_s.shape[1]
        )
    if not (net.cost_s >= 0).all() or not (net.memory_bytes >= 0).all() or not np.isfinite(net.memory_bytes).all():
        raise ValueError(f"net {net.name}: cost_s must be in 0..inf, memory_bytes finite and not negative")
    if np.any(np.asarray(net.shown) < 0.0) or np.any(np.asarray(net.shown) > 1.0):
        raise ValueError(f"net {net.name}: the share of its cost that shows is {net.shown}, wanted from 0 to 1")
    if not -1 <= net.group < groups:
        raise ValueError(f"net {net.name} is in overlap group {net.group}, the problem has 0..{groups - 1}")


def _check_index(what: str, index: np.ndarray, node: Node, size: int) -> None:
    if len(index) != len(node.labels):
        raise ValueError(f"{what} has {len(index)} entries, {node.name} has {len(node.labels)} choices")
    if index.min() < 0 or index.max() >= size:
        raise ValueError(f"{what} is in {index.min()}..{index.max()}, the tables have 0..{size - 1}")
