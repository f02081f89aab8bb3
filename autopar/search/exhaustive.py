"""Every combination of choices, for tiny problems: the oracle that the other strategies are tested against.

A block of combinations is priced at a time, on arrays with one entry per combination.
"""

from __future__ import annotations

import math

import numpy as np

from autopar.errors import InfeasibleError, PlanError
from autopar.problem.types import Net, Problem, Solution
from autopar.search.feasible import shortfall

LIMIT = 2_000_000
"""The most combinations of choices that a problem may have."""
_BLOCK = 100_000  # combinations that are priced at a time


def search(problem: Problem, *, time_limit_s: float, seed: int = 0, start: tuple[int, ...] | None = None) -> Solution:
    """The best of all combinations; `time_limit_s`, `seed` and `start` change nothing.

    Raises PlanError when there are more than `LIMIT` combinations, InfeasibleError when none is feasible.
    """
    total = combinations(problem)
    sizes = [len(node.labels) for node in problem.nodes]
    best_s, best, least = float("inf"), -1, float("inf")
    for first in range(0, total, _BLOCK):
        index = np.arange(first, min(first + _BLOCK, total))
        time_s, memory = _price(problem, np.unravel_index(index, sizes) if sizes else ())
        least = min(least, float(memory[np.isfinite(time_s)].min(initial=np.inf)))
        time_s = np.where(memory <= problem.memory_limit_bytes * (1 + 1e-12), time_s, np.inf)
        at = int(time_s.argmin())
        if time_s[at] < best_s:
            best_s, best = float(time_s[at]), int(index[at])
    if best < 0:
        if np.isinf(least):
            raise InfeasibleError(
                f"problem {problem.name}: every combination of choices uses a forbidden pair of layouts"
            )
        raise shortfall(problem, least)
    choice = tuple(int(c) for c in np.unravel_index(best, sizes)) if sizes else ()
    best_s = problem.evaluate(choice).time_s
    return Solution(choice, "exhaustive", best_s, optimal=True, note=f"all {total:,} combinations")


def combinations(problem: Problem) -> int:
    """How many combinations there are. Raises PlanError when there are more than `LIMIT`."""
    total = math.prod(len(node.labels) for node in problem.nodes)
    if total > LIMIT:
        raise PlanError(
            f"problem {problem.name}: exhaustive search over {total:.3g} combinations of {len(problem.nodes)} nodes, "
            f"at most {LIMIT:,} are possible; use search='ilp', which proves how far its answer is from the best, or a "
            "mesh of fewer axes"
        )
    return total


def _price(problem: Problem, choice: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds and bytes of many combinations: `choice[v]` is node v's choice in each."""
    count = len(choice[0]) if choice else 1
    time_s, memory, late = np.zeros(count), np.zeros(count), np.zeros((problem.groups, count))
    lanes = np.zeros((len(problem.lanes), count))
    for node, c in zip(problem.nodes, choice, strict=True):
        for lane in (-1,) if node.lane is None else np.unique(node.lane):
            work = time_s if lane < 0 else lanes[lane]
            work += node.in_lane(lane)[c]
        memory += node.memory_bytes[c]
        if node.group >= 0:
            late[node.group] -= node.hide_s[c]
    for net in problem.nets:
        shown_s, hideable_s, held = _price_net(net, choice)
        memory += held
        time_s += shown_s
        if net.group >= 0:
            late[net.group] += hideable_s
    return time_s + problem.abreast_s(lanes) + np.maximum(0.0, late).sum(0), memory


def _price_net(net: Net, choice: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """Seconds always exposed, seconds that can hide, and bytes, each over the combinations."""
    row = net.row[choice[net.producer]]
    columns = [use.column[choice[use.node]] for use in net.uses]
    tables = (net.shown_s, net.hideable_s, net.memory_bytes)
    totals = tuple(np.zeros(len(row)) for _ in tables)
    for i, column in enumerate(columns):
        new = np.all([column != earlier for earlier in columns[:i]], axis=0) if i else np.ones(len(row), bool)
        for total, table in zip(totals, tables, strict=True):
            total += np.where(new, table[row, column], 0.0)
    return totals
