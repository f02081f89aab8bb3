"""Pipelines over nodes where there are fewer samples than nodes: microbatches are fewer than places."""

from __future__ import annotations

import math
from contextlib import suppress

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint import anywhere
from autopar.joint.pricing import Pricing
from autopar.joint.prove import Prover
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape, neighbours, starts
from autopar.joint.spaces import SEARCH
from autopar.problem.settings import Settings
from autopar.request import Request
from tests.helpers.kinds import far
from tests.helpers.planned import graph


def _fewer(cluster: str, batch: int) -> list[Shape]:
    """The shapes of the search with fewer microbatches than places."""
    context = SearchContext(graph(8), {"b": batch}, Request(Cluster.parse(cluster)))
    return [shape for shape in SEARCH.shapes(context) if shape.microbatches < shape.places]


def test_a_place_is_a_node_where_there_are_fewer_samples_than_nodes() -> None:
    """Else the search had only larger places, whose collectives leave their node, and pipelines of one microbatch."""
    assert _fewer("h100:4x2", 2) == [Shape(4, (2,), 2)]
    assert _fewer("h100:4x4", 3) == [Shape(4, (2, 2), 3), Shape(4, (4,), 3)]


def test_most_places_are_never_idle_nor_larger_than_a_node_where_there_are_too_few_samples() -> None:
    assert _fewer("h100:8x1", 3) == []
    assert _fewer("h100:1x8", 2) == []


def test_where_samples_suffice_there_may_be_half_as_many_microbatches_as_places() -> None:
    assert _fewer("h100:4x2", 4) == [Shape(4, (2,), 2)]
    assert _fewer("h100:6x1", 8) == [Shape(3, (2,), 2), Shape(6, (1,), 4)]


def test_places_wait_only_where_microbatches_cost_much() -> None:
    """Of large batches starting operators is little of a step."""
    assert _fewer("h100:4x2", 2**16) == []


def test_walks_begin_at_pipelines_that_are_filled() -> None:
    """The others are one move down from them."""
    few, many, larger = (Shape(4, (2,), m) for m in (2, 4, 8))
    assert starts([few, many, larger], 2, 4) == [many]
    assert neighbours(many, [few, many, larger]) == [few, larger]
    assert neighbours(Shape(2, (4,), 2), [Shape(2, (4,), 2), few, many, larger]) == [many]
    assert starts([few], 2, 4) == [few]


def test_small_microbatches_are_not_taken_where_larger_ones_that_leave_places_idle_are_faster() -> None:
    """Four of them over six nodes, where eight take more than a tenth longer."""
    request = Request(Cluster.parse("l4:6x1"), Settings("train"), time_limit_s=300.0)
    context = SearchContext(graph(8), {"b": 256}, request)
    made = anywhere(context, model="stack", graph_hash="")
    assert made.microbatches < made.places
    filling = Pricing(context, SEARCH).glance(Shape(6, (1,), 8), math.inf)
    assert made.predicted.step_s < 0.9 * filling.step_s


def test_fewer_microbatches_than_places_are_no_faster_than_is_proven() -> None:
    """Under every timetable that torch has for them, some of which are faster than those of one microbatch."""
    context = SearchContext(graph(8), {"b": 2}, Request(far("h100:4x1"), Settings("train")))
    shape, pricing, steps_s = Shape(4, (1,), 2), Pricing(context, SEARCH), dict[str, float]()
    bound_s = Prover(context).bound_s(shape)
    for table in pricing.tables(shape):
        with suppress(InfeasibleError):
            steps_s[table.kind.schedule] = pricing.price(shape, [table], "none", exact=True).step_s
    assert steps_s.keys() >= {"gpipe", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble"}
    assert 0.5 * min(steps_s.values()) < bound_s <= min(steps_s.values())
    assert context.work(4).step_s(4, 4, 2) < pricing.floor_s(shape, "none") <= min(steps_s.values())


def test_the_floor_of_pipelines_that_are_not_filled_is_what_one_microbatch_takes() -> None:
    """Each place works on it alone, so that the floor is above the work divided evenly: no such shape is visited where
    operators are busy, as the fastest known step is below that."""
    context = SearchContext(graph(8), {"b": 32768}, Request(Cluster.parse("h100:4x1"), Settings("train")))
    shape, pricing = Shape(4, (1,), 2), Pricing(context, SEARCH)
    steps_s = [pricing.price(shape, [table], "none", exact=False).step_s for table in pricing.tables(shape)]
    assert 1.25 * context.work(4).step_s(4, 4, 2) < pricing.floor_s(shape, "none") <= min(steps_s)
