"""Tables that are extended by a row: every row names what exists, no name is there twice, and what lists the rows by
hand has them all."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.cli import app
from autopar.cluster import Cluster, presets
from autopar.cluster.types import Device, Level, Protocol
from autopar.codegen.algorithms import ALGORITHM_TEXTS, OPERAND_TEXTS
from autopar.errors import PlanError
from autopar.joint.spaces import of_recipe
from autopar.optimizers import OPTIMIZERS
from autopar.pipeline.schedules import SCHEDULES
from autopar.plan import Alternative, NodePlan, Plan, Predicted, Stage
from autopar.problem.settings import OFFLOADED
from autopar.recipes import _TABLE as RECIPE_ROWS
from autopar.recipes import RECIPES, Recipe
from autopar.recipes.offload import _TABLE as OFFLOAD_ROWS
from autopar.recipes.offload import Offload
from autopar.recipes.pipelines import _TABLE as PIPELINE_ROWS
from autopar.recipes.pipelines import PipelineRecipe
from autopar.recipes.roles import data
from autopar.rules.algorithms import ALGORITHMS
from autopar.search import SEARCHES

DOCS = Path(__file__).parents[2] / "docs"


def test_no_two_strategies_have_one_name() -> None:
    names = Counter(row.name for row in (*RECIPE_ROWS, *PIPELINE_ROWS, *OFFLOAD_ROWS))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("row", [*RECIPE_ROWS, *PIPELINE_ROWS], ids=lambda row: row.name)
def test_roles_are_predicates_for_so_many_ranks(row) -> None:
    assert row.roles and row.about
    for role in row.roles:
        assert list(inspect.signature(role).parameters) == ["ways"] and list(inspect.signature(role(2)).parameters) == [
            "op",
            "option",
        ]


def test_pipelines_have_schedules_and_offloads_have_recipes() -> None:
    assert {row.schedule for row in PIPELINE_ROWS} <= set(SCHEDULES)
    assert {row.base for row in OFFLOAD_ROWS} <= set(RECIPES) and {row.held for row in OFFLOAD_ROWS} <= set(
        filter(None, OFFLOADED)
    )


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (lambda: Recipe("mine", (), ""), r"recipe mine: roles are \(\), wanted a tuple of functions"),
        (lambda: Recipe("mine", ("data",), ""), r"recipe mine: roles are \('data',\), wanted"),  # type: ignore[arg-type]
        (lambda: Recipe("mine", data, ""), "recipe mine: roles are <function data"),  # type: ignore[arg-type]
        (lambda: PipelineRecipe("mine", "1f1b", (), ""), "recipe mine: roles are"),
        (
            lambda: PipelineRecipe("mine", "1f1b", (data,), "", virtual=0),
            "recipe mine: virtual is 0, wanted a number of stages",
        ),
        (
            lambda: of_recipe(PipelineRecipe("mine", "1f2b", (data,), "")),
            r"recipe mine: schedule is '1f2b', wanted one of .*near: 1f1b",
        ),
        (lambda: Offload("mine", "zero9", "optimizer", ""), "recipe mine: base is 'zero9', wanted one of single, ddp"),
        (
            lambda: Offload("mine", "zero1", "gradients", ""),
            "recipe mine: held is 'gradients', wanted one of optimizer, parameters",
        ),
    ],
)
def test_a_malformed_row_is_refused_by_its_name(row: Callable[[], object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        row()


def test_what_splits_operators_is_written_by_the_emitter() -> None:
    assert set(ALGORITHMS) == {*ALGORITHM_TEXTS, *OPERAND_TEXTS}


@pytest.mark.parametrize("name", presets())
def test_presets_are_called_as_their_files(name: str) -> None:
    assert Cluster.parse(name).name == name


def test_the_command_line_names_every_search_and_optimizer() -> None:
    said = inspect.signature(app.plan, eval_str=True).parameters["search"].annotation.__metadata__[0].help
    text = (DOCS / "cli.md").read_text()
    assert [name for name in SEARCHES if name not in said or name not in text] == []
    assert [name for name in OPTIMIZERS if name not in text] == []


@pytest.mark.parametrize(
    ("page", "kinds"),
    [("clusters.md", (Device, Level, Protocol)), ("plan-file.md", (Plan, NodePlan, Stage, Predicted, Alternative))],
)
def test_the_docs_name_every_field_of_the_files(page: str, kinds: tuple[type, ...]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert [
        f"{kind.__name__}.{field.name}"
        for kind in kinds
        for field in dataclasses.fields(kind)
        if f"`{field.name}`" not in text
    ] == []


def test_the_docs_name_what_a_file_of_a_cluster_must_have() -> None:
    _, _, said = (DOCS / "clusters.md").read_text(encoding="utf-8").partition("A file without a `base`")
    said = said.partition("All else may be left out.")[0]
    wanted = [
        field.name
        for kind in (Device, Level)
        for field in dataclasses.fields(kind)
        if field.default is field.default_factory is dataclasses.MISSING
    ]
    assert [name for name in wanted if f"`{name}`" not in said] == []
