"""Step time against memory: no plan of the frontier is beaten, and each fits what it was planned for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.joint import plan
from autopar.joint.pareto import between, frontier
from autopar.joint.search_context import SearchContext
from autopar.plan import Alternative, Plan
from autopar.problem.settings import Settings
from autopar.recipes import RECIPES
from autopar.recipes.names import without_level
from autopar.request import Request
from tests.helpers.kinds import two_kinds
from tests.helpers.planned import graph
from tests.helpers.verify import subject


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster.parse("cpu:1x2"),
        *(pytest.param(c, marks=pytest.mark.slow) for c in (Cluster.parse("cpu:1x4"), two_kinds("cpu:1x2", 2.0))),
    ],
    ids=lambda c: c.label,
)
def test_less_memory_takes_longer(cluster: Cluster) -> None:
    who = subject("hf-gpt2")
    request = Request(cluster, Settings("train"), time_limit_s=10.0)  # in one a busy machine finds two plans
    plans = frontier(
        who.captured.gm, {**who.captured.hints, "b": 8}, request, model=who.name, graph_hash=who.captured.graph_hash
    )
    assert len(plans) > 2
    for fast, small in itertools.pairwise(plans):
        assert fast.predicted.step_s <= small.predicted.step_s
        assert fast.predicted.memory_bytes > small.predicted.memory_bytes
    for row in plans[0].alternatives:  # recipes that were priced along the way
        if row.step_s is not None and row.memory_bytes is not None and without_level(row.name)[0] in RECIPES:
            assert any(
                plan.predicted.step_s <= row.step_s and plan.predicted.memory_bytes <= row.memory_bytes
                for plan in plans
            ), row
    assert all(Plan.from_json(plan.to_json()) == plan for plan in plans)
    assert all(plan.cluster == cluster.to_dict() for plan in plans if not cluster.parts)
    report = who.verified(plans[-1])
    assert report.ok, [row for row in report.rows if not row.ok][:4]


@pytest.mark.parametrize("prove", [False, True])
def test_the_first_plan_is_the_one_without_a_frontier_and_all_are_bounded(prove: bool) -> None:
    who = subject("mlp")
    # time for a busy machine to end both searches: where it is up, fewer recipes are priced
    request = Request(Cluster.parse("h100:1x2"), Settings("train"), prove=prove, time_limit_s=300.0)
    asked = who.captured.gm, who.captured.hints, request
    alone, (first, *others) = plan(*asked), frontier(*asked)
    assert first == alone and first.predicted.gap < 0.02 and others
    for made in others:
        assert alone.predicted.bound_s <= made.predicted.bound_s <= made.predicted.step_s
    assert any(made.predicted.bound_s > alone.predicted.bound_s for made in others) == prove


def test_recipes_are_on_the_meshes_that_they_were_priced_on_and_are_bounded() -> None:
    """Each recipe was planned anew, on whatever mesh is fastest, with nothing proven."""
    request = Request(Cluster.parse("h100:2x2"), Settings("train"), recipe="single")
    context = SearchContext(graph(), {"b": 64}, replace(request, recipe=None))
    first = plan(graph(), {"b": 64}, request)
    priced = [("zero3", (4,)), ("hsdp", (2, 2)), ("1f1b", (4, 1)), ("1f1b", (2, 2)), ("optimizer_offload", (4,))]
    rows = [Alternative(name, mesh, 1.0, 0.0) for name, mesh in priced]
    first = replace(first, alternatives=tuple(rows), predicted=replace(first.predicted, bound_s=1e-6))
    found = list(between(context, [first], {}))
    assert [(made.strategy, made.grid) for made in found] == [(row.name, row.mesh) for row in rows]
    assert {made.predicted.bound_s for made in found} == {1e-6}


def test_recipes_are_at_the_level_of_rematerialisation_at_which_they_were_priced() -> None:
    """They were left out: their names were taken for none of a recipe."""
    request = Request(Cluster.parse("h100:1x2"), Settings("train"), recipe="ddp")
    context = SearchContext(graph(), {"b": 8192}, replace(request, recipe=None))
    first = replace(
        plan(graph(), {"b": 8192}, request),
        alternatives=tuple(
            Alternative(name, (2,), 1.0, 0.0) for name in ("ddp, full remat", "search, full remat", "no remat")
        ),
    )
    as_it_is, again = between(context, [first], {})
    assert (as_it_is.strategy, again.strategy) == ("ddp", "ddp")
    assert not as_it_is.remat and again.remat
    assert again.predicted.memory_bytes < as_it_is.predicted.memory_bytes
