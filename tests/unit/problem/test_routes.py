"""Routes between layouts and their prices, against `layout.steps` and `steps_s` for each pair alone."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.cost.comm import steps_s
from autopar.layout import consistent, fraction, is_placed, steps
from autopar.problem.routes import Routes, renamed

ENTRIES = ("R", "P", "S0", "S1", "S1/3", "O1")


def _layouts() -> list[tuple[str, ...]]:
    return [
        pair for pair in itertools.product(ENTRIES, repeat=2) if set(pair) != {"S1", "S1/3"} and pair.count("O1") < 2
    ]


@pytest.mark.parametrize("size_bytes", [1e3, 1e8])
def test_all_routes_at_once_cost_what_each_costs_alone(size_bytes: float) -> None:
    mesh = Cluster.parse("h100:2x4").mesh((2, 4))
    sources, targets = _layouts(), [e for e in _layouts() if "P" not in e]
    routes = Routes(mesh)
    routes.table(targets, sources[:3])  # what was asked for before changes nothing
    table = routes.table(sources, targets)
    assert np.array_equal(table.at, routes.table(sources, targets).at)
    seconds, gathers, held = routes.seconds(table, size_bytes), routes.gathers(table), routes.result_share(table)
    for (i, source), (j, target) in itertools.product(enumerate(sources), enumerate(targets)):
        way = steps(source, target, mesh.sizes)
        made = [s.after for s in way if not is_placed(s.after[s.axis])]
        assert seconds[i, j] == pytest.approx(steps_s(way, size_bytes, mesh), rel=1e-12)
        assert gathers[i, j] == any(s.kind == "all_gather" for s in way)
        assert math.isnan(held[i, j]) if not made else held[i, j] == fraction(made[-1], mesh.sizes)


def test_dims_by_other_names_are_the_same_routes() -> None:
    mesh = Cluster.parse("h100:4x8").mesh((2, 4, 4))
    draw = random.Random(0)
    layouts = [
        layout
        for layout in itertools.product(("R", "P", "S0", "S1", "S2", "S3", "S3/2"), repeat=3)
        if consistent(layout)
    ]
    pairs = [(draw.choice(layouts), draw.choice(layouts)) for _ in range(400)]
    assert sum(renamed(*pair) != pair for pair in pairs) > 200
    for source, target in pairs:
        way, other = steps(source, target, mesh.sizes), steps(*renamed(source, target), mesh.sizes)
        assert [(s.kind, s.axis, fraction(s.before, mesh.sizes), fraction(s.after, mesh.sizes)) for s in way] == [
            (s.kind, s.axis, fraction(s.before, mesh.sizes), fraction(s.after, mesh.sizes)) for s in other
        ]
        routes = Routes(mesh)
        assert routes.seconds(routes.table([source], [target]), 1e7)[0, 0] == pytest.approx(
            steps_s(way, 1e7, mesh), rel=1e-12
        )
