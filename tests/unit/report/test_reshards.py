"""The communication that is listed is the communication that was priced."""

from __future__ import annotations

import pytest

from autopar.codegen.context import Context
from autopar.problem.read_graph import read
from autopar.recipes import RECIPES
from autopar.report.reshards import reshards
from tests.helpers.planned import planned
from tests.helpers.verify import BATCH, SEQ, by_recipe, by_stages, planner_of, subject


@pytest.mark.parametrize("recipe", [None, *(name for name in RECIPES if name != "ep")])  # the stack has no experts
def test_the_rows_add_up_to_the_price_of_the_plan(recipe: str | None) -> None:
    made = planned(recipe)
    total = sum(row.step_s for row in reshards(made.program, made.plan))
    assert total == pytest.approx(made.plan.predicted.exposed_s, rel=1e-9)  # a CPU hides nothing


@pytest.mark.parametrize("level", ["selective", "full"])
@pytest.mark.parametrize("recipe", ["ddp", "zero3", "tp_sp", "hsdp"])
def test_what_runs_again_is_in_the_rows(recipe: str, level: str) -> None:
    """Weights that blocks gather for their second run, and changes of layout in it."""
    made = planned(recipe, remat=level)
    rows = reshards(made.program, made.plan)
    assert made.plan.remat and sum(row.step_s for row in rows) == pytest.approx(made.plan.predicted.exposed_s, rel=1e-9)
    assert [row.count for row in rows] == [each.count for each in Context(made.program, made.plan, {}).edges.reshards]


def test_a_pipeline_counts_what_each_place_runs() -> None:
    """What a stage moves it moves for every microbatch; the gradient of a weight that two places have is summed on
    both."""
    who = subject("hf-gpt2")
    rows = {
        row.tensor: row for row in reshards(planner_of(who, (2,)).program, by_stages(who, (2,), "ddp", 2, 4, "1f1b"))
    }
    assert {name: rows[name].count for name in ("div_tensor", "transformer.wte.weight", "transformer.wpe.weight")} == {
        "div_tensor": 4,
        "transformer.wte.weight": 2,
        "transformer.wpe.weight": 1,
    }


@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.parametrize("model", ["hf-gpt2", "hf-t5", "hf-bert"])
def test_tied_weights_are_priced_as_they_run(model: str, mesh: tuple[int, ...]) -> None:
    """Gathered by readers in different layouts, their gradients summed in buckets."""
    who = subject(model)
    program = read(who.captured.gm, {"b": BATCH, "s": SEQ}, training=True)
    for name in (
        name for name in ("ddp", "zero3", "tp", "tp_sp", "hsdp", "tp_zero3") if RECIPES[name].roles_on(len(mesh))
    ):
        made = by_recipe(who, mesh, name)
        total = sum(row.step_s for row in reshards(program, made))
        assert total == pytest.approx(made.predicted.exposed_s, rel=1e-9), name


def test_data_parallel_is_one_sum_per_weight() -> None:
    made = planned("ddp")
    rows = [row for row in reshards(made.program, made.plan) if row.role == "sync"]
    assert len(rows) == 8 and all("all-reduce" in row.reason for row in rows)
    assert sorted({row.count for row in rows}) == [1, 4]


def test_tensor_parallel_sums_once_forward_and_once_backward_per_block() -> None:
    made = planned("tp", batch=16)
    rows = [row for row in reshards(made.program, made.plan) if row.scope and row.step_s > 0 and row.role == "edge"]
    assert {row.tensor: row.reason.partition(" on rank")[0] for row in rows} == {
        "linear_default_1": "all-reduce",
        "x": "backward all-reduce",
        "down.bias": "mask",
    }
    assert len(rows) == 3 and all(row.count == 4 for row in rows)
    assert next(row.step_s for row in rows if row.tensor == "down.bias") < sum(row.step_s for row in rows) / 50, (
        "a bias that one rank adds costs next to nothing"
    )


def test_a_single_program_sends_nothing() -> None:
    made = planned("single")
    assert sum(row.step_s for row in reshards(made.program, made.plan)) == 0
