"""Pipelines on a machine whose ranks outnumber its cores: the search's price is the simulation's, and waiting places
give their cores away."""

from __future__ import annotations

import dataclasses

import pytest

from autopar import joint
from autopar.cluster import Cluster
from autopar.plan import Plan
from autopar.planner import Request
from autopar.simulate import simulate
from tests.helpers.planned import BATCH, graph


def planned(recipe: str, **device: float) -> Plan:
    base = Cluster.parse("cpu:1x4")
    cluster = dataclasses.replace(base, device=dataclasses.replace(base.device, **device))  # type: ignore[arg-type]
    return joint.plan(
        graph(), {"b": BATCH}, Request(cluster, recipe=recipe, time_limit_s=10.0), model="stack", graph_hash="0" * 64
    )


@pytest.mark.parametrize("recipe", ["naive_mp", "1f1b", "zero_bubble"])
def test_the_search_says_what_the_simulation_says(recipe: str) -> None:
    plain, crowded = planned(recipe), planned(recipe, alone=2.0, action_s=2e-3)
    found = simulate(graph(), crowded)
    assert found.step_s == pytest.approx(crowded.predicted.step_s, rel=0.03)
    assert all(place.idle_s >= -1e-9 for place in found.places)
    assert planned(recipe, alone=2.0).predicted.step_s <= plain.predicted.step_s * (1 + 1e-9)
    assert planned(recipe, action_s=2e-3).predicted.step_s > plain.predicted.step_s
    last = max(span.end_s for place in found.places for span in place.spans)
    assert last == pytest.approx(found.step_s, rel=1e-6)
