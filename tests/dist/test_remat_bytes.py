"""What blocks that are run again keep, predicted by the Problem, against what is there between forward and backward."""

from __future__ import annotations

import pytest

from autopar.bundle import Bundle
from autopar.cluster import Cluster
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.onestage import plan
from autopar.planner import Planner
from autopar.problem.remat import rematerialised
from autopar.problem.rerun import rerun
from autopar.problem.step_shares import ForwardPrices
from autopar.recipes import RECIPES
from autopar.report.explain import choice_of
from autopar.request import Request
from tests.helpers.kept import kept_on_rank
from tests.helpers.ranks import on_ranks
from tests.helpers.remat import live
from tests.helpers.remat import rematerialised as at_level
from tests.helpers.tiny import TINY
from tests.helpers.verify import subject
from tests.unit.decisions.test_memory import activations

BATCH, SEQ = 4, 32
FAST = [
    ("hf-gpt2", "tp_sp", "selective"),
    ("hf-t5", "zero3", "full"),
    ("hf-gpt2", "single", "selective"),
    ("hf-llama", "tp_sp", "selective"),
    ("hf-resnet", "single", "full"),
    ("hf-vit", "tp_sp", "full"),
    ("hf-neox", "zero3", "selective"),
]
SLOW = [
    case
    for name in TINY
    for recipe in ("single", "zero3", "tp_sp")
    for level in ("selective", "full", "all")
    if (case := (name, recipe, level)) not in FAST
]


@pytest.mark.parametrize(
    ("name", "recipe", "level"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_what_stays_is_what_autograd_holds_and_what_is_kept(name: str, recipe: str, level: str) -> None:
    who = subject(name)
    graph = who.captured
    hints = graph.hints | {n: size for n, size in (("b", BATCH), ("s", SEQ)) if n in graph.hints}
    request = Request(Cluster.parse("cpu:1x2"), recipe=recipe, mesh=(2,), time_limit_s=10.0)
    made = at_level(who, plan(graph.gm, hints, request, model=name, graph_hash=graph.graph_hash), level)
    plain = Planner.of(graph.gm, hints, request).model((2,), RECIPES[recipe].roles, recipe)
    choice = choice_of(plain, made)
    model = rematerialised(
        plain, ForwardPrices(plain.prices.mesh, plain.prices.device, plain.prices.settings), made.remat
    )
    bundle = Bundle(made, emit(graph.gm, made, Names.of(graph)), graph.constants)
    held = max(on_ranks(2, kept_on_rank, bundle, dict(who.weights), who.batch(BATCH, SEQ)))
    predicted = activations(model, choice) - live(model, choice)
    assert predicted == pytest.approx(held, rel=0.05)
    if made.remat and level != "all":
        # a linear with its bias apart is kept in place of the sum: as many bytes
        assert predicted <= activations(plain, choice)
        program = plain.links[0].program
        runs_again = any(rerun(program, scope, kept).again for scope, kept in made.remat.items())
        took_s, without_s = (each.problem.price(choice).time_s for each in (model, plain))
        assert took_s > without_s if runs_again else took_s == without_s
