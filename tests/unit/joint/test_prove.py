"""Bounds that hold for all plans: of a whole search against its floor and its answer, of pipelines with memory so short
that blocks are run again."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint import background_proof, plan
from autopar.joint.effort import CLOSEST, Effort
from autopar.joint.pricing import Pricing
from autopar.joint.prove import CLOSER_LOOKS, CLOSEST_LOOKS, FEW_CLAIMS, GLANCE_LOOKS, LOOKS, Prover, proven_s
from autopar.joint.relaxed_bounds import cut_s
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_bounds import Timed
from autopar.joint.shapes import Shape
from autopar.joint.spaces import NAIVE, SEARCH, of_recipe
from autopar.plan import Plan
from autopar.problem.remat import LEVELS
from autopar.problem.settings import Settings
from autopar.recipes.pipelines import PIPELINES
from autopar.request import Request
from passes import ANNOTATE, NORMALIZE, run
from tests.helpers.export import B, export_graph
from tests.helpers.kinds import far
from tests.helpers.planned import Block, graph
from tests.helpers.verify import Subject, subject


def _planned(who: Subject, prove: bool) -> Plan:
    request = Request(Cluster.parse("h100:1x2"), Settings("train"), prove=prove)
    return plan(
        who.captured.gm, {**who.captured.hints, "b": 64}, request, model=who.name, graph_hash=who.captured.graph_hash
    )


def test_a_plan_is_proven_where_memory_is_not_short() -> None:
    who = subject("gpt")
    glanced, proven = _planned(who, prove=False), _planned(who, prove=True)
    assert proven.predicted.step_s == glanced.predicted.step_s
    prover = Prover(
        SearchContext(
            who.captured.gm, {**who.captured.hints, "b": 64}, Request(Cluster.parse("h100:1x2"), Settings("train"))
        )
    )
    floor_s = min(claim.bound_s for claim in prover.claims())
    assert floor_s < 0.8 * glanced.predicted.bound_s
    assert 0 <= proven.predicted.gap <= min(0.1, glanced.predicted.gap)


@pytest.mark.parametrize(
    ("name", "batch", "cluster"),
    [
        ("gpt", 8, "h100:1x2"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("hf-gpt2", 8, "h100:1x4"),
                ("hf-gpt2", 64, "cpu:1x4"),
                ("hf-t5", 16, "a100-80:2x2"),
                ("hf-llama", 16, "h100:2x2"),
                ("hf-vit", 32, "cpu:1x4"),
            )
        ),
    ],
)
def test_shapes_that_are_looked_at_together_are_all_bounded(name: str, batch: int, cluster: str) -> None:
    """Every shape under every timetable, solved to the end."""
    who, priced = subject(name), 0
    context = SearchContext(
        who.captured.gm, {**who.captured.hints, "b": batch}, Request(Cluster.parse(cluster), Settings("train"))
    )
    prover, pricing = Prover(context), Pricing(context, SEARCH)
    claims = prover.claims()
    assert any(len(claim.shapes) > 1 for claim in claims)
    for claim in claims:
        bound_s = prover.together_s(claim.shapes)
        for shape in claim.shapes:
            for table in pricing.tables(shape) if shape.microbatches > 1 else ():
                with suppress(InfeasibleError):
                    assert pricing.price(shape, [table], "none", exact=True).step_s >= bound_s * (1 - 1e-6), shape
                    priced += 1
    assert priced > 10


def test_a_proof_covers_the_mesh_of_the_answer() -> None:
    who = subject("gpt")
    context = SearchContext(
        who.captured.gm, {**who.captured.hints, "b": 64}, Request(Cluster.parse("h100:8x2"), Settings("train"))
    )
    always, own = set(Prover(context).shapes()), (4, 2, 2)
    assert set(Prover(context, mesh=own).shapes()) - always == {Shape(1, own, 1)}
    assert len(Prover(context, mesh=(8, 2)).shapes()) == len(Prover(context).shapes())


def test_shapes_are_looked_at_closer_one_by_one_the_others_together_from_the_beginning() -> None:
    who = subject("hf-gpt2")
    prover = Prover(
        SearchContext(
            who.captured.gm, {**who.captured.hints, "b": 8}, Request(Cluster.parse("h100:1x4"), Settings("train"))
        )
    )
    claim = max(prover.claims(), key=lambda claim: len(claim.shapes))
    looks = sum(together for together, _ in LOOKS)
    for _ in range(looks):
        (claim,) = prover.closer(claim, math.inf)
    first, others = prover.closer(claim, math.inf)
    assert (
        first.shapes + others.shapes == claim.shapes
        and len(first.shapes) == 1
        and (first.looks, others.looks) == (looks + 1, 0)
    )
    assert first.bound_s >= claim.bound_s == others.bound_s
    (closer,) = prover.closer(first, math.inf)
    (others,) = prover.closer(others, math.inf)
    assert closer.bound_s >= first.bound_s and prover.most_looks == CLOSEST_LOOKS
    assert len(prover.all_claims) <= FEW_CLAIMS and replace(prover, closely=False).most_looks == CLOSER_LOOKS


def test_a_claim_whose_first_shape_is_short_of_memory_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    who = subject("hf-gpt2")
    prover = Prover(
        SearchContext(
            who.captured.gm, {**who.captured.hints, "b": 8}, Request(Cluster.parse("h100:1x4"), Settings("train"))
        )
    )
    claim = replace(max(prover.claims(), key=lambda claim: len(claim.shapes)), looks=1)
    monkeypatch.setattr(Prover, "short_s", lambda self, shape: 2 * claim.bound_s)
    assert len(list(prover.closer(claim, math.inf))) == 1  # it is not short of memory
    monkeypatch.setattr(Prover, "_is_short", lambda self, shape: True)
    first, others = prover.closer(claim, math.inf)
    assert first.shapes == claim.shapes[:1] and others.shapes == claim.shapes[1:]
    assert (first.bound_s, first.looks, others.bound_s, others.looks) == (2 * claim.bound_s, 2, claim.bound_s, 0)


def test_of_many_claims_none_is_looked_at_closer_in_the_time_of_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    who = subject("hf-gpt2")
    prover = Prover(
        SearchContext(
            who.captured.gm, {**who.captured.hints, "b": 8}, Request(Cluster.parse("h100:1x4"), Settings("train"))
        ),
        closely=False,
    )
    monkeypatch.setattr("autopar.joint.prove.FEW_CLAIMS", len(prover.all_claims) - 1)
    assert prover.most_looks == GLANCE_LOOKS and replace(prover, closely=True).most_looks == CLOSEST_LOOKS


def test_beside_a_search_only_shapes_of_one_place_are_looked_at_by_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    who, efforts = subject("hf-gpt2"), list[Effort]()
    prover = Prover(
        SearchContext(
            who.captured.gm, {**who.captured.hints, "b": 8}, Request(Cluster.parse("h100:1x4"), Settings("train"))
        ),
        closely=False,
        ends_at=5.0,
    )
    most = dict(zip(prover.all_claims, prover.board.most_looks, strict=True))
    assert {looks for claim, looks in most.items() if claim.shapes[0].places == 1} == {CLOSER_LOOKS}
    assert {looks for claim, looks in most.items() if claim.shapes[0].places > 1} == {GLANCE_LOOKS}
    assert {*replace(prover, closely=True).board.most_looks} == {CLOSEST_LOOKS}
    monkeypatch.setattr(Prover, "bound_s", lambda self, shape, cutoff_s, effort: efforts.append(effort) or 0.0)
    one = min(prover.all_claims, key=lambda claim: claim.shapes[0].places)
    next(iter(prover.closer(replace(one, looks=GLANCE_LOOKS), math.inf)))
    assert efforts[0].cases > 0 and efforts[0].ends_at == 5.0


def test_where_little_stays_in_a_cache_no_shapes_are_looked_at_together() -> None:
    who, cluster = subject("hf-gpt2"), Cluster.parse("cpu:1x4")
    device = replace(cluster.device, cache_bytes=1 << 20, cache_bandwidth_bytes_s=1e12)
    spilling = [
        replace(level, protocols=tuple(replace(protocol, spill_bytes=1e6, spill=2.0) for protocol in level.protocols))
        for level in cluster.levels
    ]
    for each in (replace(cluster, device=device), replace(cluster, levels=tuple(spilling))):
        claims = Prover(
            SearchContext(who.captured.gm, {**who.captured.hints, "b": 8}, Request(each, Settings("train")))
        ).claims()
        assert len({claim.shapes for claim in claims}) == len(claims) and all(
            len(set(claim.shapes)) == 1
            for claim in claims
            if not claim.shapes[0].naive  # looked at one by one in any case
        )


def test_a_plan_whose_search_took_most_of_its_time_says_that_its_gap_is_to_the_least_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background_proof, "able", lambda: False)  # which may prove something in no time
    who = subject("hf-gpt2")
    made = [
        plan(
            who.captured.gm,
            {**who.captured.hints, "b": 8},
            Request(Cluster.parse("cpu:1x2"), time_limit_s=limit_s),
            model=who.name,
            graph_hash=who.captured.graph_hash,
        )
        for limit_s in (0.01, 60.0)
    ]
    assert [any("longer time limit, or a proof" in note for note in each.notes) for each in made] == [True, False]
    assert made[0].predicted.gap > made[1].predicted.gap


@pytest.mark.parametrize("mode", ["train", "inference"])
def test_no_recipe_is_faster_than_a_glance_proves(mode: str) -> None:
    who = subject("hf-llama")
    request = Request(Cluster.parse("h100:1x4"), Settings(mode))
    made = plan(
        who.captured.gm, {**who.captured.hints, "b": 8}, request, model=who.name, graph_hash=who.captured.graph_hash
    )
    bound_s = proven_s(SearchContext(who.captured.gm, {**who.captured.hints, "b": 8}, request), math.inf, closely=False)
    assert (
        0.5 * made.predicted.step_s
        < bound_s
        <= min(made.predicted.step_s, *(other.step_s for other in made.alternatives if other.step_s))
    )


def test_shapes_are_bound_above_their_work() -> None:
    who = subject("gpt")
    prover = Prover(
        SearchContext(
            who.captured.gm, {**who.captured.hints, "b": 8}, Request(Cluster.parse("cpu:1x4"), Settings("train"))
        )
    )
    for shape in prover.shapes()[::3]:
        assert prover.bound_s(shape) >= prover.floor_s(shape) * (1 - 1e-6)


@pytest.mark.parametrize(
    ("places", "mesh"),
    [(2, (1,)), *(pytest.param(*at, marks=pytest.mark.slow) for at in ((1, (2,)), (1, (4,)), (2, (2,))))],
)
def test_several_microbatches_short_of_memory_are_no_faster_than_is_proven(places: int, mesh: tuple[int, ...]) -> None:
    """Every level and timetable, solved to the end with less memory than the fastest plan takes."""
    who = subject("hf-gpt2")
    request = replace(
        Request(Cluster.parse(f"h100:1x{places * mesh[0]}"), Settings("train")), memory_bytes=float("inf")
    )
    context, shape, priced = (
        SearchContext(who.captured.gm, {**who.captured.hints, "b": 256}, request),
        Shape(places, mesh, 4),
        0,
    )
    pricing = Pricing(context, SEARCH)
    roomy = pricing.price(shape, pricing.tables(shape), "none", exact=True)
    assert Prover(context).bound_s(shape) <= roomy.step_s
    short = Pricing(context.limited(0.85 * roomy.memory_bytes), SEARCH)
    bound_s = Prover(short.context).bound_s(shape)
    for table in short.tables(shape):
        for level in LEVELS:
            with suppress(InfeasibleError):
                assert short.price(shape, [table], level, exact=True).step_s >= bound_s * (1 - 1e-9)
                priced += 1
    assert priced


@pytest.mark.slow
def test_no_named_pipeline_is_faster_than_is_proven_of_its_shape() -> None:
    """Over links so slow that 1F1B waits for every backward to come back, and GPipe does not: it was no timetable of
    the search, so that a plan of it was faster than what was proven of all plans."""
    who, shape, base = subject("hf-llama-deep"), Shape(5, (1,), 12), Cluster.parse("cpu:1x5")
    levels = tuple(
        replace(
            level,
            bandwidth_bytes_s=level.bandwidth_bytes_s / 6,
            protocols=tuple(replace(protocol, start_s=1e-6, hop_s=1e-7) for protocol in level.protocols),
        )
        for level in base.levels
    )
    request = Request(replace(base, levels=levels, device=replace(base.device, launch_s=1e-7)), Settings("train"))
    context = SearchContext(who.captured.gm, {**who.captured.hints, "b": 12}, request)
    named_s = dict[str, float]()
    for recipe in PIPELINES.values():  # one rank on a place: they differ in their schedules alone
        if recipe.schedule != "naive" and recipe.schedule not in named_s:
            pricing = Pricing(context, of_recipe(recipe))
            with suppress(InfeasibleError):
                named_s[recipe.schedule] = pricing.price(shape, pricing.tables(shape), "none", exact=True).step_s
    assert named_s["gpipe"] < 0.95 * named_s["1f1b"]
    assert Prover(context).bound_s(shape) <= min(named_s.values()), named_s
    free = Pricing(context, SEARCH)
    assert free.price(shape, free.tables(shape), "none", exact=True).step_s <= min(named_s.values()) * (1 + 1e-9)


def test_one_microbatch_on_several_places_is_no_faster_than_is_proven() -> None:
    """Each rank steps the optimizer of its own stage alone, so that such a plan is faster than all others here. It was
    in no claim."""
    context = SearchContext(graph(8), {"b": 2}, Request(far("h100:1x2"), Settings("train")))
    prover, pricing = Prover(context), Pricing(context, NAIVE)
    (shape,) = NAIVE.shapes(context)
    step_s = pricing.price(shape, pricing.tables(shape), "none", exact=True).step_s
    assert prover.floor_s(shape) < prover.together_s((shape,)) < prover.bound_s(shape) <= step_s
    assert prover.bound_s(shape) > 0.9 * step_s
    others_s = min(prover.bound_s(other) for other in prover.shapes() if other != shape)
    assert proven_s(context, math.inf) == pytest.approx(prover.bound_s(shape)) and step_s < 0.98 * others_s


@pytest.mark.slow
def test_one_microbatch_on_several_places_is_found() -> None:
    """With all of the batch on both ranks of each place: the named pipeline, which splits samples there, is slower."""
    request = Request(far("h100:1x4"), Settings("train"))
    made = plan(graph(8), {"b": 2}, request, model="stack", graph_hash="0" * 64)
    assert (made.strategy, made.grid, made.microbatches) == ("naive", (2, 2), 1)
    others_s = [other.step_s for other in made.alternatives if other.step_s is not None and other.name != "naive"]
    assert made.predicted.bound_s < made.predicted.step_s < 0.97 * min(others_s)


@pytest.mark.parametrize(
    ("name", "mesh"), [("hf-gpt2", (2,)), pytest.param("hf-llama", (2, 2), marks=pytest.mark.slow)]
)
def test_places_have_whole_blocks(name: str, mesh: tuple[int, ...]) -> None:
    """Two blocks and a head on two places: one place has both blocks, or each has one and the head one of them. Here
    that is about as much as the mean of both places, and holds."""
    who, shape = subject(name), Shape(2, mesh, 4)
    context = SearchContext(
        who.captured.gm,
        {**who.captured.hints, "b": 256},
        Request(Cluster.parse(f"h100:2x{math.prod(mesh)}"), Settings("train")),
    )
    pricing = Pricing(context, SEARCH)
    here = Timed(context, pricing, shape)
    whole_s, mean_s = here.whole_s(math.inf), cut_s([here.mean(hosted=False)], math.inf, CLOSEST, [])
    divided_s = Prover(context).short_s(shape)
    least_s = min(pricing.price(shape, [table], "none", exact=True).step_s for table in pricing.tables(shape))
    assert least_s >= max(whole_s, mean_s, divided_s) and min(whole_s, divided_s) > 0.9 * mean_s


class Waves(nn.Module):
    """Two blocks, then operators that stages may be cut between, though they share a choice, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block(128) for _ in range(2)), nn.Linear(128, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        for _ in range(16):
            x = x.sin()
        return ((self.head(x) - y) ** 2).sum()


def test_operators_that_share_a_choice_may_be_on_different_places() -> None:
    """Half of them with either block. All of them were counted on one place: a bound 16 % above the fastest plan."""
    gm = export_graph(Waves(), (torch.zeros(16, 128), torch.zeros(16, 8)), dims=({0: B}, {0: B}))
    gm.meta["outputs"] = [{"name": "loss", "kind": "loss", "target": ""}]
    gm = run(run(gm, NORMALIZE), ANNOTATE)
    context, shape = SearchContext(gm, {"b": 65536}, Request(Cluster.parse("h100:1x2"))), Shape(2, (1,), 4)
    pricing = Pricing(context, SEARCH)
    (table,) = (table for table in pricing.tables(shape) if table.kind.schedule == "zbv_zero_bubble")
    step_s = pricing.price(shape, [table], "none", exact=True).step_s
    assert 0.6 * step_s < Timed(context, pricing, shape).whole_s(math.inf) <= step_s


@pytest.mark.parametrize(("places", "mesh", "microbatches"), [(2, (1,), 4), (1, (2,), 4)])
def test_what_is_on_the_host_is_no_faster_than_is_proven_and_activations_count(
    places: int, mesh: tuple[int, ...], microbatches: int
) -> None:
    """With less and less memory until nothing fits, weights, gradients and optimizer state on the host."""
    who, shape = subject("hf-gpt2"), Shape(places, mesh, microbatches)
    request = replace(
        Request(Cluster.parse(f"h100:1x{places * math.prod(mesh)}"), Settings("train")), memory_bytes=float("inf")
    )
    context = SearchContext(who.captured.gm, {**who.captured.hints, "b": 256}, request)
    there = context.hosted("parameters")
    roomy, bounds = (
        Pricing(there, SEARCH).price(shape, list(Pricing(there, SEARCH).tables(shape)), "none", exact=True),
        list[float](),
    )
    for share in (1.0, 0.5, 0.2):
        short = context.limited(share * roomy.memory_bytes)
        bounds.append(Timed(short, Pricing(short, SEARCH), shape).bound_s(math.inf, hosted=True))
        pricing = Pricing(short.hosted("parameters"), SEARCH)
        for table in pricing.tables(shape):
            for level in LEVELS:
                with suppress(InfeasibleError):
                    assert (
                        pricing.price(shape, [table], level, exact=True).step_s
                        >= bounds[-1] + pricing.context.late_s - 1e-9 * bounds[-1]
                    )
    assert bounds[0] < bounds[-1]
