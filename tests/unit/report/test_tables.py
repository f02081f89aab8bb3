"""Tables hold what they should, at the width of a pipe."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from autopar.recipes import RECIPES
from autopar.report.checks import checked
from autopar.report.tables import kinds, report
from autopar.verify import Report, Row
from tests.helpers.planned import planned


def text(renderable: object) -> str:
    console = Console(file=io.StringIO(), width=140, markup=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


PRICED = [name for name in RECIPES if name not in ("cp", "ulysses", "ep")]  # those are for models with attention or experts


def test_the_whole_plan() -> None:
    made = planned()
    shown = text(report(made.plan, made.program))
    for part in ("stack on cpu:1x4, train", "mesh", "b = 2048", "exposed", "no plan is below", *PRICED, "up.weight", "2048x512", "layers.0 ... 3"):
        assert part in shown, part
    assert max(map(len, shown.splitlines())) <= 140


def test_a_forced_recipe_has_no_proof() -> None:
    made = planned("tp")
    shown = text(report(made.plan, made.program))
    assert "none proven" in shown and "column" in shown and "row" in shown


@pytest.mark.parametrize(("recipe", "kind"), [("ddp", "sample"), ("tp", "parameter")])
def test_kinds_of_splits(recipe: str, kind: str) -> None:
    assert kinds(planned(recipe).plan.nodes)[kind] >= 2


def test_a_check_that_is_right_and_one_that_is_wrong() -> None:
    right = Row("loss", "loss", 1e-12, 1e-9)
    assert "all values are within the tolerance" in text(checked(Report((right,), (4,))))
    wrong = text(checked(Report((right, Row("up.weight", "gradient", 0.25, 1e-9)), (4,), "layers/linear (gradient)")))
    assert "WRONG" in wrong and "0.25" in wrong and "first node that differs: layers/linear (gradient)" in wrong
    assert "1 of 2 values are wrong" in wrong
