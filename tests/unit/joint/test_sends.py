"""Sends in the Problem of a pipeline: their seconds are those that stages are timed with."""

from __future__ import annotations

import pytest

from autopar.bare_plan import bare_plan
from autopar.cluster import Cluster
from autopar.joint.pricing import Pricing
from autopar.joint.search_context import SearchContext
from autopar.joint.sends import with_sends
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.joint.stage_times import Laying, pieces_send_s
from autopar.problem.settings import Settings
from autopar.request import Request
from tests.helpers.planned import graph

CLUSTER = Cluster.parse("l4:2x4")


def pricing() -> Pricing:
    return Pricing(SearchContext(graph(8), {"b": 4096}, Request(CLUSTER, Settings("train"))), SEARCH)


@pytest.mark.parametrize("kind", ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"])
def test_a_solution_has_the_sends_of_a_mean_cut_that_its_step_waits_for(kind: str) -> None:
    prices, shape = pricing(), Shape(2, (4,), 4)
    table = next(table for table in prices.tables(shape) if table.kind.schedule == kind)
    chosen = prices.context.solve(prices.models(shape), table, "none", exact=False)
    ground = prices.context.grounds(shape)[0]
    mesh = prices.context.mesh(shape)
    other = tuple(0 for _ in chosen.model.clusters)
    for choice in (chosen.solution.choice, other):
        flat = bare_plan(prices.context.whole, mesh, chosen.model.decode(choice), "")
        _, *sends_s = pieces_send_s(Laying(prices.context, shape, table, ground, chosen, flat, False))
        without = chosen.model.problem.price(choice).time_s
        added_s = with_sends(prices.context, chosen.model, table).problem.price(choice).time_s - without
        assert added_s == pytest.approx(table.waits * sum(sends_s) / len(sends_s)) and added_s > 0


def test_one_place_sends_nothing() -> None:
    prices, shape = pricing(), Shape(1, (8,), 4)
    (table,) = {table.kind: table for table in prices.tables(shape) if table.kind.schedule == "1f1b"}.values()
    model = prices.context.solve(prices.models(shape), table, "none", exact=False).model
    assert with_sends(prices.context, model, table) is model
