"""Steps as prices of what passes take: no solution is said to take longer than it does, whatever is run again and
kept."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.joint.cutting_planes import Cutting, Level
from autopar.joint.effort import CLOSEST, Effort
from autopar.joint.pricing import Pricing
from autopar.joint.relaxed import Relaxed
from autopar.joint.relaxed_bounds import chain_s, cut_s
from autopar.joint.relaxed_solving import BOUND_TOLERANCE, Solver
from autopar.joint.relaxed_steps import alone, timed
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_bounds import Alone, Timed
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.joint.staging import lay
from autopar.pipeline.costs import costs
from autopar.pipeline.makespan_bound import mean
from autopar.pipeline.passes import Passes
from autopar.pipeline.single_stage import step_cost
from autopar.problem.build import Model
from autopar.problem.pass_quantities import SHOWN
from autopar.problem.pass_tables import PASSES
from autopar.problem.remat import rematerialised
from autopar.problem.rerun import keepable
from autopar.problem.settings import Settings
from autopar.problem.types import Problem
from autopar.request import Request
from autopar.search import ilp
from autopar.search.recosted import Recosted
from tests.helpers.verify import subject

ONE_MICROBATCH = [
    ("gpt", "h100:1x4", (4,)),
    ("hf-gpt2", "h100:2x2", (2, 2)),
    ("hf-llama", "h100:2x4", (2, 4)),
    ("hf-llama", "cpu:1x4", (2, 2)),
    ("hf-mixtral", "l4:1x4", (4,)),
    ("hf-llama", "h100:2x4", (2, 2, 2)),
]
SEVERAL = [
    ("hf-gpt2", "h100:2x2", Shape(2, (2,), 4)),
    ("hf-llama", "h100:2x4", Shape(2, (2, 2), 4)),
    ("hf-llama", "l4:1x4", Shape(1, (4,), 2)),
]


@cache
def inner_of(name: str, cluster: str) -> SearchContext:
    """A tiny model with so many samples, that collectives matter."""
    who = subject(name)
    return SearchContext(
        who.captured.gm, {**who.captured.hints, "b": 64}, Request(Cluster.parse(cluster), Settings("train"))
    )


@cache
def alone_on(name: str, cluster: str, mesh: tuple[int, ...]) -> tuple[Alone, list[tuple[int, ...]]]:
    """It in one stage and one microbatch on `mesh`, and some solutions."""
    here = Alone(inner_of(name, cluster), Shape(1, mesh, 1))
    return here, solutions(here.plain.problem)


def solutions(problem: Problem, count: int = 4) -> list[tuple[int, ...]]:
    """Possible choices: the best ones where everything costs something else."""
    found = []
    for seed in range(count):
        rng = np.random.default_rng(seed)
        nodes = tuple(
            replace(node, cost_s=np.where(np.isinf(node.cost_s), np.inf, rng.random(len(node.cost_s))))
            for node in problem.nodes
        )
        nets = tuple(
            replace(net, cost_s=np.where(np.isinf(net.cost_s), np.inf, rng.random(net.cost_s.shape)), group=-1)
            for net in problem.nets
        )
        found.append(
            ilp.glance(replace(problem, nodes=nodes, nets=nets, memory_limit_bytes=math.inf), time_limit_s=5.0).choice
        )
    return [*found, ilp.glance(problem.with_limit(math.inf), time_limit_s=5.0).choice]


def least_s(relaxed: Relaxed, choice: tuple[int, ...]) -> float:
    """Seconds that are proven of one solution alone."""
    return Cutting([Level(relaxed, [relaxed.sums(choice)])], Solver([relaxed], exact=False)).most_s()


@pytest.mark.parametrize(("name", "cluster", "mesh"), ONE_MICROBATCH)
def test_a_step_of_one_stage_takes_as_long_at_least(name: str, cluster: str, mesh: tuple[int, ...]) -> None:
    here, found = alone_on(name, cluster, mesh)
    relaxed, tight = alone(here.passing, here.plain, math.inf), 0.0
    short = alone(here.passing, here.plain, 1e12)
    for choice in found:
        held = here.plain.problem.price(choice).memory_bytes
        assert 0.5 * held < float(short.sums(choice).over[0]) + 1e12 <= held * (1 + 1e-6)
        took_s, proven_s = (
            step_cost(here.plain.with_limit(math.inf), choice, here.forward).time_s,
            least_s(relaxed, choice),
        )
        assert proven_s <= took_s * (1 + 1e-6)
        tight = max(tight, proven_s / took_s)
    assert tight > 0.8


@pytest.mark.parametrize(("name", "cluster", "shape"), SEVERAL)
def test_passes_of_a_microbatch_take_as_long_at_least(name: str, cluster: str, shape: Shape) -> None:
    context = inner_of(name, cluster)
    here = Timed(context, Pricing(context, SEARCH), shape)
    micro, program = here.models.micro, context.planner(shape.microbatches).program
    passes = replace(
        here.mean(hosted=True),
        times=dict.fromkeys(here.mean(hosted=True).times, 1.0),
        node_s=[np.zeros(len(n.cost_s)) for n in micro.problem.nodes],
        net_s=[np.zeros(n.cost_s.shape) for n in micro.problem.nets],
    )
    for choice in solutions(micro.problem):
        took = costs(program, micro, here.models.once, choice, here.models.forward, apart=shape.places > 1)
        assert least_s(passes, choice) <= sum(each.micro_s for each in took) * (1 + 1e-6)


@pytest.mark.parametrize(("name", "cluster", "shape"), SEVERAL[::2])
def test_places_hold_as_much_and_take_as_long_once_per_step_at_least(name: str, cluster: str, shape: Shape) -> None:
    context = inner_of(name, cluster)
    pricing = Pricing(context, SEARCH)
    here, (ground,) = Timed(context, pricing, shape), context.grounds(shape)
    models, program, tight = here.models, context.planner(shape.microbatches).program, 0.0
    base = pricing.price(shape, here.tables, "none", exact=False).chosen
    for choice in solutions(models.micro.problem, count=2):
        took = costs(program, models.micro, models.once, choice, models.forward, apart=shape.places > 1)
        example = here._example(choice, hosted=False)
        assert 0.0 < example.once_s <= sum(each.once_s for each in took) * (1 + 1e-6)
        if shape.places > 1:  # where sums of gradients run beside other work
            summed_s = sum(each.summed_s for each in took)
            assert example.sums_s <= summed_s * (1 + 1e-6) and (example.sums_s > 0.0) == (summed_s > 0.0)
        for table, level in itertools.product(here.tables, ("none", "full")):
            again = level != "none"
            chosen = replace(base, solution=replace(base.solution, choice=choice), level=level, all_again=again)
            held = lay(context, "", shape, table, ground, chosen).places_bytes
            kept = [max(1, min(n.kept for n in table.of_place(place, table.flying))) for place in range(table.places)]
            weights = mean(shape.places, shape.microbatches)
            relaxed = timed(here.passing, models.at(level), models, table, weights, context.limit_bytes)
            counted = relaxed.sums(choice).over + [room.limit for room in relaxed.rooms]
            ways = dict.fromkeys(((1.0,) * len(kept), tuple(1 / n for n in kept)))
            for said, way in zip(counted, ways, strict=True):
                least = sum(times * nbytes for times, nbytes in zip(way, held, strict=True))
                assert said <= least * (1 + 1e-6)
                tight = max(tight, said / least)
    assert tight > 0.5


@pytest.mark.parametrize(("name", "cluster", "shape"), SEVERAL[::2])
def test_a_step_under_a_timetable_takes_as_long_at_least(name: str, cluster: str, shape: Shape) -> None:
    """Of choices by themselves, with sums of gradients beside other work."""
    context = inner_of(name, cluster)
    pricing = Pricing(context, SEARCH)
    here, (ground,) = Timed(context, pricing, shape), context.grounds(shape)
    base, tight = pricing.price(shape, here.tables, "none", exact=False).chosen, 0.0
    for choice in solutions(here.models.micro.problem, count=2):
        chosen = replace(base, solution=replace(base.solution, choice=choice))
        for here.in_sums in (False, True) if shape.places == 1 else (False,):
            for table in here.tables:
                weights = here.weights(table, [here._example(choice, hosted=False)], quick=False)
                took_s = lay(context, "", shape, table, ground, chosen, whole=True, shifts=False).step_s
                relaxed = timed(here.passing, here.models.micro, here.models, table, weights, math.inf)
                proven_s = least_s(relaxed, choice)
                assert proven_s <= took_s * (1 + 1e-6)
                tight = max(tight, proven_s / took_s)
    assert tight > 0.8


@pytest.mark.parametrize(("name", "cluster", "mesh"), ONE_MICROBATCH)
def test_tables_are_what_passes_find(name: str, cluster: str, mesh: tuple[int, ...]) -> None:
    context = inner_of(name, cluster)
    here = Alone(context, Shape(1, mesh, 1))
    relaxed = alone(here.passing, here.plain, math.inf)
    for choice in solutions(here.plain.problem):
        sums = relaxed.sums(choice).passes
        did = Passes(
            context.whole.program, here.plain, choice, here.forward, apart=False, sums_at_end=False
        ).did.values()
        for way in PASSES:
            whole = sum(each.passes[way].work_s + each.passes[way].background_s for each in did)
            counted = sum(
                float(sums[scope, way][SHOWN]) + here.passing.background_s(sums[scope, way])
                for scope in here.passing.scopes
            )
            assert counted <= whole * (1 + 1e-6)
            assert counted > 0.5 * whole


def thrifty(problem: Problem) -> tuple[int, ...]:
    """A choice of little memory."""
    unit = max(float(node.memory_bytes.max()) for node in problem.nodes)
    nodes = tuple(
        replace(node, cost_s=np.where(np.isinf(node.cost_s), np.inf, node.memory_bytes / unit))
        for node in problem.nodes
    )
    nets = tuple(
        replace(net, cost_s=np.where(np.isinf(net.cost_s), np.inf, net.memory_bytes / unit), group=-1)
        for net in problem.nets
    )
    return ilp.search(
        replace(problem, nodes=nodes, nets=nets, memory_limit_bytes=math.inf), time_limit_s=5.0, gap=0.01
    ).choice


def in_part(here: Alone, way: Model, choice: tuple[int, ...], limit_bytes: float) -> Iterator[float]:
    """Seconds of `choice` with some of the blocks run again that `way` runs again, where that fits."""
    plain, again = (model.problem.price(choice) for model in (here.plain, way))
    plain_s, again_s = (
        step_cost(model.with_limit(math.inf), choice, here.forward).time_s for model in (here.plain, way)
    )
    count = next(iter(here.whole.program.runs.values())).count
    for share in (n / count for n in range(1, count)):
        if plain.memory_bytes + share * (again.memory_bytes - plain.memory_bytes) <= limit_bytes:
            yield plain_s + share * (again_s - plain_s)


@pytest.mark.parametrize(
    ("name", "cluster", "mesh"),
    [("hf-gpt2", "h100:1x4", (4,)), pytest.param("hf-llama", "h100:2x2", (2, 2), marks=pytest.mark.slow)],
)
def test_whatever_is_run_again_and_kept(name: str, cluster: str, mesh: tuple[int, ...]) -> None:
    """With less memory than anything takes without running blocks again: each solution that fits, with any results kept
    and as many blocks run again, takes as long at least."""
    context = inner_of(name, cluster)
    here = Alone(context, Shape(1, mesh, 1))
    program, rng = context.whole.program, random.Random(0)
    named = [op.name for op in program.ops.values() if keepable(op)]
    kept = [
        {scope: [n for n in named if program.ops[n].scope == scope and rng.random() < share] for scope in program.runs}
        for share in (0.0, 0.1, 0.5, 1.0)
    ]
    ways = [rematerialised(here.plain, here.forward, each) for each in kept]
    least = [way.problem.price(thrifty(way.problem)).memory_bytes for way in (here.plain, ways[0])]
    assert least[1] < 0.9 * least[0]
    short = Alone(context.limited(sum(least) / 2), Shape(1, mesh, 1))
    fit_s = [
        step_cost(way.with_limit(math.inf), choice, here.forward).time_s
        for way in ways
        for choice in [thrifty(way.problem), *solutions(way.problem)]
        if way.problem.price(choice).memory_bytes <= sum(least) / 2
    ]
    fit_s += [
        step_s
        for way in ways
        for choice in [thrifty(way.problem), *solutions(way.problem)]
        for step_s in in_part(here, way, choice, sum(least) / 2)
    ]
    bound_s = short.bound_s(1.1 * min(fit_s))  # no case is split that is proven to take longer
    assert bound_s <= min(fit_s) * (1 + 1e-9)
    assert bound_s > here.bound_s(bound_s)


@pytest.mark.parametrize("chained", [True, False])
def test_where_nothing_is_possible_bounds_are_infinite(chained: bool) -> None:
    context = inner_of("hf-gpt2", "h100:2x2")
    mean = Timed(context, Pricing(context, SEARCH), Shape(2, (2,), 4)).mean(hosted=False)
    barred = replace(mean, chained=chained, node_s=[np.full(each.shape, math.inf) for each in mean.node_s])
    assert cut_s([barred], math.inf, Effort(1), []) == math.inf
    assert chain_s(barred, Effort(1)) == (math.inf, 0.0)


def test_levels_at_which_nothing_is_possible_say_nothing_of_others() -> None:
    context = inner_of("hf-gpt2", "h100:2x2")
    mean = replace(Timed(context, Pricing(context, SEARCH), Shape(2, (2,), 4)).mean(hosted=False), chained=False)
    barred = replace(mean, node_s=[np.full(each.shape, math.inf) for each in mean.node_s])
    alone_s = cut_s([mean], math.inf, Effort(4), [])
    for levels in ([mean, barred], [barred, mean]):
        assert cut_s(levels, math.inf, Effort(4), []) == pytest.approx(alone_s, rel=1e-9)


@pytest.mark.parametrize("known", [True, False])
def test_a_search_that_finds_nothing_in_time_proves_nothing(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither messages nor the exact search find a solution: the bound of the messages holds."""
    context = inner_of("hf-gpt2", "h100:2x2")
    mean = Timed(context, Pricing(context, SEARCH), Shape(2, (2,), 4)).mean(hosted=False)
    closest_s = cut_s([mean], math.inf, CLOSEST, [])

    def late(*args: object, **options: object) -> None:
        raise InfeasibleError("time was up")

    monkeypatch.setattr(Recosted, "solution", lambda self: None)
    monkeypatch.setattr(ilp, "search", late)
    bound_s = cut_s([mean], math.inf, CLOSEST, solutions(mean.problem) if known else [])
    assert 0.5 * closest_s < bound_s <= closest_s * (1 + 2 * BOUND_TOLERANCE)
