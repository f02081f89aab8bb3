"""Pipelines whose stages end inside of blocks, in the search."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import replace

import pytest
from rich.console import Console

from autopar.joint import choice, inside
from autopar.joint.spaces import SEARCH
from autopar.memory import predict
from autopar.plan import Plan
from autopar.report.tables import overview
from autopar.simulate import simulate
from tests.helpers.divided import DEEP, context, found

SCHEDULES = ["1f1b", "interleaved_1f1b", "zbv_zero_bubble"]


def halves(plan: Plan) -> list[tuple[str, str]]:
    """Divided blocks: the names of their halves."""
    return [
        (front, rest)
        for scope, parts in plan.parted.items()
        for front, rest in itertools.pairwise([scope, *parts])
        if isinstance(parts[rest], str)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_end_inside_of_blocks_where_that_is_faster(schedule):
    between, made = found(2, schedule)
    assert made.step_s < 0.99 * between.step_s and made.cuts.bounds != between.cuts.bounds
    stage_of = {scope: index for index, stage in enumerate(made.plan.stages) for scope in stage.blocks}
    assert halves(made.plan) and all(stage_of[front] + 1 == stage_of[rest] for front, rest in halves(made.plan))
    assert "with cuts between blocks a step takes" in made.plan.notes[0]
    console = Console(width=400, file=io.StringIO(), record=True)
    console.print(overview(replace(made.plan, predicted=replace(made.plan.predicted, step_s=made.step_s))))
    assert "behind add_6" in console.export_text()
    assert Plan.from_json(made.plan.to_json()) == made.plan
    assert max(place.peak_bytes for place in predict(made.program, made.plan).places) == made.memory_bytes


def test_blocks_stay_whole_where_dividing_them_gains_hardly_anything(monkeypatch):
    between, _ = found(2, "1f1b")
    monkeypatch.setattr(inside, "HARDLY", 1.0)
    assert inside.cut_inside(context(2), between) is between


@pytest.mark.parametrize("mixed", [True, False])
def test_what_the_search_finds_is_cut_inside_of_blocks(mixed):
    between, _ = found(2, "interleaved_1f1b", mixed=mixed)
    made = choice._refined(context(2, mixed=mixed), between, (), math.inf)
    assert made is not None and halves(made.plan) and made.step_s < between.step_s


def test_another_pipeline_is_cut_inside_of_blocks_where_the_result_gains_nothing_by_that(monkeypatch):
    """Though the result would also be the fastest with even places: of its stages one may be a large operator outside
    of blocks, which cannot be cut."""
    between, cut = found(2, "interleaved_1f1b")
    best = replace(between, step_s=0.999 * between.step_s)
    monkeypatch.setattr(choice, "cut_inside", lambda _, each: cut if each is between else each)
    assert choice._refined(context(2), best, [best, between], math.inf) is cut


def test_a_pipeline_of_few_blocks_becomes_the_answer_by_that():
    """Four blocks on three places: with whole blocks one place is faster. Bounds of shapes count on these, so that what
    is claimed of the answer is the least work."""
    here = context(3)
    made = choice.staged(here, [SEARCH], None, {"model": DEEP, "graph_hash": ""})
    assert made.places > 1 and halves(made)
    assert made.predicted.step_s < 0.95 * min(row.step_s for row in made.alternatives if row.step_s is not None)
    assert made.predicted.bound_s == pytest.approx(here.work(1).step_s(3, 1, 1))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_simulated_as_priced(schedule):
    _, made = found(2, schedule)
    run = simulate(context(2).parted(made.plan.parted).gm, made.plan)
    assert run.step_s == pytest.approx(made.step_s, rel=0.02)
