"""A smaller problem with the same optimum, and the way back.

Choices are dropped that are forbidden (infinite by themselves, or without any finite entry in a net) and that another
choice of the same node dominates: not cheaper in seconds, bytes or hiding in any row or column, whatever the neighbours
do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.errors import InfeasibleError
from autopar.problem.types import Net, Picks, Problem, Use

_PROBES = 24  # features by which most pairs of choices are told apart before all of them are compared


def presolve(problem: Problem) -> tuple[Problem, Callable[[Picks], Picks]]:
    """(smaller problem, restore): `restore(choice of the smaller)` is a choice of `problem` of the same cost.

    The optimal time is the same. Raises InfeasibleError when a node has no choice left.
    """
    kept = [np.arange(len(node.labels)) for node in problem.nodes]
    small, changed = problem, [True] * len(problem.nodes)
    while any(changed):
        keep = [
            _undominated(small, v, allowed) if again else np.flatnonzero(allowed)
            for v, (allowed, again) in enumerate(zip(_allowed(small), changed, strict=True))
        ]
        kept = [old[new] for old, new in zip(kept, keep, strict=True)]
        before, small = small, select(small, keep)
        changed = _changed(before, small)
    return small, lambda choice: tuple(int(k[c]) for k, c in zip(kept, choice, strict=True))


def allowed(problem: Problem) -> tuple[Problem, Callable[[Picks], Picks]]:
    """As `presolve`, and faster: only what is forbidden is dropped."""
    found = Selected.of(problem)
    return found.problem, found.restore


@dataclass(frozen=True, eq=False)
class Selected:
    """A smaller Problem without the forbidden choices of another one: of each node the choices `kept`, of each net's
    table the `cells` (None: all)."""

    problem: Problem
    kept: Sequence[np.ndarray]
    cells: Sequence[tuple[np.ndarray, ...] | None]

    @staticmethod
    def of(problem: Problem) -> Selected:
        """From `problem`. Raises InfeasibleError where a node has no choice left."""
        keep = _allowed(problem)
        kept = [np.flatnonzero(k) for k in keep]
        if all(k.all() for k in keep):
            return Selected(problem, kept, [None] * len(problem.nets))
        return Selected(select(problem, kept), kept, [_cells(net, kept) for net in problem.nets])

    def costs(
        self, node_s: Sequence[np.ndarray], net_s: Sequence[np.ndarray]
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The costs of the smaller Problem, from those of all choices `node_s` and of all pairs `net_s`."""
        return [each[kept] for each, kept in zip(node_s, self.kept, strict=True)], [
            each if cells is None else each[cells] for each, cells in zip(net_s, self.cells, strict=True)
        ]

    def small(self, choice: Picks) -> Picks:
        """A choice of the whole Problem, with nothing forbidden, in choices of the smaller one."""
        return tuple(int(np.searchsorted(kept, c)) for kept, c in zip(self.kept, choice, strict=True))

    def restore(self, choice: Picks) -> Picks:
        """A choice of the smaller Problem in choices of the whole one."""
        return tuple(int(kept[c]) for kept, c in zip(self.kept, choice, strict=True))


def _changed(before: Problem, after: Problem) -> list[bool]:
    """For each node, whether one of its nets lost rows or columns: only then further choices of it may be dominated."""
    found = [False] * len(after.nodes)
    for old, new in zip(before.nets, after.nets, strict=True):
        if old.cost_s.shape != new.cost_s.shape:
            for v in (new.producer, *(use.node for use in new.uses)):
                found[v] = True
    return found


def select(problem: Problem, keep: list[np.ndarray]) -> Problem:
    """`problem` with only the choices `keep[v]` (indices) of node v, and only the rows and columns they use."""
    nodes = tuple(
        replace(
            node,
            labels=tuple(node.labels[c] for c in k),
            cost_s=node.cost_s[k],
            memory_bytes=node.memory_bytes[k],
            hide_s=node.hide_s[k],
            lane=None if node.lane is None else node.lane[k],
        )
        for node, k in zip(problem.nodes, keep, strict=True)
    )
    return replace(problem, nodes=nodes, nets=tuple(_select_net(net, keep) for net in problem.nets), _check=False)


def _select_net(net: Net, keep: list[np.ndarray]) -> Net:
    """A net with only the choices `keep`, and only the rows and columns that they use."""
    asked = [use.column[keep[use.node]] for use in net.uses]
    made = net.row[keep[net.producer]]
    height, width = net.cost_s.shape
    rows, columns = _used(height, [made]), _used(width, asked)
    uses = tuple(Use(use.node, _place(columns)[a]) for use, a in zip(net.uses, asked, strict=True))
    table = _cells(net, keep)
    if table is None:
        return replace(net, row=made, uses=uses)
    return replace(
        net,
        row=_place(rows)[made],
        uses=uses,
        cost_s=net.cost_s[table],
        memory_bytes=net.memory_bytes[table],
        shown=net.shown[table] if isinstance(net.shown, np.ndarray) else net.shown,
    )


def _cells(net: Net, keep: Sequence[np.ndarray]) -> tuple[np.ndarray, ...] | None:
    """The rows and columns of a net that some choice in `keep` uses, as an index; None where these are all."""
    rows, columns = (
        _used(net.cost_s.shape[0], [net.row[keep[net.producer]]]),
        _used(net.cost_s.shape[1], [use.column[keep[use.node]] for use in net.uses]),
    )
    return None if rows.all() and columns.all() else np.ix_(rows, columns)


def _used(count: int, indices: list[np.ndarray]) -> np.ndarray:
    """Whether each of 0 .. count - 1 is among `indices`."""
    used = np.zeros(count, bool)
    for each in indices:
        used[each] = True
    return used


def _place(used: np.ndarray) -> np.ndarray:
    """For each index that is used, its number among the used ones."""
    return np.asarray(np.cumsum(used) - 1)


def _allowed(problem: Problem) -> list[np.ndarray]:
    """For each node, which choices have a finite cost and a finite entry in every net, given the others' choices."""
    allowed = [np.isfinite(node.cost_s) for node in problem.nodes]
    before = -1
    while before != (before := sum(int(np.count_nonzero(a)) for a in allowed)):
        for net in problem.nets:
            finite = np.isfinite(net.cost_s)
            for use in net.uses:
                used = np.zeros(finite.shape[1], bool)
                used[use.column[allowed[use.node]]] = True
                allowed[net.producer] &= finite[:, used].any(1)[net.row]
                rows = np.zeros(finite.shape[0], bool)
                rows[net.row[allowed[net.producer]]] = True
                allowed[use.node] &= finite[rows].any(0)[use.column]
    for node, a in zip(problem.nodes, allowed, strict=True):
        if not a.any():
            raise InfeasibleError(
                f"problem {problem.name}: every choice of {node.name} needs a forbidden pair of layouts "
                f"({len(node.labels)} choices: {', '.join(node.labels[:6])})"
            )
    return allowed


def _undominated(problem: Problem, v: int, allowed: np.ndarray) -> np.ndarray:
    """Allowed choices of node v that no other dominates; of equal ones the first. Greedy order: cheapest first."""
    node = problem.nodes[v]
    lanes = () if node.lane is None else np.unique(node.lane[node.lane >= 0])
    # the same seconds weigh differently in different lanes
    work = np.stack([node.in_lane(lane) for lane in (-1, *lanes)])
    features = np.concatenate(
        [work, node.memory_bytes[None], -node.hide_s[None] * (node.group >= 0), *_net_features(problem, v)]
    ).T
    if np.isinf(problem.memory_limit_bytes):
        features[:, len(work)] = 0.0
    choices = np.flatnonzero(allowed)
    finite = np.where(np.isinf(features), np.finfo(float).max, features)
    order = choices[np.lexsort((choices, *(finite[choices].T[::-1])))]
    rows = finite[order]
    probes = rows[:, np.unique(np.linspace(0, rows.shape[1] - 1, _PROBES).astype(int))].T
    perhaps = np.ones((len(rows), len(rows)), bool)  # [i, j]: whether i may dominate j, by some of the features
    for probe in probes:
        perhaps &= probe[:, None] <= probe
    perhaps &= np.tri(len(rows), k=-1, dtype=bool).T  # a dominating choice comes first in lexicographic order
    kept = np.asarray(~perhaps.any(0))
    for j in np.flatnonzero(~kept):
        kept[j] = not (rows[np.flatnonzero(perhaps[:, j] & kept)] <= rows[j]).all(1).any()
    return np.sort(order[kept])


def _net_features(problem: Problem, v: int) -> list[np.ndarray]:
    """Blocks [anything the neighbours can ask, choices of v] of seconds and bytes; a shared column is its own feature.

    Among readers that share a reshard, a column that another reader asks for may be free; so choices are only compared
    there when they ask for the same column (feature: the column and its negative).
    """
    blocks = []
    for net in problem.nets:
        if net.producer == v:
            blocks += [table[net.row].T for table in (net.shown_s, net.hideable_s, net.memory_bytes)]
        for use in net.uses:
            if use.node != v:
                continue
            if len(net.uses) > 1:
                blocks.append(np.stack([use.column, -use.column]).astype(float))
            else:
                blocks += [table[:, use.column] for table in (net.shown_s, net.hideable_s, net.memory_bytes)]
    return blocks
