"""Places that are each laid out in their own way: when that is found, what it costs, and that parts alone change
nothing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

import autopar
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.frontend import load
from autopar.joint.cutting_planes import Cutting, Level
from autopar.joint.own_layouts import each_apart
from autopar.joint.pricing import Pricing
from autopar.joint.relaxed import Relaxed
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_bounds import Timed
from autopar.joint.shape_problems import Apart, Chosen
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.joint.staging import Found, lay
from autopar.memory import predict
from autopar.pipeline.schedules import SCHEDULES
from autopar.pipeline.units import stages_of
from autopar.plan import Plan
from autopar.problem.settings import Settings
from autopar.request import Request
from autopar.simulate import simulate
from autopar.timer import Timer
from tests.helpers.apart import BLOCKS, ROWS, found, in_parts, small_and_slow, stack
from tests.helpers.command import ROOT


def linears(made: Plan) -> dict[str, tuple[str, ...]]:
    """How the first product of each run of blocks is split."""
    return {name: node.factors for name, node in made.nodes.items() if name.endswith("/linear")}


def test_places_are_laid_out_as_each_wants_it() -> None:
    """One place has no memory for whole weights, the other no links for sums of what is computed: products are cut on
    one, rows on the other."""
    context, alike = found(small_and_slow())
    apart = each_apart(context, alike)
    assert not alike.plan.parted and len(linears(alike.plan)) == 1
    assert apart.step_s < 0.9 * alike.step_s
    assert set(linears(apart.plan).values()) == {("_0",), ("o",)}
    at = apart.ground.places
    limits = [float(at.device(place).usable_memory_bytes) for place in range(2)]
    program = context.program_of(apart.plan)
    assert [place.peak_bytes for place in predict(program, apart.plan).places] == pytest.approx(apart.places_bytes)
    assert all(nbytes <= limit for nbytes, limit in zip(apart.places_bytes, limits, strict=True))
    assert sum(stop - first for stage in apart.plan.stages for first, stop in stage.blocks.values()) == BLOCKS
    assert Plan.from_json(apart.plan.to_json()) == apart.plan


def test_the_price_is_that_of_the_simulation() -> None:
    context, alike = found(small_and_slow())
    for made in (alike, each_apart(context, alike)):
        simulated = simulate(context.parted(made.plan.parted).gm, made.plan)
        assert simulated.step_s == pytest.approx(made.step_s, rel=0.03)


def test_what_is_best_for_all_stays() -> None:
    """Where places want the same there are no parts."""
    context, alike = found(Cluster.parse("cpu:1x4"))
    assert each_apart(context, alike) is alike


def test_once_time_is_up_no_place_is_laid_out_in_its_own_way() -> None:
    """Problems of three places take seconds each where a cluster is large."""
    context, alike = found(small_and_slow())
    late = copy.copy(context)
    late.timer = Timer(0.0)
    assert each_apart(late, alike) is alike and late.timer.hurried


def test_one_place_stays() -> None:
    context = SearchContext(
        stack().captured.gm, {"b": ROWS}, Request(Cluster.parse("cpu:1x4"), Settings("train"), time_limit_s=20.0)
    )
    pricing, shape = Pricing(context, SEARCH), Shape(1, (4,), 2)
    alone = pricing.price(shape, pricing.tables(shape), "none", exact=True)
    assert each_apart(context, alone) is alone


def test_the_same_choice_for_each_place_costs_the_same() -> None:
    context, alike = found(small_and_slow())
    chosen = alike.chosen
    apart = Apart(
        chosen.models,
        chosen.model,
        chosen.solution,
        chosen.level,
        chosen.apart,
        chosen.all_again,
        chosen.bound_s,
        each=(chosen, chosen),
    )
    again = lay(context, "again", alike.shape, alike.table, alike.ground, apart, whole=True)
    assert again.step_s == pytest.approx(alike.step_s, rel=1e-9) and again.places_bytes == pytest.approx(
        alike.places_bytes
    )
    assert not again.plan.parted and replace(again.plan, strategy=alike.plan.strategy) == alike.plan


def drawn(context: SearchContext, alike: Found, seed: int) -> Apart:
    """Any choices for each place under which nothing is impossible."""
    rng, problem = np.random.default_rng(seed), alike.chosen.model.problem

    def one() -> Chosen:
        choice = list(alike.chosen.solution.choice)
        for index in rng.permutation(len(choice)):
            other = list(choice)
            other[index] = int(rng.integers(len(problem.nodes[index].labels)))
            if problem.price(tuple(other)).feasible:
                choice = other
        return replace(alike.chosen, solution=replace(alike.chosen.solution, choice=tuple(choice)))

    c = alike.chosen
    return Apart(c.models, c.model, c.solution, c.level, c.apart, c.all_again, c.bound_s, each=(one(), one()))


@pytest.mark.parametrize("seed", range(12))
def test_any_choice_for_each_place_is_priced_as_it_runs(seed: int) -> None:
    """Random layouts on both places: the price and the simulation of the graph in parts agree."""
    context, alike = found(small_and_slow(memory_bytes=1 << 34))
    try:
        apart = lay(context, "drawn", alike.shape, alike.table, alike.ground, drawn(context, alike, seed), whole=True)
    except InfeasibleError as error:
        assert "cannot become" in str(error)
        return
    simulated = simulate(context.parted(apart.plan.parted).gm, apart.plan)
    assert simulated.step_s == pytest.approx(apart.step_s, rel=0.05)


def test_two_places_of_any_choices_take_as_long_at_least() -> None:
    """What is proven of blocks that have either of two choices, with the reshards from one to the other: it is more
    than what is proven without these."""
    context, alike = found(small_and_slow(memory_bytes=1 << 34))
    here, proven = Timed(context, Pricing(context, SEARCH), alike.shape), []
    for seed in range(12):
        both = drawn(context, alike, seed)
        with suppress(InfeasibleError):
            took_s = lay(context, "drawn", alike.shape, alike.table, alike.ground, both, whole=True).step_s
            chained, apart = (
                most_s(replace(here.mean(hosted=False), chained=each), [one.solution.choice for one in both.each])
                for each in (True, False)
            )
            assert apart <= chained * (1 + 1e-6) and chained <= took_s * (1 + 1e-6)
            proven.append(chained / apart)
    assert max(proven) > 1.015


def most_s(relaxed: Relaxed, choices: Sequence[tuple[int, ...]]) -> float:
    """The most that any prices prove of blocks of which each has one of `choices`."""
    return Cutting(
        [Level(relaxed, [relaxed.sums(choice) for choice in choices])], lambda *asked: pytest.fail("nothing is solved")
    ).most_s()


@pytest.mark.parametrize("begins", [(4,), (2, 4, 6)])
def test_parts_alone_change_nothing(begins: tuple[int, ...]) -> None:
    """The layouts of one run in several parts: the same seconds, the same bytes."""
    context, alike = found(Cluster.parse("cpu:1x4"), "interleaved_1f1b")
    made = replace(alike.plan, stages=stages_of(context.whole.program, (2, 4, 6), SCHEDULES["interleaved_1f1b"], 2))
    parts = {"layers_0": {f"layers_{begin}": begin for begin in begins}}
    parted = in_parts(made, parts)
    there = context.parted(parts)
    assert set(parted.nodes) == set(there.whole.program.ops)
    one, other = simulate(context.gm, made), simulate(there.gm, parted)
    assert other.step_s == pytest.approx(one.step_s, rel=1e-3)
    bytes_of = [
        [place.peak_bytes for place in predict(who.whole.program, plan).places]
        for who, plan in ((context, made), (there, parted))
    ]
    assert bytes_of[0] == pytest.approx(bytes_of[1], rel=1e-6)


@pytest.mark.slow
def test_a_model_that_fills_devices_of_two_kinds() -> None:
    """Llama-3-70B on 16 H100 and 32 A100 of 40 GB, from compile() to the emitted source: stages of many blocks on the
    one, of few on the other, and a price that holds."""
    loaded = load(f"hf:{ROOT}/models/hf/llama3-70b.json", batch=128, seq=4096, dtype=torch.bfloat16)
    compiled = autopar.compile(
        loaded.model, "h100:2x8+a100-40:4x8", (loaded.args, loaded.kwargs), precision="bf16", time_limit_s=90.0
    )
    plan = compiled.plan
    blocks = [
        sum(
            stop - first
            for stage, at in zip(plan.stages, range(len(plan.stages)), strict=True)
            if at % plan.places == place
            for first, stop in stage.blocks.values()
        )
        for place in range(plan.places)
    ]
    assert plan.places > 1 and sum(blocks) == 80 and max(blocks) > 1.5 * min(blocks)
    assert compiled.source.count("(Block):") == 1 + sum(len(parts) for parts in plan.parted.values())
    assert compiled.simulate().step_s == pytest.approx(plan.predicted.step_s, rel=0.03)
