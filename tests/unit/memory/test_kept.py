"""What is kept from forward to backward: the tables of the Problem against the walk over the emitted program, made
apart from each other."""

from __future__ import annotations

import pytest

from autopar.cluster import Cluster
from autopar.memory.predict import fullest
from autopar.pipeline.costs import halfway_bytes
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.build import Model
from autopar.problem.read_graph import read
from autopar.problem.remat import rematerialised
from autopar.problem.settings import Settings
from autopar.problem.step_shares import ForwardPrices
from autopar.recipes import RECIPES, roles
from autopar.report.explain import choice_of
from autopar.request import Request
from tests.helpers.remat import live
from tests.helpers.remat import rematerialised as at_level
from tests.helpers.tiny import TINY
from tests.helpers.verify import by_chance, by_recipe, subject
from tests.unit.decisions.test_memory import activations

FAST = [
    ("hf-phi3", "tp_sp", "none"),
    ("hf-llama-2kv", "tp_sp", "selective"),
    ("moe", "single", "all"),
    ("moe", "random 6", "selective"),
    ("gpt", "random 3", "none"),
    ("gpt", "random 2", "none"),  # the query is gathered before its heads are turned to the front
    ("gpt", "random 6", "all"),
]
TOKENS = (
    "hf-gpt2",
    "hf-llama",
    "hf-llama-2kv",
    "hf-bert",
    "hf-mixtral",
    "hf-phi3",
    "hf-neox",
    "hf-bloom",
    "gpt",
    "moe",
)
"""Models that no plan cuts along borders, nor unevenly, by chance."""
SLOW = [
    case
    for name in TINY
    for how in ("zero3", "tp_sp", *(("random 1", "random 2") if name in TOKENS else ()))
    for level in ("none", "selective", "all")
    if (case := (name, how, level)) not in FAST
]


def planned(name: str, how: str, level: str) -> tuple[Plan, Model, tuple[int, ...]]:
    """A plan on two ranks by a recipe or by chance, with its blocks run again at a level; the Problem that has it, and
    its choice there."""
    who, chance = subject(name), how.startswith("random")
    made = by_chance(who, (2,), int(how.split()[1])) if chance else by_recipe(who, (2,), how)
    planner = Planner.of(who.captured.gm, who.captured.hints, Request(Cluster.parse("cpu:1x2"), Settings(), mesh=(2,)))
    plain = planner.model((2,), (roles.anything,) if chance else RECIPES[how].roles, how)
    choice, again = choice_of(plain, made), at_level(who, made, level)
    return (
        again,
        rematerialised(
            plain, ForwardPrices(plain.prices.mesh, plain.prices.device, plain.prices.settings), again.remat
        ),
        choice,
    )


@pytest.mark.parametrize(
    ("name", "how", "level"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_the_search_counts_what_the_emitted_program_keeps(name: str, how: str, level: str) -> None:
    """Once each, however many readers in whatever layout of its gradient keep it."""
    plan, model, choice = planned(name, how, level)
    who = subject(name)
    (place,) = fullest(read(who.captured.gm, who.captured.hints, training=True, device="cpu"), plan)
    kept = sum(s.total for s in place.profiles[0].kept if s.kind != "gathered weights")
    assert activations(model, choice) - live(model, choice) == pytest.approx(
        kept, abs=512, rel=0.0 if (name, how, level) in FAST else 0.015
    )


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(case[:2] for case in FAST[:3]),
        *(
            pytest.param(*case[:2], marks=pytest.mark.slow)
            for case in SLOW
            if case[1] in ("zero3", "tp_sp") and case[2] == "none"
        ),
    ],
)
def test_the_search_counts_what_waits_for_the_weights_part_of_a_backward(name: str, how: str) -> None:
    """Nearly: gradients that share memory are known by what is read and added, however it lies."""
    plan, model, choice = planned(name, how, "none")
    who = subject(name)
    program = read(who.captured.gm, who.captured.hints, training=True, device="cpu")
    (place,) = fullest(program, plan)
    waiting = sum(halfway_bytes(program, model, index, c) for index, c in enumerate(choice))
    assert waiting == pytest.approx(place.profiles[0].waiting_bytes, rel=0.4)
