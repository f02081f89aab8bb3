"""Places of three axes: where the search has them, and that they are what they cost."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.joint import plan
from autopar.joint.search_context import SearchContext
from autopar.joint.spaces import SEARCH, asked, of_recipe
from autopar.recipes import roles, sequence
from autopar.recipes.pipelines import PIPELINES
from autopar.request import Request
from autopar.simulate import simulate
from tests.helpers.planned import graph
from tests.helpers.verify import subject


def _deep(cluster: str, batch: int, recipe: str | None = None) -> dict[tuple[int, tuple[int, ...]], list[int]]:
    """(places, mesh of three axes) -> numbers of microbatches, of the search or a named pipeline."""
    context = SearchContext(graph(), {"b": batch}, Request(Cluster.parse(cluster), recipe=recipe))
    space = SEARCH if recipe is None else asked(PIPELINES[recipe], context)
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for shape in space.shapes(context):
        if len(shape.mesh) == 3 and shape.places > 1:
            found.setdefault((shape.places, shape.mesh), []).append(shape.microbatches)
    return found


def test_three_axes_are_searched_where_there_are_fewer_samples_than_nodes() -> None:
    """Of 16 devices in nodes of 2, two places have 8 each: 2x2x2 is the only mesh whose inner axes leave a node."""
    assert _deep("h100:8x2", 4) == {(2, (2, 2, 2)): [2]}
    assert _deep("h100:8x2", 8) == {}
    assert _deep("h100:2x8", 4) == {}


def test_three_axes_are_searched_where_two_do_not_divide_the_experts() -> None:
    """There are samples enough, and four experts."""
    gm = subject("moe").captured.gm
    context = SearchContext(gm, {"b": 4096, "s": 16}, Request(Cluster.parse("h100:32x2")))
    assert roles.expert_counts(context.whole.program) == {4}
    deep = {mesh for _, mesh in SEARCH.layouts(context) if len(mesh) == 3}
    assert deep == {(4, 2, 2), (8, 2, 2), (2, 4, 2), (4, 4, 2)}


def test_the_outermost_axis_splits_samples_and_the_others_anything() -> None:
    assert SEARCH.roles_on((2, 2, 2)) == (roles.samples, roles.anything, roles.anything)


def test_who_asks_for_three_axes_has_all_of_them() -> None:
    assert of_recipe(PIPELINES["4d"]).roles_on((2, 2, 2)) == (roles.zero1, sequence.context, roles.tensor_sequence)
    assert _deep("h100:2x8", 2048, "4d").keys() == {(2, (2, 2, 2))}


def test_they_take_as_long_as_is_simulated() -> None:
    gm, request = graph(), Request(Cluster.parse("h100:4x4"), recipe="4d", mesh=(2, 2, 2))
    made = plan(gm, {"b": 8192}, request, model="stack", graph_hash="0" * 64)
    assert made.mesh == (2, 2, 2) and made.places == 2
    assert simulate(gm, made).step_s == pytest.approx(made.predicted.step_s, rel=0.03)
