"""Shapes: every one can be reached from every other, and neighbours are mutual in places and mesh."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.joint.shapes import Shape, counts, fewest, layouts, neighbours, starts
from autopar.recipes import roles
from autopar.recipes.pipelines import PIPELINES


def _shapes(cluster: str, batch: int = 24) -> list[Shape]:
    found = layouts(Cluster.parse(cluster), 2, 100)
    return [Shape(places, mesh, m) for places, mesh in found for m in counts(batch, places)]


@pytest.mark.parametrize("cluster", ["h100:2x8", "h100:1x6", "h100:1x7", "cpu:3x4"])
def test_every_shape_is_reached(cluster: str) -> None:
    shapes = _shapes(cluster)
    queue = starts(shapes, 8, 24)
    seen = dict.fromkeys(queue)
    while queue:
        for other in neighbours(queue.pop(), shapes):
            if other not in seen:
                seen[other] = None
                queue.append(other)
    assert {s.key for s in seen} == {s.key for s in shapes}


def test_neighbours_are_one_move_away() -> None:
    shapes = _shapes("h100:2x8")
    here = Shape(2, (2, 4), 6)
    found = neighbours(here, shapes)
    assert Shape(2, (2, 4), 4) in found and Shape(2, (2, 4), 8) in found
    assert {s.key for s in found} - {here.key} == {(4, 1, 1, 4), (4, 1, 2, 2), (2, 1, 1, 8), (2, 1, 4, 2)} & {
        s.key for s in shapes
    }
    for other in found:
        assert other.key == here.key or here.key in {s.key for s in neighbours(other, shapes)}


def test_counts_divide_the_batch() -> None:
    assert counts(12, 2) == [2, 3, 4, 6, 12]
    assert counts(7, 4) == [7]
    assert counts(6, 8) == []


def test_numbers_of_microbatches_of_a_huge_batch_are_found_at_once() -> None:
    batch = 10**12
    assert counts(batch, 2) == [n for n in range(2, 1025) if batch % n == 0]
    assert fewest(batch) == 2 and fewest(1_000_000_007) == 1_000_000_007 and fewest(35) == 5
    assert counts(12, 1) == [1, 2, 3, 4, 6, 12] and counts(12, 3) == [3, 4, 6, 12]


def test_a_place_of_one_axis_has_the_role_that_its_recipe_is_named_for() -> None:
    assert PIPELINES["pp_zero3"].roles_on((2,)) == (roles.zero3,)
    assert PIPELINES["3d"].roles_on((2,)) == (roles.tensor_sequence,)
    assert PIPELINES["pp_zero3"].roles_on((2, 2)) == (roles.zero3, roles.tensor_sequence)


def test_on_one_place_the_walk_begins_at_the_mesh_of_one_axis_too() -> None:
    """With a sample for each rank; and at the one whose innermost axis is a node."""
    shapes = [Shape(1, mesh, microbatches) for mesh in ((12,), (6, 2), (3, 4)) for microbatches in (2, 4, 8, 16)]
    assert starts([*shapes, Shape(3, (4,), 6)], 4, 96) == [Shape(1, (3, 4), 16), Shape(1, (12,), 8), Shape(3, (4,), 6)]
