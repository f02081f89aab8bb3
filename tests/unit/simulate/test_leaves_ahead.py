"""Leaves that come before a stage (pipeline.gathering): price and simulation have them travel beside the stage before,
which they slow down, and wait for them."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.joint.choice import staged
from autopar.joint.search_context import SearchContext
from autopar.joint.spaces import Space
from autopar.joint.timetables import Kind
from autopar.pipeline import stretches
from autopar.plan import Plan
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.request import Request
from autopar.simulate import simulate
from tests.helpers.planned import graph

BLOCKS = 6
SPACE = Space("zero1", lambda mesh: (roles.zero1,) * len(mesh), (Kind("interleaved_1f1b", BLOCKS // 2),), 1)


def _planned(cluster: str) -> Plan:
    """Two places, on each of which every stage is one block, whose weights rest cut (ZeRO-1)."""
    request = Request(Cluster.parse(cluster), Settings(precision="bf16"), recipe="1f1b")
    context = SearchContext(graph(BLOCKS), {"b": 4096}, request)
    return staged(context, [SPACE], None, {"model": "stack", "graph_hash": "0" * 64})


@pytest.mark.parametrize("cluster", ["h100:1x8", "rtx4090:1x8", "a100-80:2x4"])
def test_stages_of_one_block_wait_for_their_leaves_and_are_slowed_by_those_of_the_next(
    cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _planned(cluster)
    assert len(made.stages) == BLOCKS and made.places == 2
    told = simulate(graph(BLOCKS), made)
    assert told.step_s == pytest.approx(made.predicted.step_s, rel=0.03)
    leaves = [span for place in told.places for span in place.spans if span.stream == "leaves"]
    assert len(leaves) == BLOCKS - 1  # the first stage waits for its own
    begins = {(place.place, span.name): span.begin_s for place in told.places for span in place.spans}
    ends = {(place.place, span.name): span.end_s for place in told.places for span in place.spans}
    for place, first, later in ((0, 0, 2), (0, 2, 4), (1, 1, 3), (1, 3, 5)):
        leaf, forward = f"leaves of stage {later}", f"F stage {later} microbatch 0"
        assert begins[place, f"F stage {first} microbatch 0"] <= begins[place, leaf]
        assert ends[place, leaf] <= begins[place, forward] + 1e-12
    monkeypatch.setattr(stretches, "ahead_s", lambda lines: 0.0)
    assert _planned(cluster).predicted.step_s < made.predicted.step_s
