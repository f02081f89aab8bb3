"""Explanations: the plan's own choice has the plan's price, and each alternative the price of the Problem."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from rich.table import Table

from autopar.cli.explaining import _alternatives, _prices, _reshards, _whose
from autopar.errors import PlanError
from autopar.report import explain as why
from autopar.report.reshards import Row
from autopar.text import seconds
from tests.helpers.planned import planned


@pytest.mark.parametrize("recipe", [None, "ddp", "zero3", "tp", "hsdp"])
def test_the_plan_is_a_solution_of_the_free_problem(recipe: str | None) -> None:
    made = planned(recipe)
    choice = why.choice_of(made.model, made.plan)
    found = made.model.problem.evaluate(choice).time_s  # but for the starts of buckets that are not full
    assert found == pytest.approx(made.plan.predicted.step_s, rel=0.01)


def test_alternatives_are_priced_by_the_problem() -> None:
    made = planned("ddp")
    choice = why.choice_of(made.model, made.plan)
    index = why.find(made.model, "up.weight")
    rows = why.explain(made.model, choice, "up.weight")
    prices = [made.model.problem.price((*choice[:index], c, *choice[index + 1 :])).time_s for c in range(len(rows))]
    assert sorted(prices) == [row.step_s for row in rows]
    (chosen,) = [row for row in rows if row.chosen]
    assert chosen.step_s == pytest.approx(made.plan.predicted.step_s, rel=0.01) and chosen.result.startswith("R")


def test_in_an_optimal_plan_nothing_alone_is_better() -> None:
    made = planned()
    choice = why.choice_of(made.model, made.plan)
    assert made.plan.predicted.gap < 0.01
    here_s = made.model.problem.evaluate(choice).time_s
    limit = made.model.problem.memory_limit_bytes
    for index in range(len(made.model.clusters)):
        fitting = [row for row in why.alternatives(made.model, choice, index) if row.memory_bytes <= limit]
        assert min(row.step_s for row in fitting) >= here_s * (1 - 1e-9)


@pytest.mark.parametrize("name", ["layers.2.up.weight", "up.weight", "linear_default", "head.weight"])
def test_nodes_are_found_by_all_their_names(name: str) -> None:
    made = planned("ddp")
    held = made.model.clusters[why.find(made.model, name)].members
    assert any(name in (op.fqn, op.name.rsplit("/", 1)[-1], *op.node.meta.get("fqns", ())) for op in held)


@pytest.mark.parametrize("name", ["layers.9.up.weight", ""])
def test_an_unknown_node_is_refused_with_near_ones(name: str) -> None:
    with pytest.raises(PlanError, match=rf"no node '{name}'; nodes are .*up\.weight"):
        why.find(planned("ddp").model, name)


@pytest.mark.parametrize(
    ("name", "found"),
    [("linear", 4), ("encoder_0/linear", 0), ("norm.weight", 5), ("encoder.1.norm.weight", 1), ("proj.weight", 6)],
)
def test_whole_names_come_before_those_inside_of_blocks(name: str, found: int) -> None:
    assert why.find(_two_runs(), name) == found


def test_a_name_inside_of_several_blocks_is_refused_with_the_whole_ones() -> None:
    with pytest.raises(PlanError, match=r"several nodes are called 'add' .* one of encoder_0/add, decoder_0/add"):
        why.find(_two_runs(), "add")


def _two_runs() -> Any:
    """Operators and parameters of two runs of blocks and outside of them, each in a cluster of its own."""
    named = [
        ("encoder_0/linear", "", ()),
        ("encoder_0/p_norm", "norm.weight", ("encoder.0.norm.weight", "encoder.1.norm.weight")),
        ("encoder_0/add", "", ()),
        ("decoder_0/add", "", ()),
        ("linear", "", ()),
        ("p_norm", "norm.weight", ()),
        ("decoder_0/p_proj", "proj.weight", ("decoder.0.proj.weight",)),
    ]
    ops = [SimpleNamespace(name=name, fqn=fqn, node=SimpleNamespace(meta={"fqns": fqns})) for name, fqn, fqns in named]
    return SimpleNamespace(clusters=[SimpleNamespace(members=[op]) for op in ops])


def test_a_plan_of_other_rules_is_refused() -> None:
    made = planned("ddp")
    name = next(n for n, node in made.plan.nodes.items() if node.ins and node.outs)
    other = dataclasses.replace(
        made.plan, nodes={**made.plan.nodes, name: dataclasses.replace(made.plan.nodes[name], factors=("?",))}
    )
    with pytest.raises(PlanError, match="not among its options now"):
        why.choice_of(made.model, other)


def test_the_most_expensive_come_first() -> None:
    made = planned("tp")
    found = why.parts(made.model, why.choice_of(made.model, made.plan), 4)
    assert [part.own_s for part in found] == sorted((part.own_s for part in found), reverse=True)
    assert len(found) == 4 and all(part.label for part in found)


def test_prices_that_are_not_the_step_of_the_plan_say_so() -> None:
    """Alone choices are priced by what is linear; what hides in a pass is in the step."""
    made = planned("zero3").plan
    assert _whose(made, made.predicted.step_s) == []
    (line,) = _whose(made, 2 * made.predicted.step_s)
    assert line.startswith("prices are those of each choice alone") and line.endswith(
        f"the plan's step {seconds(made.predicted.step_s)}"
    )


def test_prices_of_a_pipeline_are_said_to_be_of_a_microbatch() -> None:
    """In the table and in JSON, where `step_s` of an alternative was taken for that of the step."""
    made = planned("zero3")
    model, choice = made.model, why.choice_of(made.model, made.plan)
    rows = why.explain(model, choice, "up.weight")
    for microbatches, of, header in ((1, "step", "step"), (4, "microbatch", "one microbatch")):
        plan = dataclasses.replace(made.plan, microbatches=microbatches)
        said = _prices(plan, 1.0)
        assert (said["prices_of"], said["microbatches"]) == (of, microbatches)
        assert (said["priced_s"], said["predicted_step_s"]) == (1.0, plan.predicted.step_s)
        assert any(f"one microbatch of {microbatches}" in note for note in said["notes"]) == (of == "microbatch")
        assert header in [str(column.header) for column in _alternatives("up.weight", rows, plan).columns]


def test_where_nothing_moves_there_is_no_empty_table() -> None:
    free = Row("", "x", "R", "S0", "edge", 1, 0.0, "slice", ("up",), "")
    assert str(_reshards([])).startswith("no reshards") and str(_reshards([free])).startswith("no reshards")
    assert (
        isinstance(table := _reshards([free, dataclasses.replace(free, step_s=1e-3)]), Table) and table.row_count == 1
    )
