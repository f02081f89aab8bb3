"""Pipelines over nodes where there are fewer samples than nodes: microbatches are fewer than places."""

from __future__ import annotations

from contextlib import suppress

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint.pricing import Pricing
from autopar.joint.prove import Prover
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
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


def test_there_are_as_many_microbatches_as_places_where_samples_suffice_or_most_of_a_step_would_be_idle() -> None:
    assert _fewer("h100:4x2", 4) == []
    assert _fewer("h100:8x1", 3) == []
    assert _fewer("h100:1x8", 2) == []


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
