"""The price of a pipeline's stage against its simulation, wherever the model is cut: what hides is found in program
order."""

from __future__ import annotations

from functools import cache

import pytest

from autopar.bare_plan import bare_plan
from autopar.cluster import Cluster
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.joint.stage_times import Laying, all_times
from autopar.joint.timetables import Kind, timetable
from autopar.pipeline import views
from autopar.pipeline.assemble import pipelined
from autopar.pipeline.filling import Cuts
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.request import Request
from autopar.simulate.stages import Stages
from tests.helpers.verify import subject

CLOSE = 0.03
CUTS = 9
"""Of each model, evenly spread."""
TOTALS_S = 5e-6
"""Of counting labels, which is priced in every microbatch and runs once per step (Plan.totals)."""
USED = {
    "zero3": (roles.zero3,),
    "zero3 over two axes": (roles.zero3, roles.zero3),
    "zero2": (roles.zero2,),
    "tp_zero3": (roles.zero3, roles.tensor_sequence),
}


@cache
def _context(model: str, mode: str) -> SearchContext:
    who = subject(model, mode)
    return SearchContext(
        who.captured.gm,
        {**who.captured.hints, "b": 2048, "s": 512},
        Request(Cluster.parse("h100:1x8"), Settings(mode, precision="bf16"), recipe="1f1b"),
    )


@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("model", ["hf-gpt2", pytest.param("hf-t5", marks=pytest.mark.slow)])
def test_a_stage_takes_as_long_as_it_is_priced_wherever_it_ends(model: str, used: str) -> None:
    assert not _far_off(_context(model, "train"), used)


@pytest.mark.parametrize("used", ["zero3", "zero3 over two axes"])
def test_a_stage_in_inference_takes_as_long_as_it_is_priced(used: str) -> None:
    assert not _far_off(_context("hf-gpt2", "inference"), used)


@pytest.mark.parametrize("used", ["zero3", "zero3 over two axes"])
def test_one_place_takes_as_long_for_a_microbatch_as_it_is_priced(used: str) -> None:
    """Collectives outside of blocks, which compute hides, are not counted on top of that."""
    context = _context("hf-gpt2", "train")
    here = _laying(context, used, Shape(1, (8,) if len(USED[used]) == 1 else (4, 2), 4))
    plan = pipelined(here.flat, context.whole.program, [], "1f1b", 1, context.shared(4), 4)
    (time,) = all_times(here, plan, [here.chosen.on(0, 0).costs], ())
    took_s = Stages.of(context.gm, plan).ran(0, "backward").length_s
    assert time.of("B") == pytest.approx(took_s, rel=2e-3)


def _laying(context: SearchContext, used: str, shape: Shape) -> Laying:
    """A solution of a shape under 1F1B."""
    table, ground = timetable(Kind("1f1b"), shape.places, shape.microbatches), context.grounds(shape)[0]
    chosen = context.solve(context.models(shape, USED[used]), table, "none", exact=False)
    decisions = chosen.model.decode(chosen.solution.choice)
    flat = bare_plan(context.whole, context.mesh(shape), decisions, used, cluster=ground.places.cluster)
    return Laying(context, shape, table, ground, chosen, flat, whole=False)


def _far_off(context: SearchContext, used: str) -> list[tuple[object, ...]]:
    """The actions of stages that take longer or shorter than they are priced, for several cuts into two stages."""
    program, shape = context.whole.program, Shape(2, (4,) if len(USED[used]) == 1 else (2, 2), 4)
    here = _laying(context, used, shape)
    pieces = [here.chosen.on(place, here.ground.kinds[place]) for place in here.table.at]
    far = list[tuple[object, ...]]()
    cuts = [cut for cut in range(1, context.pieces) if cut not in context.barred]
    for cut in cuts[:: -(-len(cuts) // CUTS)]:
        plan = pipelined(here.flat, program, [cut], "1f1b", 2, context.shared(shape.microbatches), 4)
        times = all_times(here, plan, Cuts([cut], [0, 0]).parts(pieces), views(program, plan))
        simulated = Stages.of(context.gm, plan)
        for stage, time in enumerate(times):
            for action, part in (("F", "forward"), ("B", "backward"))[: 1 + context.request.settings.training]:
                priced_s, took_s = time.of(action), simulated.ran(stage, part).length_s
                if took_s != pytest.approx(priced_s, rel=CLOSE, abs=TOTALS_S):
                    far.append((cut, stage, part, priced_s, took_s))
    return far
