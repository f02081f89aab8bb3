"""Pipelines by name: laid, cut, priced, and right on ranks; and found where nothing fits without."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar import joint
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint.choice import staged
from autopar.joint.explore import Explorer
from autopar.joint.search_context import SearchContext
from autopar.joint.spaces import NAIVE, SEARCH, of_recipe
from autopar.joint.timetables import Kind
from autopar.plan import Plan
from autopar.problem.settings import Settings
from autopar.recipes.pipelines import PIPELINES
from autopar.request import Request
from tests.helpers.planned import graph
from tests.helpers.verify import Subject, subject


def _planned(who: Subject, cluster: Cluster, recipe: str | None, batch: int = 8) -> Plan:
    return joint.plan(
        who.captured.gm,
        {**who.captured.hints, "b": batch},
        Request(cluster, Settings("train"), recipe=recipe, time_limit_s=60.0),
        model=who.name,
        graph_hash=who.captured.graph_hash,
    )


@pytest.mark.parametrize("recipe", PIPELINES)
def test_every_pipeline_recipe_is_right_on_ranks(recipe: str) -> None:
    who = subject("hf-gpt2")
    made = _planned(who, Cluster.parse("cpu:1x4"), recipe)
    assert made.strategy == recipe and made.schedule == PIPELINES[recipe].schedule and made.ranks == 4
    assert Plan.from_json(made.to_json()) == made
    assert made.predicted.step_s >= made.predicted.compute_s > 0
    assert all(other.step_s is None or other.step_s >= made.predicted.step_s for other in made.alternatives)
    report = who.verified(made)
    assert report.ok, [row for row in report.rows if not row.ok][:4]


@pytest.mark.slow  # the search goes on to its limit; test_best.py has cases that are short of memory in the fast tier
def test_stages_where_nothing_else_fits() -> None:
    """With an eighth more memory than the thriftiest named pipeline keeps the plan is a pipeline, and right; with far
    less there is none."""
    who, base = subject("hf-gpt2"), Cluster.parse("cpu:1x4")
    context = SearchContext(who.captured.gm, {**who.captured.hints, "b": 64}, Request(base, Settings("train")))
    walks = [
        Explorer(context, of_recipe(PIPELINES[name]), math.inf, time.monotonic() + 60)
        for name in ("1f1b", "3d", "pp_zero3")
    ]
    needed = min(found.memory_bytes for walk in walks if walk.run() for found in walk.fit.values())
    made = _planned(who, _with_memory(base, 1.12 * needed), None, 64)
    assert made.pipelined and made.predicted.memory_bytes <= 1.12 * needed
    report = who.verified(made, 64)
    assert report.ok, [row for row in report.rows if not row.ok][:4]
    with pytest.raises(InfeasibleError, match=r"(?s)no plan fits.*in pipeline stages: none of"):
        _planned(who, _with_memory(base, 0.3 * needed), None, 64)


def _with_memory(cluster: Cluster, usable: float) -> Cluster:
    device = dataclasses.replace(cluster.device, memory_bytes=2**21, usable_memory=usable / 2**21)
    return Cluster(cluster.name, cluster.levels, device)


ALONE = dataclasses.replace(SEARCH, kinds=(Kind("1f1b"),), axes=0)


@pytest.mark.parametrize(("model", "mesh"), [("hf-gpt2", (4,)), ("hf-llama", (2, 2))])
def test_microbatches_on_one_place_are_right_on_ranks(model: str, mesh: tuple[int, ...]) -> None:
    """Gradients add up over the microbatches of a step, whatever a place does with each of them."""
    who = subject(model)
    context = SearchContext(
        who.captured.gm, {**who.captured.hints, "b": 8}, Request(Cluster.parse("cpu:1x4"), Settings("train"), mesh=mesh)
    )
    made = staged(context, [ALONE], None, {"model": who.name, "graph_hash": who.captured.graph_hash})
    assert made.places == 1 and made.microbatches > 1 and made.mesh == mesh
    report = who.verified(made)
    assert report.ok, [row for row in report.rows if not row.ok][:4]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [8, 1])
def test_one_microbatch_on_several_places_is_right_on_ranks(batch: int) -> None:
    """What the free search makes of it; a batch of one sample has no other pipeline."""
    who = subject("hf-llama")
    context = SearchContext(
        who.captured.gm, {**who.captured.hints, "b": batch}, Request(Cluster.parse("cpu:1x4"), Settings(), mesh=(2,))
    )
    made = staged(context, [NAIVE], None, {"model": who.name, "graph_hash": who.captured.graph_hash})
    assert (made.strategy, made.schedule, made.grid, made.microbatches) == ("naive", "naive", (2, 2), 1)
    report = who.verified(made, batch)
    assert report.ok, [row for row in report.rows if not row.ok][:4]


def test_a_search_that_ran_out_of_time_says_so() -> None:
    who = subject("gpt")
    request = Request(Cluster.parse("h100:1x2"), Settings("train"), time_limit_s=1e-3)
    made = joint.plan(
        who.captured.gm, {**who.captured.hints, "b": 8}, request, model=who.name, graph_hash=who.captured.graph_hash
    )
    assert [note for note in made.notes if note.startswith("time was up (0.001 s)")]


class _Sampled(nn.Module):
    """A small variational autoencoder: a chain of operators without parameters ends in its loss. `stem` alone has
    parameters where it is `bare`."""

    def __init__(self, *, bare: bool = False) -> None:
        super().__init__()
        self.stem, self.up = nn.Linear(16, 16), nn.Identity() if bare else nn.Linear(8, 16)

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        mean, log_variance = self.stem(x).chunk(2, -1)
        made = self.up(mean + noise * (log_variance / 2).exp())
        return (made - x[:, : made.shape[1]]).square().sum(-1).mean() - (
            1 + log_variance - mean.square() - log_variance.exp()
        ).sum(-1).mean() / 2


def test_places_without_parameters_are_no_cuts() -> None:
    found = autopar.compile(
        _Sampled(), "cpu:1x2", (torch.zeros(8, 16), torch.zeros(8, 8)), recipe="1f1b", mesh=(1,)
    ).plan
    assert found.places == 2 and [sum(name.startswith("linear") for name in stage.nodes) for stage in found.stages] == [
        1,
        1,
    ]


class _Ended(nn.Module):
    """Four maps, and a loss that is a chain of operators without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for each in self.maps:
            x = each(x).tanh()
        for _ in range(3):
            x = x.sin().exp().square()
        return x.mean()


@pytest.mark.parametrize("recipe", ["interleaved", "zero_bubble"])
def test_places_of_several_stages_have_parameters_in_some(recipe: str) -> None:
    found = autopar.compile(_Ended(), "cpu:1x4", (torch.zeros(8, 8),), recipe=recipe, mesh=(2,), time_limit_s=10.0).plan
    assert {
        stage.place for stage in found.stages if any(name.startswith("linear") for name in stage.nodes) or stage.blocks
    } == {0, 1}


def test_too_few_pieces_with_parameters_say_so() -> None:
    with pytest.raises(
        InfeasibleError,
        match=r"would hold no parameter: 1 of the \d+ pieces that stages are made of .* have any; use fewer places, or "
        r"a recipe without a pipeline",
    ):
        autopar.compile(
            _Sampled(bare=True), "cpu:1x2", (torch.zeros(8, 16), torch.zeros(8, 8)), recipe="1f1b", mesh=(1,)
        )


@pytest.mark.parametrize(("batch", "near"), [(7, "4 or 8"), (3, "4"), (6, ""), (8, "")])
def test_a_batch_that_no_axis_divides_is_noted(batch: int, near: str) -> None:
    request = Request(Cluster.parse("cpu:1x4"), Settings(), time_limit_s=20.0)
    made = joint.plan(graph(), {"b": batch}, request, model="stack", graph_hash="0" * 64)
    notes = [
        note for note in made.notes if note.startswith(f"a batch of {batch} has no divisor in common with 4 devices")
    ]
    assert [note.endswith(f"use a batch of {near}") for note in notes] == [True] * bool(near)
    assert any(SearchContext(graph(), {"b": batch}, request).whole.cuts_samples(ways) for ways in (2, 4)) == (not near)
