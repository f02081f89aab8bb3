"""Tables that are extended by a row: every row names what exists, no name is there twice, and what lists the rows by hand has them all."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path

import pytest

from autopar.cli import app
from autopar.cluster import Cluster, presets
from autopar.codegen.algorithms import ALGORITHM_TEXTS, OPERAND_TEXTS
from autopar.optimizers import OPTIMIZERS
from autopar.pipeline.schedules import SCHEDULES
from autopar.problem.settings import OFFLOADED
from autopar.recipes import _TABLE as RECIPE_ROWS
from autopar.recipes import RECIPES
from autopar.recipes.offload import _TABLE as OFFLOAD_ROWS
from autopar.recipes.pipelines import _TABLE as PIPELINE_ROWS
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
        assert list(inspect.signature(role).parameters) == ["ways"] and list(inspect.signature(role(2)).parameters) == ["op", "option"]


def test_pipelines_have_schedules_and_offloads_have_recipes() -> None:
    assert {row.schedule for row in PIPELINE_ROWS} <= set(SCHEDULES)
    assert {row.base for row in OFFLOAD_ROWS} <= set(RECIPES) and {row.held for row in OFFLOAD_ROWS} <= set(filter(None, OFFLOADED))


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
