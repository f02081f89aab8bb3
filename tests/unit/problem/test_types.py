"""Problem.price by hand on one small case, and what a malformed problem says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopar.errors import InfeasibleError
from autopar.problem.types import Net, Node, Problem, Use


def small(limit: float = 100.0) -> Problem:
    """One tensor with two readers; the second reader hides collectives."""
    two = ("R", "S0")
    nodes = (
        Node("x", two, np.array([4.0, 2.0]), np.array([8.0, 4.0]), np.zeros(2)),
        Node("q", two, np.array([4.0, 2.0]), np.array([8.0, 4.0]), np.zeros(2)),
        Node("k", two, np.array([4.0, 2.0]), np.array([8.0, 4.0]), np.array([1.0, 0.5]), 0),
    )
    both = (Use(1, np.arange(2)), Use(2, np.arange(2)))
    table = np.array([[0.0, 1.0], [3.0, np.inf]])
    shared = Net("x", 0, np.arange(2), both, table, 2.0 * np.isfinite(table))
    hidden = Net("w", 0, np.arange(2), both[1:], np.array([[0.0, 0.0], [5.0, 5.0]]), np.zeros((2, 2)), 0)
    return Problem(nodes, (shared, hidden), 1, limit, "small")


def test_readers_of_one_layout_share_one_reshard() -> None:
    cost = small().evaluate((1, 0, 0))
    assert (cost.compute_s, cost.exposed_s, cost.hidden_s) == (10.0, 3.0 + 5.0 - 1.0, 1.0)
    assert cost.time_s == 17.0
    assert cost.memory_bytes == 20.0 + 2.0


def test_nothing_hides_where_all_is_shown() -> None:
    cost = small().shown().evaluate((1, 0, 0))
    assert (cost.compute_s, cost.exposed_s, cost.hidden_s) == (10.0, 3.0 + 5.0, 0.0)
    assert cost.memory_bytes == 20.0 + 2.0


def test_two_layouts_are_two_reshards() -> None:
    cost = small().evaluate((0, 0, 1))
    assert (cost.exposed_s, cost.memory_bytes) == (1.0, 20.0 + 4.0)


def test_forbidden_pairs_and_memory() -> None:
    with pytest.raises(InfeasibleError, match="forbidden pair"):
        small().evaluate((1, 1, 1))
    with pytest.raises(InfeasibleError, match="the solution needs 22 B per device, 21 B are there"):
        small(limit=21.0).evaluate((1, 0, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"row": np.array([0, 2])}, r"net x: row is in 0\.\.2, the tables have 0\.\.1"),
        ({"row": np.array([0])}, r"net x: row has 1 entries, x has 2 choices"),
        ({"group": 1}, r"net x is in overlap group 1, the problem has 0\.\.0"),
        ({"uses": ()}, "net x has no reader"),
        ({"uses": (Use(0, np.arange(2)),)}, "net x: x reads what it produces"),
        ({"cost_s": -np.ones((2, 2))}, r"net x: cost_s must be in 0\.\.inf"),
        ({"cost_s": np.ones((2, 3))}, "net x: cost_s is"),
    ],
)
def test_malformed_nets(change: dict[str, object], message: str) -> None:
    good = small()
    with pytest.raises(ValueError, match=message):
        replace(good, nets=(replace(good.nets[0], **change), good.nets[1]))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cost_s": np.array([np.nan, 1.0])}, "node x: only cost_s may be infinite"),
        ({"memory_bytes": np.array([np.inf, 1.0])}, "node x: only cost_s may be infinite"),
        ({"hide_s": np.zeros(3)}, "node x: labels, cost_s, memory_bytes and hide_s differ"),
        ({"group": 3}, "node x is in overlap group 3"),
    ],
)
def test_malformed_nodes(change: dict[str, object], message: str) -> None:
    good = small()
    with pytest.raises(ValueError, match=message):
        replace(good, nodes=(replace(good.nodes[0], **change), *good.nodes[1:]))  # type: ignore[arg-type]


def side_by_side() -> Problem:
    """Two towers of 6 and 4 s that can work in two lanes or in none, and a join of 1 s that cannot."""
    lane = np.array([-1, 0, 1])
    towers = tuple(
        Node(name, ("all", "0", "1"), np.full(3, cost), np.zeros(3), np.zeros(3), lane=lane)
        for name, cost in (("user", 6.0), ("item", 4.0))
    )
    return Problem((*towers, Node("join", ("all",), np.ones(1), np.zeros(1), np.zeros(1))), (), lanes=(0, 0))


@pytest.mark.parametrize(
    ("choice", "time_s"), [((0, 0, 0), 11.0), ((1, 2, 0), 7.0), ((1, 1, 0), 11.0), ((0, 2, 0), 11.0)]
)
def test_lanes_of_a_stretch_work_at_the_same_time(choice: tuple[int, ...], time_s: float) -> None:
    assert side_by_side().evaluate(choice).time_s == time_s


def test_a_lane_that_is_not_there() -> None:
    good = side_by_side()
    with pytest.raises(ValueError, match=r"node user: lane wants 3 entries in -1\.\.0"):
        replace(good, lanes=(0,))
