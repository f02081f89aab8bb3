"""Experts on ranks: what the recipe is, what the search chooses, and the all-to-all between tokens and experts."""

from __future__ import annotations

import pytest
import torch

from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.codegen.edges import edges
from autopar.layout import is_shard
from autopar.onestage import plan
from autopar.problem.settings import Settings
from autopar.recipes.kinds import ATTRIBUTE, PARAMETER, PARTIAL, REPLICATE, SAMPLE
from autopar.request import Request
from tests.helpers.loops import Gated, Looped, mistral
from tests.unit.decisions.planning import Planned, Work, planned

MIXTRAL = Work("mixtral-8x7b", 16, 2048, torch.bfloat16)
TINY, DENSE = Work("hf-mixtral", 16, 64), Work("moe", 8, 16)
STACKS = ("experts.gate_up_proj", "experts.down_proj", "experts.up", "experts.down")


def rests(made: Planned, axis: int) -> dict[bool, set[str]]:
    """Layouts at rest on that axis, of experts (True) and of all other parameters."""
    found: dict[bool, set[str]] = {True: set(), False: set()}
    for name, weight in made.weights.items():
        found[name.endswith(STACKS)].add(weight.layout.split(",")[axis])
    return found


def layers(made: Planned) -> dict[str, tuple[str, ...]]:
    """The algorithms of each layer of experts, per axis."""
    return {
        name: made.plan.nodes[name].runs
        for name, op in made.program.ops.items()
        if op.role == "op" and getattr(op.target, "__name__", "") == "experts"
    }


@pytest.mark.parametrize(("work", "mesh"), [(TINY, (4,)), (TINY, (2, 2)), (DENSE, (4,)), (DENSE, (2, 2))], ids=str)
def test_recipe_spreads_experts_inside_and_samples_everywhere(work: Work, mesh: tuple[int, ...]) -> None:
    made = planned(work, "cpu:1x4", "ep", mesh)
    inner = len(mesh) - 1
    assert rests(made, inner) == {True: {"S0"}, False: {"R"}}, str(made)
    if inner:
        assert rests(made, 0) == {True: {"R"}, False: {"R"}}, str(made)
    for name, kinds in made.kinds.items():
        op = made.program.ops[name]
        contraction = op.flops > 0 and any(
            weight and len(t.shape) > 1 for weight, t in zip(op.weight, op.call.ins, strict=True)
        )
        if contraction and any(len(t.shape) == 3 and weight for weight, t in zip(op.weight, op.call.ins, strict=True)):
            assert kinds[inner] == PARAMETER, (name, kinds)
        elif contraction:
            assert set(kinds) == {SAMPLE}, (name, kinds)
        assert kinds[inner] in (PARAMETER, SAMPLE, REPLICATE, PARTIAL, ATTRIBUTE), (name, kinds)
    assert all(run[inner] == "expert_dispatch" for run in layers(made).values())
    assert bool(layers(made)) == (work is TINY)


def test_dense_dispatch_is_an_all_to_all_between_samples_and_experts() -> None:
    """Experts are an ordinary dim there: the exchange is a reshard on the edge, forward and backward."""
    made = planned(DENSE, "cpu:1x4", "ep", (4,))
    moved = [
        r
        for r in edges(made.program, made.plan).reshards
        if [s.kind for s in r.forward((4,))] == ["all_to_all"] and [s.kind for s in r.backward((4,))] == ["all_to_all"]
    ]
    assert {(r.src.value, r.dst.value) for r in moved} == {(("S0",), ("S1",)), (("S1",), ("S0",))}, moved
    blocks = 2
    assert sum(r.count for r in moved) == 2 * blocks, "to the experts and back, per block"


@pytest.mark.parametrize("work", [pytest.param(TINY, marks=pytest.mark.slow), Work("hf-gpt2", 16, 64)], ids=str)
def test_the_recipe_is_priced_for_models_with_experts_only(work: Work) -> None:
    tried = {other.name for other in planned(work, "cpu:1x4").plan.alternatives}
    assert ("ep" in tried) == (work is TINY) and {"ddp", "tp"} <= tried


def test_zero3_cuts_experts_too() -> None:
    made = planned(TINY, "cpu:1x4", "zero3")
    assert all(is_shard(weight.layout) for name, weight in made.weights.items() if len(weight.shape) > 1), str(made)


def test_search_spreads_the_experts_of_mixtral() -> None:
    """One node of eight, 16 x 2048 tokens, plain SGD: Adam's state would not fit at all (87 GiB of weights in
    bfloat16).

    Rows that go to their experts (all-to-all of 2 x 4096 x 4096 numbers per rank) are cheaper than weights that are
    gathered at every layer (ZeRO-3), and tensor parallel does not fit: it keeps all tokens on every rank.
    """
    made = planned(MIXTRAL, "h100:1x8", None, None, "sgd")
    assert layers(made) and all("expert_dispatch" in runs for runs in layers(made).values()), str(made)
    assert made.step_ms <= made.recipes_ms["ep"] < 0.9 * made.recipes_ms["zero3"], str(made)
    assert not {"tp", "tp_sp", "megatron", "ddp"} & set(made.recipes_ms), str(made)
    assert {weight.layout for name, weight in made.weights.items() if name.endswith(STACKS)} == {"S0"}, str(made)


def test_experts_that_are_modules_of_their_own_are_cut_by_width() -> None:
    """Written as a loop over modules: their first layers are cut by rows, their second ones by columns, as Megatron
    cuts any two layers."""

    class Scored(Looped):
        """With a loss."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (super().forward(x) ** 2).mean()

    hidden, width = 1024, 4096
    with torch.device("meta"):
        model = Scored(mistral, lambda: Gated(hidden, width), hidden).bfloat16()
        captured = capture(model, (torch.randn(16, 1024, hidden, dtype=torch.bfloat16),))
    made = plan(
        captured.gm,
        captured.hints,
        Request(Cluster.parse("h100:1x4"), Settings("train"), recipe="tp", mesh=(4,)),
        model="loop",
        graph_hash=captured.graph_hash,
    )
    rests = {
        name.removeprefix("p_experts_3_"): node.outs[0].split("|")[0]
        for name, node in made.nodes.items()
        if name.startswith("p_experts_3_")
    }
    assert rests == {"up_weight": "S0", "gate_weight": "S0", "down_weight": "S1"}
