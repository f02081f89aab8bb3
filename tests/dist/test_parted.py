"""Runs of blocks in parts, each with layouts of its own: in one stage, and with a place of a pipeline for each part, on
local ranks against one device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from autopar.joint.own_layouts import each_apart
from autopar.pipeline import units
from autopar.plan import Plan
from autopar.problem.read_graph import read
from autopar.recipes import roles
from passes.fold_repeats import is_folded
from passes.part_runs import parts_at, whole_name
from tests.helpers.apart import ROWS, found, small_and_slow, stack
from tests.helpers.remat import rematerialised
from tests.helpers.verify import FROZEN, Sizes, Subject, by_chance, by_recipe, by_stages, planner_of, subject

MESH = (2, 2)
WAYS: dict[str, tuple[roles.Role, ...]] = {
    "data": (roles.data, roles.data),
    "zero3": (roles.zero3, roles.zero3),
    "tensor": (roles.tensor, roles.tensor),
    "samples x tensor": (roles.samples, roles.tensor),
    "zero3 x samples": (roles.zero3, roles.samples),
    "zero1 x tensor": (roles.zero1, roles.tensor),
}


@cache
def parted(name: str) -> Subject:
    """A tiny model whose runs of blocks are each in two parts."""
    who = subject(name)
    counts = {str(node.target): int(node.meta["repeat"]) for node in who.captured.gm.graph.nodes if is_folded(node)}
    captured = who.captured.parted(parts_at(who.captured.gm, {scope: [count // 2] for scope, count in counts.items()}))
    return replace(who, captured=captured, cases={}, references={})


def right(who: Subject, made: Plan) -> None:
    """Raises AssertionError, with what is wrong, unless the plan computes what one device does."""
    report = who.verified(replace(made, parted=who.captured.parts))
    wrong = [row for row in report.rows if not row.ok]
    assert report.ok, f"{len(wrong)} of {len(report.rows)}: {wrong[:5]} {report.first}"


FAST = [("hf-llama", 1)]


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        *FAST,
        *(
            pytest.param(name, seed, marks=pytest.mark.slow)
            for name in ("hf-gpt2", "hf-llama", "hf-t5", "hf-vit", "hf-mixtral", f"hf-resnet{FROZEN}", "hf-clip")
            for seed in range(3)
            if (name, seed) not in FAST
        ),
    ],
)
def test_parts_with_any_layouts_in_one_stage(name: str, seed: int) -> None:
    who = parted(name)
    right(who, by_chance(who, MESH, seed))


def test_parts_in_one_stage_that_keep_different_results() -> None:
    """As plans between two levels of rematerialisation have them (partial_remat)."""
    who = parted("hf-llama")
    made = rematerialised(who, by_recipe(who, (2,), "zero3"), "random 1")
    assert len({tuple(name.rpartition("/")[2] for name in kept) for kept in made.remat.values()}) == 2
    right(who, made)


@pytest.mark.parametrize("recipe", ["zero3", "megatron"])
def test_a_part_of_one_block_that_reads_an_input(recipe: str) -> None:
    """It is laid out as the later blocks, which get a gradient from what they read."""
    whole = stack()
    parts, made = parts_at(whole.captured.gm, {"layers_0": [1]}), by_recipe(whole, (2,), recipe)
    who = replace(whole, captured=whole.captured.parted(parts), cases={}, references={})
    ops = read(who.captured.gm, made.hints, training=True, device="cpu").ops
    made = replace(made, parted=parts, nodes={name: made.nodes[whole_name(name, parts)] for name in ops})
    made = rematerialised(who, made, "random 1")
    report = who.verified(made, batch=ROWS, seq=0)
    assert made.nodes["layers_0/x"].outs == made.nodes["layers_1/x"].outs and report.ok, report.first


def in_places(who: Subject, mesh: Sizes, ways: tuple[str, str], schedule: str, microbatches: int = 2) -> Plan:
    """Two places, the first with the first part of the last run of blocks and all in front of it laid by the first of
    `ways`, the second with the rest laid by the other one; weights, inputs and what is free to repeat, which both read,
    by the first."""
    _, rest = list(who.captured.parts.items())[-1]
    (begins,) = rest
    pieces = [unit.name for unit in units(planner_of(who, mesh).program)]
    cut = pieces.index(begins)
    flat = [by_stages(who, mesh, WAYS[way], 2, microbatches, schedule, 1, [cut]) for way in ways]
    late = set(flat[0].stages[1].nodes) - set(flat[0].stages[0].nodes)
    nodes = {
        name: (flat[1] if name.startswith(f"{begins}/") or name in late else flat[0]).nodes[name]
        for name in flat[0].nodes
    }
    return replace(flat[0], nodes=nodes)


def test_the_answer_of_the_search() -> None:
    """Two places with meshes of the same ranks and other layouts, as the search finds them."""
    inner, alike = found(small_and_slow())
    made = each_apart(inner, alike).plan
    assert made.parted
    who = stack()
    report = who.verified(replace(made, model=who.name, graph_hash=who.captured.graph_hash), batch=ROWS, seq=0)
    assert report.ok, [row for row in report.rows if not row.ok][:4]


PIPED = [
    ("hf-llama", ("zero3", "samples x tensor"), "1f1b", "full"),
    ("hf-gpt2", ("samples x tensor", "data"), "1f1b", "none"),
    pytest.param("hf-t5", ("tensor", "zero3 x samples"), "gpipe", "selective", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "ways", "schedule", "level"), PIPED, ids=str)
def test_each_place_has_layouts_of_its_own(name: str, ways: tuple[str, str], schedule: str, level: str) -> None:
    who = parted(name)
    right(who, rematerialised(who, in_places(who, MESH, ways, schedule), level))
