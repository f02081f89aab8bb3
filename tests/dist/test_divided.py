"""Blocks in two halves, and stages that end between these, on local ranks against one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.pipeline import units
from autopar.plan import Plan
from tests.helpers.divided import DEEP, divided, found
from tests.helpers.remat import rematerialised
from tests.helpers.verify import Subject, by_chance, by_recipe, by_stages, planner_of, subject


def right(who: Subject, made: Plan) -> None:
    """Raises AssertionError, with what is wrong, unless the plan computes what one device does."""
    report = who.verified(replace(made, parted=who.captured.parts), batch=16)
    wrong = [row for row in report.rows if not row.ok]
    assert report.ok, f"{len(wrong)} of {len(report.rows)}: {wrong[:5]} {report.first}"


def in_stages(who: Subject, recipe: str, schedule: str, virtual: int) -> Plan:
    """Two places of two ranks, a stage of which ends inside of the last block."""
    names = [unit.name for unit in units(planner_of(who, (2,)).program)]
    rest = next(names.index(name) for name in names if name.endswith("_rest"))
    bounds = [rest] if virtual == 1 else [rest - 1, rest, len(names) - 2]
    return by_stages(who, (2,), recipe, 2, 4, schedule, virtual, bounds)


@pytest.mark.parametrize(
    ("name", "recipe", "schedule", "virtual", "level"),
    [
        ("hf-gpt2", "zero1", "1f1b", 1, "selective"),  # with a tied weight, on both places
        ("hf-llama", "zero3", "interleaved_zero_bubble", 2, "none"),
        pytest.param("hf-llama", "megatron", "interleaved_1f1b", 2, "full", marks=pytest.mark.slow),
        pytest.param("hf-llama", "zero1", "dualpipev", 2, "none", marks=pytest.mark.slow),
        pytest.param("hf-mixtral", "zero3", "gpipe", 1, "random 1", marks=pytest.mark.slow),
    ],
)
def test_stages_that_end_inside_of_a_block(name: str, recipe: str, schedule: str, virtual: int, level: str) -> None:
    who = divided(name)
    right(who, rematerialised(who, in_stages(who, recipe, schedule, virtual), level))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_halves_with_any_layouts(seed: int) -> None:
    """In one stage, divided at any point: more than one value goes from half to half."""
    who = divided("hf-gpt2", seed)
    right(who, by_chance(who, (2, 2), seed))


@pytest.mark.parametrize("recipe", ["zero3", pytest.param("zero1", marks=pytest.mark.slow)])
def test_halves_in_one_stage(recipe: str) -> None:
    who = divided("hf-llama")
    right(who, rematerialised(who, by_recipe(who, (2,), recipe), "full"))


@pytest.mark.parametrize(
    ("schedule", "mixed"),
    [
        ("interleaved_1f1b", True),
        ("zbv_zero_bubble", False),
        *(
            pytest.param(name, False, marks=pytest.mark.slow)
            for name in ("interleaved_1f1b", "interleaved_zero_bubble")
        ),
    ],
)
def test_the_answer_of_the_search(schedule: str, mixed: bool) -> None:
    who, (_, made) = subject(DEEP, batch=16), found(2, schedule, mixed=mixed)
    assert made.plan.parted
    plan = replace(made.plan, model=who.name, graph_hash=who.captured.graph_hash)
    right(replace(who, captured=who.captured.parted(plan.parted), cases={}, references={}), plan)
