"""Steps of about 10 ms, in which every collective and every end of a pass tells: the price is what the simulation
takes, which is what the runtime does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import autopar
from autopar import frontend, joint
from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.codegen.edges import edges
from autopar.joint.choice import staged
from autopar.joint.pricing import Pricing
from autopar.joint.search_context import SearchContext
from autopar.joint.shape_bounds import Timed
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH, Space
from autopar.joint.timetables import Kind
from autopar.pipeline.costs import costs
from autopar.pipeline.makespan_bound import Least
from autopar.pipeline.schedules import SCHEDULES
from autopar.pipeline.stage_views import views
from autopar.plan import Plan
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.request import Request
from autopar.simulate import simulate
from models import gpt, mlp
from tests.helpers.verify import by_stages, subject
from tests.unit.joint.test_relaxed import least_s

CLOSE = 0.03


@cache
def _gpt2() -> Captured:
    loaded = frontend.load(
        "hf:models/hf/gpt2.json", batch=8, seq=512, device="meta", dtype=torch.bfloat16, train=True, labels=True
    )
    return capture(loaded.model, loaded.args, loaded.kwargs, mode="train")


def _request(recipe: str) -> Request:
    return Request(Cluster.parse("h100:1x8"), Settings(precision="bf16"), recipe=recipe, time_limit_s=10.0)


def _agrees(made: Plan) -> None:
    assert simulate(_gpt2().gm, made).step_s == pytest.approx(made.predicted.step_s, rel=CLOSE)


@pytest.mark.parametrize("recipe", ["ulysses", "zero3", "pp_zero2"])
def test_recipes(recipe: str) -> None:
    """`ulysses`: gathers begin ahead right in front of what a block waits for on their axis. `zero3`: those of the last
    block begin with the backward and hide under the loss. `pp_zero2`: a weight that opens one stage ends another one,
    where its gradient is there first."""
    captured = _gpt2()
    _agrees(joint.plan(captured.gm, captured.hints, _request(recipe), model="gpt2", graph_hash=captured.graph_hash))


@pytest.mark.parametrize("recipe", ["ddp", "zero1", "zero3", "1f1b"])
@pytest.mark.parametrize("contention", [0.6, 0.3])
def test_cores_of_which_collectives_take_a_part(recipe: str, contention: float) -> None:
    """As a calibration finds it where ranks wait for each other's data while they compute."""
    cluster = Cluster.parse("cpu:1x4")
    cluster = replace(cluster, device=replace(cluster.device, contention=contention))
    captured = _gpt2()
    made = joint.plan(
        captured.gm,
        captured.hints,
        replace(_request(recipe), cluster=cluster, settings=Settings()),
        model="gpt2",
        graph_hash=captured.graph_hash,
    )
    _agrees(made)
    alone = joint.plan(
        captured.gm,
        captured.hints,
        replace(_request(recipe), cluster=Cluster.parse("cpu:1x4"), settings=Settings()),
        model="gpt2",
        graph_hash=captured.graph_hash,
    )
    assert recipe == "1f1b" or made.predicted.step_s < alone.predicted.step_s


@pytest.mark.parametrize(("cluster", "microbatches"), [("h100:1x8", 4), ("rtx4090:1x4", 2)])
def test_sums_of_several_microbatches_run_beside_the_last_backward(cluster: str, microbatches: int) -> None:
    """On one place, where they waited for the end of the step."""
    captured = _gpt2()
    request = replace(_request(""), cluster=Cluster.parse(cluster), recipe=None)
    context = SearchContext(captured.gm, captured.hints, request)
    pricing, shape = Pricing(context, SEARCH), Shape(1, (request.cluster.devices,), microbatches)
    found = pricing.price(shape, pricing.tables(shape), "none", exact=True)
    assert simulate(captured.gm, found.plan).step_s == pytest.approx(found.step_s, rel=CLOSE)
    chosen = found.chosen
    beside_s, after_s = (
        sum(
            cost.once_s - cost.update_s + cost.summed_s
            for cost in costs(
                found.program,
                chosen.models.micro,
                chosen.models.once,
                chosen.solution.choice,
                chosen.models.forward,
                apart=apart,
            )
        )
        for apart in (False, True)
    )
    assert 0.0 < beside_s < 0.8 * after_s


def test_no_bound_has_sums_and_the_backward_beside_them_in_full() -> None:
    """Of the choices of a step that takes less than both, one after the other."""
    captured = _gpt2()
    request = replace(_request(""), cluster=Cluster.parse("rtx4090:1x4"), recipe=None)
    context = SearchContext(captured.gm, captured.hints, request)
    pricing, shape = Pricing(context, SEARCH), Shape(1, (4,), 2)
    found, here = pricing.price(shape, pricing.tables(shape), "none", exact=True), Timed(context, pricing, shape)

    def proven_s(weights: Least) -> float:
        return least_s(here._weighed(weights, hosted=False), found.chosen.solution.choice)

    for here.in_sums in (False, True):
        assert proven_s(here._plain) < found.step_s < proven_s(replace(here._plain, backward=2.0, beside=1.0))


def test_scatters_of_large_weights_hide_under_their_block() -> None:
    """Each weight fills a bucket: if one waited for the scatter of the other, a step would take 3 % longer than its
    price."""
    config = gpt.Config(vocab=1000, positions=1024, layers=4, heads=32, hidden=4096)
    with torch.device("meta"):
        model, batch = gpt.build(config, 16, 1024)
    compiled = autopar.compile(model, "h100:1x8", batch, recipe="zero1", precision="bf16")
    assert compiled.simulate().step_s == pytest.approx(compiled.plan.predicted.step_s, rel=0.02)


@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved_1f1b", 4)])
def test_leaves_of_a_pipeline_hide_under_its_first_forwards(schedule: str, virtual: int) -> None:
    """All but those of the first block; they were counted as if nothing ran beside them, a tenth of the step."""
    config = gpt.Config(vocab=1000, positions=1024, layers=8, heads=32, hidden=4096)
    with torch.device("meta"):
        model, batch = gpt.build(config, 8, 1024)
    captured = capture(model, batch, mode="train")
    request = Request(Cluster.parse("h100:4x2"), Settings(precision="bf16"), recipe="pp_zero1", mesh=(4,))
    made = joint.plan(captured.gm, captured.hints, request, model="gpt", graph_hash=captured.graph_hash)
    assert made.places == 2
    assert simulate(captured.gm, made).step_s == pytest.approx(made.predicted.step_s, rel=CLOSE)


def test_leaves_of_a_decoder_hide_under_its_encoder() -> None:
    """Blocks behind others have all of their leaves ahead."""
    loaded = frontend.load(
        "hf:models/hf/t5.json", batch=32, seq=256, device="meta", dtype=torch.bfloat16, train=True, labels=True
    )
    captured = capture(loaded.model, loaded.args, loaded.kwargs, mode="train")
    request = replace(_request("zero1"), cluster=Cluster.parse("rtx4090:1x4"))
    made = joint.plan(captured.gm, captured.hints, request, model="t5", graph_hash=captured.graph_hash)
    assert simulate(captured.gm, made).step_s == pytest.approx(made.predicted.step_s, rel=CLOSE)


@pytest.mark.parametrize("recipe", ["ddp", "zero1"])
@pytest.mark.parametrize("contention", [0.6, 0.15])
def test_gradients_and_leaves_of_hardly_more_than_one_bucket(recipe: str, contention: float) -> None:
    """No sum begins before a bucket is full, and the first blocks wait for the first bucket of leaves: next to nothing
    hides of 29 MB."""
    cluster = Cluster.parse("cpu:1x2")
    cluster = replace(cluster, device=replace(cluster.device, contention=contention))
    model, batch = mlp.build(512, 1024, 6, 512, 512)
    compiled = autopar.compile(model.to("meta"), cluster, batch, recipe=recipe)
    assert compiled.captured is not None
    assert simulate(compiled.captured.gm, compiled.plan).step_s == pytest.approx(
        compiled.plan.predicted.step_s, rel=0.05
    )


@pytest.mark.parametrize(
    ("recipe", "mesh", "remat"),
    [
        ("naive_mp", None, "full"),
        ("interleaved", None, "full"),
        ("zero_bubble", None, "auto"),
        ("pp_zero1", (2,), "auto"),
        ("pp_zero2", (2,), "auto"),
    ],
)
def test_stages_of_less_than_one_bucket(recipe: str, mesh: tuple[int, ...] | None, remat: str) -> None:
    """Each begins its sums of gradients all the same, once per step or after every microbatch; and places that share a
    weight wait for each other before they are stepped."""
    with torch.device("meta"):
        model, batch = gpt.build(gpt.Config(vocab=1024, positions=128, layers=8, heads=4, hidden=256), 32, 128)
    compiled = autopar.compile(
        model,
        "a100-80:2x8",
        batch,
        recipe=recipe,
        mesh=mesh,
        remat=remat,
        precision="bf16" if remat == "full" else None,
        time_limit_s=10.0,
    )
    assert compiled.plan.places > 1 and compiled.simulate().step_s == pytest.approx(
        compiled.plan.predicted.step_s, rel=CLOSE
    )


BOTH = (roles.zero3, roles.zero3)


@pytest.mark.parametrize(
    ("schedule", "used"),
    [
        ("zbv_zero_bubble", (roles.data,)),
        ("naive", (roles.zero3,)),
        ("looped_bfs", (roles.zero3,)),
        ("interleaved_1f1b", BOTH),
        pytest.param("zbv_zero_bubble", (roles.zero3,), marks=pytest.mark.slow),
        pytest.param("zbv_zero_bubble", BOTH, marks=pytest.mark.slow),
    ],
)
def test_schedules(schedule: str, used: tuple[roles.Role, ...]) -> None:
    """`zbv_zero_bubble`: the tied weight of the first and the last stage is on one place, where the optimizer steps it
    once. With ZeRO-3 gradients of microbatches are added up when all that is scattered has come, and each stage waits
    for its first gathers and the last of what it sends, over two axes for more of them."""
    captured = _gpt2()
    space = Space(
        schedule,
        lambda mesh: used if len(mesh) == len(used) and min(mesh) > 1 else None,
        (Kind(schedule, SCHEDULES[schedule].virtual or 2),),
        len(used),
    )
    made = staged(
        SearchContext(captured.gm, captured.hints, _request("1f1b")),
        [space],
        None,
        {"model": "gpt2", "graph_hash": captured.graph_hash},
    )
    assert made.places > 1
    _agrees(made)


@pytest.mark.parametrize("recipe", ["zero3", "tp"])
def test_a_backward_that_gathers_weights_again_is_not_taken_apart(recipe: str) -> None:
    """It would gather them twice, so the runtime does all of it at once: views say so to the emitter, prices, the
    simulation and the memory walk."""
    who = subject("hf-gpt2")
    made = by_stages(who, (2,), recipe, 2, 8, "zbv_zero_bubble", 2)
    program = read(who.captured.gm, made.hints, training=True)
    again = [r for r in edges(program, made).reshards if r.regathers(made.mesh)]
    assert bool(again) == (recipe == "zero3")
    found = views(program, made)
    for view in found:
        here = [r for r in again if (r.scope in view.blocks if r.scope else any(map(view.runs, r.readers)))]
        assert not (here and view.separable)
    assert who.case(made).source().count("SEPARABLE = False") == sum(not view.separable for view in found)
    assert recipe == "zero3" or any(view.separable for view in found)
