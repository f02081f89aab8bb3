"""Build and solve times of the searches against problem size: `python -m benchmarks.search [--time-limit 30] [--full]`.

Columns: the problem, nodes, choices per node, all entries of the reshard tables; milliseconds to write the whole
integer program (arrays and proto, nothing reduced); then for each strategy seconds, milliseconds per step of its
solution, and the proven gap.
"""

from __future__ import annotations

import argparse
import time

from tabulate import tabulate

from autopar.problem.types import Problem
from autopar.search import SEARCHES
from autopar.search.model import build
from autopar.search.solver import to_proto
from benchmarks.blocks import block

# blocks, mesh axes, memory limit as a share of full replication
CASES = [(1, 1, 0.5), (1, 2, 0.5), (1, 2, 0.0225), (2, 2, 0.5), (1, 3, 0.5), (1, 3, 0.0115)]
FULL = [(4, 2, 0.5), (2, 3, 0.5)]
STRATEGIES = ("greedy", "mcmc", "ilp")


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--time-limit", type=float, default=30.0, help="seconds for each search")
    parser.add_argument("--full", action="store_true", help="also several blocks that are not folded")
    options = parser.parse_args()
    rows = [_row(*case, options.time_limit) for case in CASES + (FULL if options.full else [])]
    headers = ["problem", "memory", "nodes", "choices", "entries", "build ms"]
    for name in STRATEGIES:
        headers += [f"{name} s", "ms/step"]
    print(tabulate(rows, [*headers, "gap", "how"], floatfmt=".2f"))


def _row(blocks: int, axes: int, share: float, time_limit_s: float) -> list[object]:
    problem = block(blocks, axes, memory_fraction=share)
    row: list[object] = [
        problem.name,
        share,
        len(problem.nodes),
        len(problem.nodes[0].labels),
        sum(net.cost_s.size * len(net.uses) for net in problem.nets),
        _build_ms(problem),
    ]
    for name in STRATEGIES:
        began = time.perf_counter()
        found = SEARCHES[name](problem, time_limit_s=time_limit_s)
        step_s = problem.evaluate(found.choice).time_s
        row += [time.perf_counter() - began, step_s * 1e3]
    return [*row, f"{1 - found.bound_s / step_s:.2%}", found.note]


def _build_ms(problem: Problem) -> float:
    began = time.perf_counter()
    to_proto(build(problem), integer=True)
    return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    main()
