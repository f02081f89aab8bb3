"""What two plans say differently: all of it, whichever field it is of, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from typing import Any

import pytest
from typer.testing import CliRunner

import autopar
from autopar.cli.app import app
from autopar.plan import Alternative, NodePlan, Plan, Stage
from autopar.report.difference import diff
from tests.helpers.planned import planned

OTHER: dict[str, Any] = {  # another value of each field than that of the ddp plan
    "model": "another",
    "graph_hash": "1" * 64,
    "mode": "inference",
    "precision": "bfloat16",
    "optimizer": "sgd",
    "hints": {"b": 4},
    "axes": ("a",),
    "mesh": (2, 2),
    "strategy": "mine",
    "seed": 7,
    "schedule": "1f1b",
    "microbatches": 2,
    "remat": {"blocks": ("add",)},
    "offload": "optimizer",
    "parted": {"blocks": {"tail": 2}},
    "totals": ("count",),
    "shared": ("mean:0",),
    "source": {"spec": "hf:x"},
    "notes": ("one more",),
    "schema": 9,
    "alternatives": (Alternative("mine", (4,), 1.0, 2.0),),
    "stages": (Stage(), Stage(("loss",), {"blocks": (1, 2)}, 1)),
}


def mutated(plan: Plan, name: str) -> Plan:
    """The plan with another value of one field."""
    if name == "cluster":
        return replace(plan, cluster={**plan.cluster, "device": {**plan.cluster["device"], "launch_s": 1.0}})
    if name == "nodes":
        node, own = next(iter(plan.nodes.items()))
        return replace(plan, nodes={**plan.nodes, node: replace(own, micro=("P",))})
    if name == "predicted":
        return replace(plan, predicted=replace(plan.predicted, places_bytes=(1.0,)))
    return replace(plan, **{name: OTHER[name]})


@pytest.mark.parametrize("name", [f.name for f in fields(Plan)])
def test_every_field_is_compared(name: str) -> None:
    plan = planned("ddp").plan
    found, back = diff(plan, mutated(plan, name)), diff(mutated(plan, name), plan)
    assert not found.same and (name == "nodes") == (not found.facts)
    assert {(f.name, str(f.old), str(f.new)) for f in found.facts} == {
        (f.name, str(f.new), str(f.old)) for f in back.facts
    }


@pytest.mark.parametrize("name", [f.name for f in fields(NodePlan)])
def test_every_field_of_a_node_is_compared(name: str) -> None:
    plan = planned("ddp").plan
    node, own = next((node, own) for node, own in plan.nodes.items() if own.ins and own.outs)
    other = replace(own, **{name: tuple("x" for _ in getattr(own, name)) or ("P",)})
    (change,) = diff(plan, replace(plan, nodes={**plan.nodes, node: other})).changes
    assert change.nodes == (node,) and change.old != change.new


@pytest.mark.parametrize("change", [{"why": "too slow"}, {"how": "2 stages"}, {"memory_bytes": 3.0}, {"step_s": None}])
def test_what_is_told_in_no_row_of_its_own_is_told_as_it_is(change: dict[str, Any]) -> None:
    plan = replace(planned("ddp").plan, alternatives=(Alternative("mine", (4,), 1.0, 2.0),))
    assert diff(plan, replace(plan, alternatives=(replace(plan.alternatives[0], **change),))).facts


def test_what_was_not_priced_in_time_is_not_said_to_need_too_much_memory() -> None:
    plan, unpriced = planned("ddp").plan, Alternative("mine", (4,), None, None, "time was up")
    (fact,) = diff(plan, replace(plan, alternatives=(*plan.alternatives, unpriced))).facts
    assert (fact.name, fact.old, fact.new) == ("mine 4 step_s", None, "no price")


@pytest.mark.parametrize("recipe", ["zero3", "tp", None])
def test_nodes_that_differ_are_those_of_which_the_plans_say_other_things(recipe: str | None) -> None:
    old, new = planned("ddp").plan, planned(recipe).plan
    found = autopar.diff(old, new)
    assert sorted(node for change in found.changes for node in change.nodes) == sorted(
        node for node in old.nodes if old.nodes[node] != new.nodes[node]
    )
    facts = {fact.name: (fact.old, fact.new) for fact in found.facts}
    assert (
        facts["strategy"] == ("ddp", new.strategy)
        and facts["step_s"] == (old.predicted.step_s, new.predicted.step_s)
        and "model" not in facts
    )


@pytest.mark.parametrize(
    ("renamed", "said"), [(False, "the same nodes with other sizes, arguments"), (True, "gone: .*; new: other")]
)
def test_another_model_is_said_with_what_its_nodes_tell(renamed: bool, said: str) -> None:
    plan = planned("ddp").plan
    first, *rest = plan.nodes
    nodes = {"other" if renamed else first: plan.nodes[first], **{name: plan.nodes[name] for name in rest}}
    assert re.match(said, diff(plan, replace(plan, graph_hash="1" * 64, nodes=nodes)).graph)
    assert not diff(plan, replace(plan, seed=7)).graph


def test_a_plan_is_the_same_as_itself_read_again() -> None:
    plan = planned("ddp").plan
    assert diff(plan, Plan.from_json(plan.to_json())).same


def test_stages_of_as_many_are_compared_one_by_one() -> None:
    plan = planned("ddp").plan
    node = next(iter(plan.nodes))
    old, new = (
        replace(
            plan,
            stages=(
                Stage((node,) * (at == 0), {"blocks": (0, 1 + at)}),
                Stage((node,) * (at == 1), {"blocks": (1 + at, 4)}, 1),
            ),
        )
        for at in (0, 1)
    )
    found = diff(old, new)
    assert {(fact.name, fact.old, fact.new) for fact in found.facts} == {
        ("stage 0", "place 0; blocks 0-0", "place 0; blocks 0-1"),
        ("stage 1", "place 1; blocks 1-3", "place 1; blocks 2-3"),
    }
    (change,) = found.changes
    assert change.nodes == (node,) and change.old.endswith("in stage 0") and change.new.endswith("in stage 1")


def test_nodes_of_parts_are_compared_with_those_of_the_whole_run() -> None:
    """A run in parts that are laid out as the run was differs in nothing but that; only the value that comes into the
    rest of a block is new."""
    plan = planned("ddp").plan
    one, other = list(dict.fromkeys(plan.nodes.values()))[:2]
    whole = replace(plan, nodes={"x": one, "run/up": one, "run/down": one})
    parts: dict[str, dict[str, int | str]] = {"run": {"rest": "up", "tail": 1}}
    nodes = {"x": one, "run/up": one, "rest/up": other, "rest/down": one, "tail/up": one, "tail/down": one}
    alike = replace(plan, nodes=nodes, parted=parts)
    assert [(change.nodes, change.old) for change in diff(whole, alike).changes] == [(("rest/up",), "")]
    assert [(change.nodes, change.new) for change in diff(alike, whole).changes] == [(("rest/up",), "")]
    apart = replace(alike, nodes={**nodes, "tail/down": other})
    for found in (diff(whole, apart), diff(alike, apart)):
        assert ("tail/down",) in [change.nodes for change in found.changes]


def test_the_command_says_it_as_text_and_as_json(tmp_path: Any) -> None:
    for recipe in ("ddp", "tp"):
        planned(recipe).plan.save(tmp_path / f"{recipe}.json")
    names = [str(tmp_path / f"{recipe}.json") for recipe in ("ddp", "tp")]
    same, text, data = (
        CliRunner().invoke(app, ["diff", *arguments])
        for arguments in ((names[0], names[0]), (*names, "--rows", "1"), (*names, "--json", "-"))
    )
    assert (same.exit_code, text.exit_code, data.exit_code) == (0, 1, 1) and "are the same plan" in same.stdout
    assert "strategy" in text.stdout and "step" in text.stdout and "more nodes: --rows" in text.stdout
    assert json.loads(data.stdout) == json.loads(
        json.dumps(diff(*(planned(recipe).plan for recipe in ("ddp", "tp"))).to_dict())
    )
