"""Bounds that hold for all plans: of a whole search against its floor and its answer, of pipelines with memory so short that blocks are run again."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint import plan
from autopar.joint.bounded import Timed, cut_s
from autopar.joint.cutting import ROUNDS
from autopar.joint.inner import Inner
from autopar.joint.pricing import Pricing
from autopar.joint.prove import Prover
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.plan import Plan
from autopar.problem.remat import LEVELS
from autopar.problem.settings import Settings
from autopar.request import Request
from tests.helpers.verify import Subject, subject


def _planned(who: Subject, prove: bool) -> Plan:
    request = Request(Cluster.parse("h100:1x2"), Settings("train"), prove=prove)
    return plan(who.captured.gm, {**who.captured.hints, "b": 64}, request, model=who.name, graph_hash=who.captured.graph_hash)


def test_a_plan_is_proven_where_memory_is_not_short() -> None:
    who = subject("gpt")
    floor, proven = _planned(who, prove=False), _planned(who, prove=True)
    assert proven.predicted.step_s == floor.predicted.step_s
    assert floor.predicted.gap > 3 * proven.predicted.gap
    assert 0 <= proven.predicted.gap <= 0.1


def test_shapes_are_bound_above_their_work() -> None:
    who = subject("gpt")
    prover = Prover(Inner(who.captured.gm, {**who.captured.hints, "b": 8}, Request(Cluster.parse("cpu:1x4"), Settings("train"))))
    for shape in prover.shapes()[::3]:
        assert prover.bound_s(shape) >= prover.floor_s(shape) * (1 - 1e-6)


@pytest.mark.parametrize(("places", "mesh"), [(2, (1,)), *(pytest.param(*at, marks=pytest.mark.slow) for at in ((1, (2,)), (1, (4,)), (2, (2,))))])
def test_several_microbatches_short_of_memory_are_no_faster_than_is_proven(places: int, mesh: tuple[int, ...]) -> None:
    """Every level and timetable, solved to the end with less memory than the fastest plan takes."""
    who = subject("hf-gpt2")
    request = replace(Request(Cluster.parse(f"h100:1x{places * mesh[0]}"), Settings("train")), memory_bytes=float("inf"))
    inner, shape, priced = Inner(who.captured.gm, {**who.captured.hints, "b": 256}, request), Shape(places, mesh, 4), 0
    pricing = Pricing(inner, SEARCH)
    roomy = pricing.price(shape, pricing.tables(shape), "none", exact=True)
    assert Prover(inner).bound_s(shape) <= roomy.step_s
    short = Pricing(inner.limited(0.85 * roomy.memory_bytes), SEARCH)
    bound_s = Prover(short.inner).bound_s(shape)
    for table in short.all_tables(shape):
        for level in LEVELS:
            with suppress(InfeasibleError):
                assert short.price(shape, [table], level, exact=True).step_s >= bound_s * (1 - 1e-9)
                priced += 1
    assert priced


@pytest.mark.parametrize(("name", "mesh"), [("hf-gpt2", (2,)), pytest.param("hf-llama", (2, 2), marks=pytest.mark.slow)])
def test_places_have_whole_blocks(name: str, mesh: tuple[int, ...]) -> None:
    """Two blocks and a head on two places: one place has both blocks, or each has one and the head one of them. Here that is about as much as the mean of both places, and holds."""
    who, shape = subject(name), Shape(2, mesh, 4)
    inner = Inner(who.captured.gm, {**who.captured.hints, "b": 256}, Request(Cluster.parse(f"h100:2x{math.prod(mesh)}"), Settings("train")))
    pricing = Pricing(inner, SEARCH)
    here = Timed(inner, pricing, shape)
    whole_s, mean_s = here.whole_s(math.inf), cut_s([here.mean(hosted=False)], math.inf, ROUNDS, [])
    assert min(pricing.price(shape, [table], "none", exact=True).step_s for table in pricing.all_tables(shape)) >= max(whole_s, mean_s) and whole_s > 0.9 * mean_s


@pytest.mark.parametrize(("places", "mesh", "microbatches"), [(2, (1,), 4), (1, (2,), 4)])
def test_what_is_on_the_host_is_no_faster_than_is_proven_and_activations_count(places: int, mesh: tuple[int, ...], microbatches: int) -> None:
    """With less and less memory until nothing fits, weights, gradients and optimizer state on the host."""
    who, shape = subject("hf-gpt2"), Shape(places, mesh, microbatches)
    request = replace(Request(Cluster.parse(f"h100:1x{places * math.prod(mesh)}"), Settings("train")), memory_bytes=float("inf"))
    inner = Inner(who.captured.gm, {**who.captured.hints, "b": 256}, request)
    there = inner.hosted("parameters")
    roomy, bounds = Pricing(there, SEARCH).price(shape, list(Pricing(there, SEARCH).tables(shape)), "none", exact=True), list[float]()
    for share in (1.0, 0.5, 0.2):
        short = inner.limited(share * roomy.memory_bytes)
        bounds.append(Timed(short, Pricing(short, SEARCH), shape).bound_s(math.inf, hosted=True))
        pricing = Pricing(short.hosted("parameters"), SEARCH)
        for table in pricing.all_tables(shape):
            for level in LEVELS:
                with suppress(InfeasibleError):
                    assert pricing.price(shape, [table], level, exact=True).step_s >= bounds[-1] + pricing.inner.late_s - 1e-9 * bounds[-1]
    assert bounds[0] < bounds[-1]
