"""Tables hold what they should, at the width of a pipe."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from autopar import joint
from autopar.cluster import Cluster
from autopar.memory import memory_of
from autopar.plan import Alternative
from autopar.recipes import RECIPES
from autopar.recipes.pipelines import PIPELINES
from autopar.report.checks import checked
from autopar.report.memory import breakdown, fit_table
from autopar.report.tables import kinds, overview, report
from autopar.request import Request
from autopar.verify import Report, Row
from tests.helpers.planned import graph, planned


def text(renderable: object, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False)
    console.print(renderable)
    return console.file.getvalue()  # type: ignore[attr-defined]


# those are for models with attention or experts
PRICED = [name for name in RECIPES if name not in ("cp", "ulysses", "ep")]


def test_the_whole_plan() -> None:
    made = planned()
    shown = text(report(made.plan, made.program))
    for part in (
        "stack on cpu:1x4, train",
        "mesh",
        "b = 2048",
        "exposed",
        "no plan is below",
        *PRICED,
        "up.weight",
        "2048x512",
        "layers.0 ... 3",
    ):
        assert part in shown, part
    assert max(map(len, shown.splitlines())) <= 140


def test_seconds_of_a_pipeline_that_wait_for_places_are_no_communication() -> None:
    """Half of a step was `173 ms exposed` where 60 ms were communication, and the rest the bubble and the optimizer."""
    request = Request(Cluster.parse("cpu:1x4"), recipe="gpipe", mesh=(2,))
    shown = text(overview(joint.plan(graph(), {"b": 16}, request, model="stack", graph_hash="0" * 64)))
    assert "waiting for other places" in shown and "with communication in them" in shown
    assert "exposed" not in shown and "exposed" in text(overview(planned().plan))


def test_no_two_of_what_was_priced_look_alike() -> None:
    """A mesh of 2x2 may be two places of two ranks, or one place whose step has microbatches."""
    made = joint.plan(
        graph(), {"b": 16}, Request(Cluster.parse("cpu:1x4"), time_limit_s=10.0), model="stack", graph_hash="0" * 64
    )
    priced = [other for other in made.alternatives if other.step_s is not None]
    assert len({(other.name, other.mesh, other.how) for other in priced}) == len(priced)
    cut = [other for other in priced if other.name in PIPELINES or "stages" in other.how]
    assert cut and all(
        f" stages on {other.mesh[0]} places, " in other.how and other.how in text(overview(made)) for other in cut
    )


def test_reasons_without_a_price_are_shown_whole() -> None:
    """They were cut at 72 characters, and two that differ behind that were one row."""
    made = planned()
    whys = tuple(f"{'needs more memory than a device has to give, ' * 3}{end}" for end in ("by 1 GiB", "by 2 GiB"))
    missing = tuple(
        replace(made.plan.alternatives[0], name=name, step_s=None, memory_bytes=None, why=why)
        for name, why in zip(("first", "second"), whys, strict=True)
    )
    shown = text(overview(replace(made.plan, alternatives=missing)), 100)
    table = " ".join(shown.partition("without a price")[2].split())
    assert "by 1 GiB" in table and "by 2 GiB" in table and "..." not in table
    assert max(map(len, shown.splitlines())) <= 100


def test_the_spaces_of_the_search_are_named_as_such() -> None:
    rows = tuple(Alternative(name, (2, 2), 1.0, 2.0) for name in ("search", "naive", "naive_mp"))
    shown = text(report(replace(planned().plan, alternatives=rows), planned().program))
    for name in ("pipelines (search)", "pipelines of one microbatch (search)", "naive_mp"):
        assert f"{name} 2x2" in " ".join(shown.split()), name


def test_a_forced_recipe_has_no_proof() -> None:
    made = planned("tp")
    shown = text(report(made.plan, made.program))
    assert "none proven" in shown and "column" in shown and "row" in shown
    assert "no named recipe" not in shown and "ilp (found by this search; no named recipe)" in text(
        overview(replace(made.plan, strategy="ilp"))
    )


@pytest.mark.parametrize(("recipe", "kind"), [("ddp", "sample"), ("tp", "parameter")])
def test_kinds_of_splits(recipe: str, kind: str) -> None:
    assert kinds(planned(recipe).plan.nodes)[kind] >= 2


def test_a_check_that_is_right_and_one_that_is_wrong() -> None:
    right = Row("loss", "loss", 1e-12, 1e-9)
    assert "all values are within the tolerance" in text(checked(Report((right,), (4,))))
    wrong = text(checked(Report((right, Row("up.weight", "gradient", 0.25, 1e-9)), (4,), "layers/linear (gradient)")))
    assert "WRONG" in wrong and "0.25" in wrong and "first node that differs: layers/linear (gradient)" in wrong
    assert "1 of 2 values are wrong" in wrong


def test_memory_names_stages_as_the_plan_does() -> None:
    """The second stage of the first of two places, stage 2 or 3, was `its stage 2`, and the peak in stage 0."""
    request = Request(Cluster.parse("cpu:1x2"), recipe="interleaved")
    made = joint.plan(graph(), {"b": 16}, request, model="stack", graph_hash="0" * 64)
    shown = text(breakdown(memory_of(graph(), made), 1))
    first, second = shown.split("place 1: ")
    for place, where in enumerate((first, second)):
        for number, stage in enumerate(made.stages):
            assert (f"kept for the backward in stage {number}" in where) == (stage.place == place)


def test_names_of_strategies_are_not_broken() -> None:
    """As wide as what goes to files and pipes: optimizer_offload was on two lines, and `activatio ns` above them."""
    table = fit_table("will it fit", ["batch", "sequence"])
    table.add_row("optimizer_offload", "2x2x2", *["22.5 GiB"] * 8, "yes", "120", "8192 (all positions)")
    assert "\noptimizer_offload  2x2x2" in text(table) and "activations" in text(table)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_narrow_terminals_lose_no_cell_and_break_no_short_word(width: int) -> None:
    """Of the columns of `autopar memory` two were left of 13 at a width of 40, and numbers went over three lines."""
    table, headers = fit_table("will it fit", ["batch", "sequence"]), ("weights", "fits", "largest sequence")
    table.add_row("optimizer_offload", "2x2x2", *[f"{n}.25 GiB" for n in range(8)], "yes", "120", "8192 (all)")
    shown = text(table, width).splitlines()
    assert max(map(len, shown)) <= width
    for words in ("optimizer_offload", "2x2x2", *(f"{n}.25 GiB" for n in range(8)), "8192 (all)", *headers):
        assert any(words in line for line in shown), words
    made = planned()
    whole = text(report(made.plan, made.program), width)
    assert max(map(len, whole.splitlines())) <= width
    for name in [*PRICED, "up.weight", "2048x512", "replicated"]:
        assert name in whole, name
