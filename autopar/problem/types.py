"""What a search sees: numbers only.

    Problem   nodes with choices, nets (one tensor and everything that reads it), overlap groups, a memory limit
    Solution  one choice index per node, with the bound that the search has proven
    Cost      what a Solution costs, by part

The cost of a solution x (the same for every strategy, `Problem.evaluate`):

    time   = sum_v  cost_s[v][x_v]                                 compute and collectives inside operators
           + sum_t  sum over the *distinct* (use layouts) d that the readers of t ask for of net cost_s[t][x_producer, d]
                    (nets without an overlap group: always exposed)
           + sum_g  max(0, comm_g - hide_g)                        nets and nodes of overlap group g
    memory = sum_v  memory_bytes[v][x_v] + sum_t (the same sum over distinct d) memory_bytes[t][x_producer, d]

Readers that ask for the same layout of the same tensor share one reshard: it is priced once and emitted once.
Infinite entries mark pairs that cannot be: a solution that uses one is infeasible.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autopar.errors import InfeasibleError


@dataclass(frozen=True, eq=False)
class Node:
    """One decision. `cost_s` (seconds per step) and `memory_bytes` (per device) have one entry per choice.

    `hide_s` is the part of `cost_s` under which collectives of overlap group `group` can hide (-1: none).
    """

    name: str
    labels: tuple[str, ...]
    cost_s: np.ndarray
    memory_bytes: np.ndarray
    hide_s: np.ndarray
    group: int = -1


@dataclass(frozen=True, eq=False)
class Use:
    """One reader of a net: for each choice of node `node`, which column of the net's tables it asks for."""

    node: int
    column: np.ndarray  # int[choices of node]


@dataclass(frozen=True, eq=False)
class Net:
    """One tensor: its producer, its readers and what each change of layout costs.

    `row[c]` is the row of choice c of the producer. `cost_s[row, column]` in seconds per step, `memory_bytes` likewise.
    `group` is the overlap group that the cost belongs to, -1 for cost that is always exposed.
    """

    name: str
    producer: int
    row: np.ndarray  # int[choices of producer]
    uses: tuple[Use, ...]
    cost_s: np.ndarray
    memory_bytes: np.ndarray
    group: int = -1


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

    choice: tuple[int, ...]
    strategy: str
    bound_s: float = 0.0
    optimal: bool = False
    note: str = ""


@dataclass(frozen=True, eq=False)
class Problem:
    """Nodes, nets, overlap groups 0..groups-1 and the memory limit in bytes per device (inf: none)."""

    nodes: tuple[Node, ...]
    nets: tuple[Net, ...]
    groups: int = 0
    memory_limit_bytes: float = float("inf")
    name: str = ""
    _check: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        if not self._check:
            return
        for node in self.nodes:
            if not len(node.labels) == len(node.cost_s) == len(node.memory_bytes) == len(node.hide_s):
                raise ValueError(f"node {node.name}: labels, cost_s, memory_bytes and hide_s differ in length")
        for net in self.nets:
            if len(net.row) != len(self.nodes[net.producer].labels):
                raise ValueError(f"net {net.name}: row has {len(net.row)} entries, its producer "
                                 f"{len(self.nodes[net.producer].labels)} choices")

    def evaluate(self, choice: tuple[int, ...]) -> Cost:
        """What `choice` costs; solver-free, and what every strategy is scored by.

        Raises InfeasibleError when the memory limit is exceeded or a forbidden pair is used.
        """
        cost = self.price(choice)
        if not cost.feasible:
            raise InfeasibleError(f"problem {self.name}: the solution uses a forbidden pair of layouts")
        if cost.memory_bytes > self.memory_limit_bytes * (1 + 1e-9):
            raise InfeasibleError(
                f"problem {self.name}: the solution needs {cost.memory_bytes / 2**30:.2f} GiB per device, "
                f"{self.memory_limit_bytes / 2**30:.2f} GiB are there")
        return cost

    def price(self, choice: tuple[int, ...]) -> Cost:
        """As `evaluate`, without raising: an impossible pair costs infinity, and memory may be over the limit."""
        comm, hide = np.zeros(self.groups), np.zeros(self.groups)
        compute, exposed, memory = 0.0, 0.0, 0.0
        for node, c in zip(self.nodes, choice, strict=True):
            compute += float(node.cost_s[c])
            memory += float(node.memory_bytes[c])
            if node.group >= 0:
                hide[node.group] += node.hide_s[c]
        for net in self.nets:
            row = net.row[choice[net.producer]]
            for column in sorted({int(use.column[choice[use.node]]) for use in net.uses}):
                memory += float(net.memory_bytes[row, column])
                if net.group >= 0:
                    comm[net.group] += net.cost_s[row, column]
                else:
                    exposed += float(net.cost_s[row, column])
        over = np.maximum(0.0, comm - hide)
        late = float(over.sum())
        return Cost(compute + exposed + late, memory, compute, exposed + late,
                    float(comm.sum()) - late if np.isfinite(late) else 0.0)
