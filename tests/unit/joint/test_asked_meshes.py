"""Named pipelines with the mesh of a place that was asked for: axes of size 1 have nothing to do, and what cannot be
says what can."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, PlanError
from autopar.joint import plan
from autopar.joint.search_context import SearchContext
from autopar.joint.spaces import asked
from autopar.recipes import roles
from autopar.recipes.pipelines import PIPELINES
from autopar.request import Request
from tests.helpers.planned import graph

CASES = {
    "3d, an outer axis of 1": ("3d", (1, 2), (2,), (roles.tensor_sequence,)),
    "3d, an inner axis of 1": ("3d", (2, 1), (2,), (roles.zero1,)),
    "pp_zero3, an outer axis of 1": ("pp_zero3", (1, 2), (2,), (roles.tensor_sequence,)),
    "pp_zero3, an inner axis of 1": ("pp_zero3", (2, 1), (2,), (roles.zero3,)),
    "one role": ("1f1b", (1, 2, 1), (2,), (roles.data,)),
    "no axis left": ("3d", (1, 1, 1), (1,), (roles.nothing,)),
    "none of size 1": ("3d", (2, 2), (2, 2), (roles.zero1, roles.tensor_sequence)),
}


def _inner(name: str, mesh: tuple[int, ...], cluster: str) -> SearchContext:
    return SearchContext(graph(), {"b": 2048}, Request(Cluster.parse(cluster), recipe=name, mesh=mesh))


@pytest.mark.parametrize("case", CASES)
def test_axes_of_size_one_are_left_out_with_their_roles(case: str) -> None:
    name, mesh, small, used = CASES[case]
    context = _inner(name, mesh, "cpu:1x8")
    found = asked(PIPELINES[name], context)
    assert found.roles_on(small) == used and {shape.mesh for shape in found.shapes(context)} == {small}


REFUSED = {
    "one place": (
        "1f1b",
        (4,),
        "recipe 1f1b cannot have mesh 4 in each place on cpu:1x4: that leaves one place of 4 devices, and stages take "
        "two or more; wanted 1, 2$",
    ),
    "a size that does not divide": ("1f1b", (3,), "places of 3 do not fill 4 devices; wanted 1, 2$"),
    "too many axes": ("1f1b", (2, 2), "its places have 1 axis at most; wanted 1, 2$"),
    "a role that cannot be told": ("3d", (2, 1, 1), "its places have 2 axes at most; wanted "),
    "no size": ("3d", (0,), "places of 0 do not fill 4 devices"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_says_which_meshes_can(case: str) -> None:
    name, mesh, message = REFUSED[case]
    with pytest.raises(PlanError, match=message):
        plan(
            graph(),
            {"b": 2048},
            Request(Cluster.parse("cpu:1x4"), recipe=name, mesh=mesh),
            model="stack",
            graph_hash="0" * 64,
        )


@pytest.mark.parametrize(("name", "stages"), [("zero_bubble", ", of 2 stages each,"), ("1f1b", "")])
def test_places_of_several_stages_need_as_many_pieces(name: str, stages: str) -> None:
    """Of the stack's pieces there are more than 8 places, and fewer than two for each."""
    context = _inner(name, (1,), "cpu:1x8")
    assert 8 <= context.pieces < 16
    if not stages:
        assert asked(PIPELINES[name], context).mesh == (1,)
        context = _inner(name, (1,), "cpu:1x16")
    with pytest.raises(
        PlanError,
        match=rf"its {context.request.cluster.devices} places{stages} do not lie so on the devices, or are more than "
        rf"the {context.pieces} pieces .* wanted 2, 4",
    ):
        asked(PIPELINES[name], context)


def test_an_axis_of_size_one_changes_nothing() -> None:
    made, plain = (
        plan(
            graph(),
            {"b": 2048},
            Request(Cluster.parse("cpu:1x4"), recipe="3d", mesh=mesh),
            model="stack",
            graph_hash="0" * 64,
        )
        for mesh in ((1, 2), (2,))
    )
    assert made.predicted == plain.predicted and made.mesh == plain.mesh == (2,) and made.places == 2


@pytest.mark.parametrize(
    ("batch", "memory_bytes", "message"),
    [
        (
            2048,
            1e6,
            r"weights, gradients and optimizer state alone take .* per device, .* 977 KiB are there: use more or "
            r"larger devices",
        ),
        (
            1,
            None,
            r"no way to lay \d+ pieces and a batch of 1 on 4 devices \(a batch of one sample, or of one group of them, "
            r"has no microbatches\)$",
        ),
    ],
)
def test_no_shape_at_all_is_said_to_be_for_memory_only_where_it_is(
    batch: int, memory_bytes: float | None, message: str
) -> None:
    request = Request(Cluster.parse("cpu:1x4"), recipe="1f1b", memory_bytes=memory_bytes)
    with pytest.raises(InfeasibleError, match=message):
        plan(graph(), {"b": batch}, request, model="stack", graph_hash="0" * 64)
