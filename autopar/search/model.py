"""A Problem as linear arrays: the integer program that `ilp` gives to OR-tools.

    x[v,c]    node v takes choice c                                                      binary
    f[u,r,d]  use u reads row r of its net in column d (a flow on layouts, not on choices) continuous
    y[t,r,d]  net t is brought from row r to column d, for one reader or for many         continuous
    e[g]      seconds by which the collectives of overlap group g exceed what hides them  continuous
    m[s]      seconds of stretch s, whose lanes work side by side                         continuous

    minimise  sum cost x (without a lane) + sum m + sum shown y + sum e (`shown`: all of a net without a group)
    (1) sum_c x[v,c] = 1                                                   `_choices`
    (2) sum_d f[u,r,d] = sum over the producer's choices c with row r of x   `_flows`
    (3) sum_r f[u,r,d] = sum over the reader's choices c with column d of x  `_flows`
    (4) y[t,r,d] >= f[u,r,d]; with one reader y is f                       `_shared`
    (5) e[g] >= sum hideable y of the nets of g - sum hide x of its nodes      `_groups`
    (6) sum memory x + sum memory y <= limit                               `_memory`
    (7) m[s] >= sum cost x of lane l, for every lane l of stretch s        `_lanes`

Given an integral x, (2) and (3) force an integral f, so only x needs to be binary. Entries of infinite cost get no
variable. Times are divided by `time_unit_s` and memory by `memory_unit_bytes`, so that coefficients are near one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autopar.problem.types import Net, Problem, Use

_INF = float("inf")


@dataclass
class Linear:
    """min objective.x, row_lower <= matrix x <= row_upper, lower <= x <= upper; the matrix as (row, column, value)
    lists.

    `node_of` and `choice_of` name the one-hot columns, which come first; `time_unit_s` scales the objective back.
    """

    time_unit_s: float
    memory_unit_bytes: float
    columns: int = 0
    rows: int = 0
    objective: list[np.ndarray] = field(default_factory=list)
    upper: list[np.ndarray] = field(default_factory=list)
    memory: list[np.ndarray] = field(default_factory=list)
    entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = field(default_factory=list)
    row_lower: list[np.ndarray] = field(default_factory=list)
    row_upper: list[np.ndarray] = field(default_factory=list)
    starts: np.ndarray = field(default_factory=lambda: np.zeros(1, int))

    def add_columns(self, cost_s: np.ndarray, memory_bytes: np.ndarray, upper: float = _INF) -> np.ndarray:
        """New variables in 0..upper; returns their indices."""
        new = np.arange(self.columns, self.columns + len(cost_s))
        self.columns += len(cost_s)
        self.objective.append(cost_s / self.time_unit_s)
        self.memory.append(memory_bytes / self.memory_unit_bytes)
        self.upper.append(np.full(len(cost_s), upper))
        return new

    def add_rows(self, count: int, lower: float | np.ndarray, upper: float | np.ndarray) -> int:
        """`count` new rows with the same bounds, or one for each; returns the index of the first."""
        first, self.rows = self.rows, self.rows + count
        self.row_lower.append(np.full(count, lower))
        self.row_upper.append(np.full(count, upper))
        return first

    def add_entries(self, rows: np.ndarray, columns: np.ndarray, values: np.ndarray | float) -> None:
        """Coefficients of the matrix; no pair may be given twice."""
        self.entries.append((rows, columns, np.broadcast_to(values, rows.shape)))


def build(problem: Problem) -> Linear:
    """The integer program of `problem`."""
    finite = [n.cost_s[np.isfinite(n.cost_s)] for n in problem.nodes]
    largest_s = max([float(a.max()) for a in finite if a.size] + [_largest(net.cost_s) for net in problem.nets] + [0.0])
    limit = problem.memory_limit_bytes
    largest_bytes = max([float(n.memory_bytes.max(initial=0.0)) for n in problem.nodes] + [1.0])
    model = Linear(largest_s or 1.0, limit if 0 < limit < _INF else largest_bytes)
    _choices(model, problem)
    group_entries = _nets(model, problem)
    _groups(model, problem, group_entries)
    _memory(model, problem)
    _lanes(model, problem)
    return model


def _largest(table: np.ndarray) -> float:
    return float(table[np.isfinite(table)].max(initial=0.0))


def _choices(model: Linear, problem: Problem) -> None:
    """(1), and x of a choice of infinite cost is fixed to 0."""
    sizes = [len(n.cost_s) for n in problem.nodes]
    model.starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
    cost_s = np.concatenate([n.cost_s for n in problem.nodes])
    allowed = np.isfinite(cost_s)
    alone_s = np.concatenate([n.in_lane(-1) for n in problem.nodes])
    x = model.add_columns(np.where(allowed, alone_s, 0.0), np.concatenate([n.memory_bytes for n in problem.nodes]), 1.0)
    model.upper[-1] = allowed.astype(float)
    first = model.add_rows(len(sizes), 1.0, 1.0)
    model.add_entries(first + np.repeat(np.arange(len(sizes)), sizes), x, 1.0)


def _nets(model: Linear, problem: Problem) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Flows and shared reshards of every net; returns (group, columns, seconds) of those that can hide."""
    hidden = []
    for net in problem.nets:
        rows, columns = np.nonzero(np.isfinite(net.cost_s))
        cost_s, memory = net.cost_s[rows, columns], net.memory_bytes[rows, columns]
        exposed_s = net.shown_s[rows, columns]
        if len(net.uses) == 1:
            y = _flows(model, net, net.uses[0], exposed_s, memory)
        else:
            y = _shared(model, net, exposed_s, memory, priced=(cost_s > 0) | (memory > 0))
        if net.group >= 0:
            priced = np.flatnonzero((cost_s > 0) & (y >= 0))
            hidden.append((net.group, y[priced], net.hideable_s[rows, columns][priced]))
    return hidden


def _flows(model: Linear, net: Net, reader: Use, cost_s: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """(2) and (3) for one reader; returns the columns of f, one for each pair that is not forbidden, as `cost_s` and
    `memory` are."""
    rows, columns = np.nonzero(np.isfinite(net.cost_s))
    starts, f = model.starts, model.add_columns(cost_s, memory)
    height, width = net.cost_s.shape
    first = model.add_rows(height, 0.0, 0.0)
    model.add_entries(first + rows, f, 1.0)
    model.add_entries(first + net.row, starts[net.producer] + np.arange(len(net.row)), -1.0)
    first = model.add_rows(width, 0.0, 0.0)
    model.add_entries(first + columns, f, 1.0)
    model.add_entries(first + reader.column, starts[reader.node] + np.arange(len(reader.column)), -1.0)
    return f


def _shared(model: Linear, net: Net, exposed_s: np.ndarray, memory: np.ndarray, priced: np.ndarray) -> np.ndarray:
    """(4): y where it is `priced` (-1 elsewhere), above the flow of every reader."""
    at = np.flatnonzero(priced)
    y = np.full(len(priced), -1)
    y[at] = model.add_columns(exposed_s[at], memory[at])
    nothing = np.zeros_like(exposed_s)
    for reader in net.uses:
        f = _flows(model, net, reader, nothing, nothing)
        row = model.add_rows(len(at), 0.0, _INF) + np.arange(len(at))
        model.add_entries(row, y[at], 1.0)
        model.add_entries(row, f[at], -1.0)
    return y


def _groups(model: Linear, problem: Problem, entries: list[tuple[int, np.ndarray, np.ndarray]]) -> None:
    """(5)."""
    if not problem.groups:
        return
    zero = np.zeros(problem.groups)
    e = model.add_columns(zero + model.time_unit_s, zero)
    first = model.add_rows(problem.groups, 0.0, _INF)
    model.add_entries(first + np.arange(problem.groups), e, 1.0)
    for group, columns, seconds in entries:
        model.add_entries(np.full(len(columns), first + group), columns, -seconds / model.time_unit_s)
    for v, node in enumerate(problem.nodes):
        if node.group >= 0:
            x = model.starts[v] + np.flatnonzero(node.hide_s)
            model.add_entries(
                np.full(len(x), first + node.group), x, node.hide_s[x - model.starts[v]] / model.time_unit_s
            )


def _memory(model: Linear, problem: Problem) -> None:
    """(6), where there is a limit."""
    if np.isinf(problem.memory_limit_bytes):
        return
    memory = np.concatenate(model.memory)
    used = np.flatnonzero(memory)
    limit = problem.memory_limit_bytes / model.memory_unit_bytes
    row = model.add_rows(1, -_INF, limit)
    model.add_entries(np.full(len(used), row), used, memory[used])


def _lanes(model: Linear, problem: Problem) -> None:
    """(7)."""
    stretches = list(dict.fromkeys(problem.lanes))
    if not stretches:
        return
    zero = np.zeros(len(stretches))
    m = model.add_columns(zero + model.time_unit_s, zero)
    first = model.add_rows(len(problem.lanes), 0.0, _INF)
    model.add_entries(first + np.arange(len(problem.lanes)), m[[stretches.index(s) for s in problem.lanes]], 1.0)
    for v, node in enumerate(problem.nodes):
        if node.lane is not None:
            c = np.flatnonzero((node.lane >= 0) & np.isfinite(node.cost_s) & (node.cost_s > 0))
            model.add_entries(first + node.lane[c], model.starts[v] + c, -node.cost_s[c] / model.time_unit_s)
