"""A lower bound on the time of every feasible solution (Lagrangian relaxation), and the choices that it rules out.
Called by search.exact, and by search.ilp for a quick bound of one Problem among several.

The memory limit and the overlap of each group g are relaxed, with prices y >= 0 (seconds per byte) and 0 <= mu_g <= 1
(seconds of time per second by which the collectives of g exceed the compute that hides them). For any such prices the
time of a feasible solution is at least

    sum_v (cost + y memory - mu_g hide)[x_v] + sum_t (shown + mu_g hideable + y memory)[distinct reshards] - y limit

with v the nodes and t the nets. Work in one of the n lanes of a stretch counts 1/n, because the longest lane is at
least the mean. This is a sum of functions of single nodes and nets, so its minimum is bounded from below by moving cost
between nets and nodes (search.messages). A choice is ruled out where the bound with that choice fixed exceeds the time
of a known solution. y and mu follow the subgradient at solutions that are decoded from the messages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from autopar.problem.types import Net, Picks, Problem
from autopar.search.descent import better, descend
from autopar.search.messages import FORBIDDEN, MAX_SHARED, Messages, split
from autopar.search.state import State

ROUNDS = 60  # at most: two sweeps of messages and one step of the prices each
_ENTRIES = 40_000.0  # table entries that take as long as the fixed cost of one part of a net
_IDLE = 4  # rounds without progress until it ends: the LP that follows does better
_SLACK = 1e-9  # relative: a choice is ruled out only when it is worse than the known solution by more


@dataclass
class Bound:
    """The result: `bound_s` holds for every feasible solution. `choice` is the best known solution, and none that is
    better uses a choice outside of `keep` (per node, indices). `rounds` is how many were run."""

    bound_s: float
    choice: Picks
    keep: list[np.ndarray]
    rounds: int


def effort(problem: Problem) -> float:
    """The cost of one round of `bound`, in units of about 0.2 ms: one for every part of a net, and one for every
    _ENTRIES entries of its tables."""
    parts = [
        (net.cost_s.size, min(MAX_SHARED, len(net.uses) - first))
        for net in problem.nets
        for first in range(0, len(net.uses), MAX_SHARED)
    ]
    return max(1.0, sum(1 + size * 2**uses / _ENTRIES for size, uses in parts))


def bound(
    problem: Problem,
    known: tuple[int, ...],
    *,
    deadline: float,
    rounds: int = ROUNDS,
    cutoff_s: float = float("inf"),
    state: State | None = None,
) -> Bound:
    """Bound `problem` from below, given a feasible solution `known`.

    Stops when the bound is tight or reaches `cutoff_s`, after `rounds`, at `deadline` (time.perf_counter; one round is
    always done), or after _IDLE rounds without progress: the bound did not rise, no choice was ruled out, no better
    solution was found. `state` is a State of `problem` to work with.
    """
    dual = _Dual(problem, known, state or State(problem, known))
    done = idle = 0
    while (
        done < rounds
        and idle < _IDLE
        and (done == 0 or time.perf_counter() < deadline)
        and dual.best_s < cutoff_s
        and not dual.closed()
    ):
        before = dual.progress()
        dual.messages.sweep(forwards=True)
        dual.messages.sweep(forwards=False, look=dual.rule_out)  # by then every net has given all it has
        dual.step(deadline)
        done += 1
        idle = 0 if dual.progress() > before else idle + 1
    keep = [np.flatnonzero(k) for k in dual.messages.keep]
    alone = all(len(k) == 1 and k[0] == c for k, c in zip(keep, dual.known, strict=True))
    bound_s = dual.known_s if alone else min(dual.best_s, dual.known_s)
    return Bound(bound_s, dual.known, keep, done)


class _Dual:
    """The relaxed problem at its present prices.

    known, known_s    the best known solution and its time
    best_s            the highest bound so far
    limit             the memory limit in bytes, 0 where there is none
    memory_s          y times the limit, in seconds
    late              [groups] mu
    pace, stuck       factor of the next step of the prices, and rounds since the bound rose
    waiting           factors of nets without seconds, which join once bytes have a price
    """

    def __init__(self, problem: Problem, known: tuple[int, ...], state: State) -> None:
        self.problem, self.known, self.state = problem, known, state
        self.known_s = problem.price(known).time_s
        self.first_s = self.known_s or 1.0
        self.best_s = 0.0
        big_s = FORBIDDEN * state.scale_s
        limit = problem.memory_limit_bytes
        self.limit = limit if np.isfinite(limit) else 0.0
        self.memory_s, self.late = 0.0, self._first_late()
        self.pace, self.stuck = 1.0, 0
        self.tried: set[tuple[int, ...]] = set()  # decoded solutions that were descended from
        self.waiting = [f for net in problem.nets if not net.cost_s.any() for f in split(net)] if self.limit else []
        self.messages = Messages(
            [f for net in problem.nets if net.cost_s.any() for f in split(net)],
            [node.cost_s for node in problem.nodes],
            [np.isfinite(node.cost_s) for node in problem.nodes],
            big_s,
        )
        # seconds that each choice of a node adds at least: its share of the mean of all lanes beside its own
        self._least_node_s = [node.cost_s / problem.beside(node) for node in problem.nodes]
        # by net: seconds that are exposed at all prices, and which entries are forbidden (None: none is)
        self._least_net_s: dict[int, tuple[np.ndarray, np.ndarray | None]] = {}
        self._price()

    def _first_late(self) -> np.ndarray:
        """1 for groups that are late in the known solution, 0 for those with time to spare."""
        late = np.zeros(self.problem.groups)
        for net in self.problem.nets:
            if net.group >= 0:
                row = net.row[self.known[net.producer]]
                late[net.group] += sum(
                    net.hideable_s[row, d] for d in {int(u.column[self.known[u.node]]) for u in net.uses}
                )
        for node, c in zip(self.problem.nodes, self.known, strict=True):
            if node.group >= 0:
                late[node.group] -= node.hide_s[c]
        return (late > 0).astype(float)

    def _price(self) -> None:
        """Set the costs of all nodes and nets by the present prices."""
        byte_s = self.memory_s / self.limit if self.limit else 0.0
        messages, big_s = self.messages, self.messages.big_s
        for v, (node, keep, least_s) in enumerate(
            zip(self.problem.nodes, messages.keep, self._least_node_s, strict=True)
        ):
            own = np.where(keep, least_s, 0.0)
            if byte_s:
                own += byte_s * node.memory_bytes
            if node.group >= 0:
                own -= self.late[node.group] * node.hide_s
            own[~keep] = big_s
            messages.own[v] = own
        tables: dict[int, np.ndarray] = {}  # by net: its factors have shares of one table
        for factor in messages.factors:
            if (table := tables.get(id(factor.net))) is None:
                table = tables[id(factor.net)] = self._table_s(factor.net, byte_s)
            factor.table = table if factor.share == 1.0 else factor.share * table
        messages.least = np.zeros(len(messages.own))

    def _table_s(self, net: Net, byte_s: float) -> np.ndarray:
        """[rows, columns] seconds of a net at the present prices; forbidden entries cost `big_s`."""
        if (known := self._least_net_s.get(id(net))) is None:
            finite = np.isfinite(net.cost_s)
            known = np.where(finite, net.shown_s, 0.0), None if finite.all() else ~finite
            self._least_net_s[id(net)] = known
        least_s, forbidden = known
        weight = self.late[net.group] if net.group >= 0 else 0.0
        cost_s = least_s + weight * net.hideable_s if weight else least_s
        if byte_s:
            cost_s = cost_s + byte_s * net.memory_bytes
        return cost_s if forbidden is None else np.where(forbidden, self.messages.big_s, cost_s)

    def rule_out(self, v: int, total: np.ndarray) -> None:
        """Drop the choices of node `v` that no solution better than the known one can have; `total` [choices] is what
        each costs after all messages to it."""
        rest_s = self.value() - self.messages.least[v]
        worse = self.messages.keep[v] & (rest_s + total > self.known_s * (1 + _SLACK))
        worse[self.known[v]] = False
        if worse.any():
            self.messages.drop(v, worse)

    def value(self) -> float:
        """The bound at the present prices, seconds."""
        return self.messages.value - self.memory_s

    def progress(self) -> tuple[int, int, float]:
        """A tuple that increases while rounds are worth their time: the bound (in thousandths of the first solution's
        time), the number of choices ruled out, and the time of the known solution."""
        return (
            int(1000 * self.best_s / self.first_s),
            -sum(int(np.count_nonzero(k)) for k in self.messages.keep),
            -self.known_s,
        )

    def closed(self) -> bool:
        """Whether the bound has reached the time of the known solution, or no other choice is left."""
        return self.best_s >= self.known_s * (1 - _SLACK) or all(np.count_nonzero(k) == 1 for k in self.messages.keep)

    def step(self, deadline: float) -> None:
        """Note the bound, descend from the decoded solution, and move the prices along the subgradient (Polyak's
        step)."""
        value = self.value()
        self.stuck = 0 if value > self.best_s * (1 + 1e-4) else self.stuck + 1
        self.best_s = max(self.best_s, value)
        if self.stuck >= 3:
            self.pace, self.stuck = self.pace / 2, 0
        decoded = self.messages.decode()
        if decoded not in self.tried:
            self.tried.add(decoded)
            found = better(self.problem, descend(self.problem, decoded, deadline, self.state), self.known)
            if found is not None and found != self.known:
                self.known, self.known_s = found, self.problem.price(found).time_s
        over, late = self._violation(decoded)
        if self.memory_s <= 0.0:  # what would push a price out of its range must not shorten the step of the others
            over = max(0.0, over)
        late = np.where(((self.late <= 0.0) & (late < 0)) | ((self.late >= 1.0) & (late > 0)), 0.0, late)
        unit_s = self.known_s or 1.0
        norm = over**2 + float(((late / unit_s) ** 2).sum())
        if norm > 0 and self.known_s > value:
            length = self.pace * (self.known_s - value) / norm
            self.memory_s = max(0.0, self.memory_s + length * over)
            if self.memory_s > 0.0 and self.waiting:
                self.messages.factors, self.waiting = [*self.messages.factors, *self.waiting], []
                self.messages.seat()
            self.late = np.clip(self.late + length * late / unit_s**2, 0.0, 1.0)
            self._price()

    def _violation(self, choice: Picks) -> tuple[float, np.ndarray]:
        """By how much `choice` violates what is relaxed: bytes over the limit as a share of the limit, and [groups] the
        seconds of collectives that exceed the compute that hides them. A forbidden pair has no seconds."""
        late, memory = np.zeros(self.problem.groups), 0.0
        for node, c in zip(self.problem.nodes, choice, strict=True):
            memory += node.memory_bytes.item(c)
            if node.group >= 0:
                late[node.group] -= node.hide_s[c]
        for net in self.problem.nets:
            row = net.makes[choice[net.producer]]
            for d in sorted({use.asks[choice[use.node]] for use in net.uses}):
                memory += net.memory_bytes.item(row, d)
                if net.group >= 0:
                    late[net.group] += net.hideable_s[row, d]
        return (memory - self.limit) / self.limit if self.limit else 0.0, late
