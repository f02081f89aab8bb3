"""Price = execution: all that a rank does in a simulated step, one after the other, takes what the Problem charges with
nothing hidden."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import autopar
from autopar.cluster import Cluster
from autopar.codegen.edges import options
from autopar.compiled import Compiled
from autopar.cost.comm import collective_s
from autopar.pipeline.single_stage import step_cost
from autopar.planner import Planner
from autopar.problem.settings import Settings
from autopar.problem.step_shares import ForwardPrices
from autopar.recipes.free import space
from autopar.report.reshards import prices_of, seconds
from autopar.request import Request
from autopar.simulate.pieces import Piece
from autopar.simulate.stages import Stages
from autopar.simulate.sync import Sync
from autopar.simulate.work import Item, Turn
from autopar.verify.collectives import PIPELINE_AXIS, Key, priced
from tests.helpers.fed import fed
from tests.helpers.verify import Sizes, assemble, at_random, by_recipe, by_stages, subject


def _pieces(item: Item) -> tuple[Piece, ...]:
    return *item.forward, *(piece for pieces, _ in item.again for piece in pieces), *item.backward


def _alone_s(turns: Sequence[Turn]) -> float:
    return sum(piece.seconds for turn in turns for piece in _pieces(turn.item))


ALONE_BYTES = 1e-9  # of a bucket with one tensor


def _simulated_s(stages: Stages, sync: Sync) -> float:
    """Seconds of all pieces, every gradient in a bucket of its own, as the Problem prices it."""
    (view,), (turns,) = stages.views, stages.turns
    sums, leaves = sync.gradient_buckets(view, turns, limit_bytes=1), sync.leaf_buckets(view, turns, limit_bytes=1)
    once = [
        *(piece for bucket in sums for piece in bucket.sums),
        *(piece for bucket in leaves for piece in bucket.parts),
    ]
    return _alone_s(turns) + sum(piece.seconds for piece in once) + stages.optimizer(0).seconds


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("name", "sizes", "where"),
    [
        ("mlp", (4,), "cpu:1x4"),
        ("gpt", (2, 2), "h100:2x2"),
        ("hf-gpt2", (4,), "h100:1x4"),
        ("moe", (4,), "cpu:1x4"),
        ("cnn", (2, 2), "cpu:1x4"),
    ],
)
def test_all_pieces_of_any_solution(name: str, sizes: Sizes, where: str, seed: int) -> None:
    who = subject(name)
    planner = Planner.of(
        who.captured.gm, who.captured.hints, Request(Cluster.parse(where), Settings(who.mode), mesh=sizes)
    )
    model = planner.model(sizes, space(sizes), "prices")
    choice = at_random(model.problem, time_limit_s=1.0, seed=seed).choice
    made = assemble(who, planner, sizes, model.decode(choice), "random")
    nodes_s = sum(float(node.cost_s[c]) for node, c in zip(model.problem.nodes, choice, strict=True))
    stages = Stages.of(who.captured.gm, made)
    assert _simulated_s(stages, stages.syncs[0]) == pytest.approx(nodes_s + _reshards_s(stages), rel=1e-9)


def _reshards_s(stages: Stages) -> float:
    """What tests/unit/verify/test_prices.py finds equal to the charges of the nets."""
    prices, total = prices_of(stages.plan), 0.0
    for reshard in stages.edges.reshards:
        first = stages.program.first_runs(reshard.ref)
        for each, times in ((reshard, reshard.count - first), (reshard.in_first, first)):
            buckets = (ALONE_BYTES, ALONE_BYTES) if reshard.role == "sync" else ()
            total += seconds(each, stages.program.bytes_of(reshard.ref), prices, stages.plan.mesh, buckets) * times
    return total


class _Block(nn.Module):
    """A gated layer, behind a norm or none, beside what it is given."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.norm: nn.Module = nn.RMSNorm(64) if norm else nn.Identity()
        self.gate, self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((64, 128), (64, 128), (128, 64)))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        return x + self.down(functional.silu(self.gate(inner)) * self.up(inner))


class _Chain(nn.Module):
    """Blocks, the first of which is fed an input."""

    def __init__(self, *, norm: bool = True) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(_Block(norm=norm) for _ in range(4)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x).square().mean()


@cache
def _chain(recipe: str, *, norm: bool = True) -> Compiled:
    return autopar.compile(_Chain(norm=norm), "cpu:1x4", (torch.randn(64, 32, 64),), recipe=recipe, time_limit_s=4.0)


@pytest.mark.parametrize("recipe", ["tp", "tp_sp", "megatron", "tp_zero3", "1f1b"])
def test_an_input_that_blocks_begin_with_has_no_gradient(recipe: str) -> None:
    """No collective moves one in the first block, as none runs."""
    made = _chain(recipe)
    assert made.captured is not None
    stages = Stages.of(made.captured.gm, made.plan)
    simulated = Counter(
        (piece.kind, piece.axis)
        for turns in stages.turns
        for turn in turns
        for piece in _pieces(turn.item)
        if piece.axis >= 0 and not piece.within
    )
    edges = replace(stages.edges, reshards=tuple(r for r in stages.edges.reshards if r.role != "sync"))
    wanted = Counter[Key]()
    for place in range(made.plan.places):
        wanted += priced(stages.program, made.plan, edges, place)
    counted = {
        key: count // made.plan.microbatches for key, count in wanted.items() if key[1] != PIPELINE_AXIS and count
    }
    assert simulated == counted
    if not made.plan.pipelined:
        assert any(reshard.late for reshard in edges.reshards)
        assert stages.whole().length_s == pytest.approx(made.plan.predicted.step_s, rel=0.01)


@pytest.mark.parametrize("recipe", ["single", "1f1b"])
def test_the_share_of_the_peak_counts_what_is_computed(recipe: str) -> None:
    """Products of the first block have no gradient of their input."""
    made, model, x = _chain(recipe, norm=False), _Chain(norm=False), torch.randn(64, 32, 64)
    found, device = made.simulate(), Cluster.from_dict(dict(made.plan.cluster)).device
    with FlopCounterMode(display=False) as counter:
        model(x).backward()
    counted = found.mfu * found.step_s * device.flops("float32") * made.plan.ranks
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.03)  # which counts products alone


@pytest.mark.parametrize("recipe", ["single", "ddp", "zero1", "zero3", "tp", "megatron"])
def test_on_a_cpu_nothing_hides(recipe: str) -> None:
    """The whole step is the sum of its parts, and up to buckets what was predicted."""
    who = subject("hf-gpt2")
    made = by_recipe(who, (4,), recipe)
    stages = Stages.of(who.captured.gm, made)
    ran = stages.whole()
    assert ran.length_s == pytest.approx(sum(task.work_s for task in ran.tasks), rel=1e-9)
    assert ran.length_s == pytest.approx(made.predicted.step_s, rel=0.03)
    if not stages.syncs[0].gradient_buckets(stages.views[0], stages.turns[0]):
        assert ran.length_s == pytest.approx(made.predicted.step_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "sizes"), [("mlp", (4,)), ("hf-gpt2", (2, 2)), ("hf-llama", (2, 2))])
def test_what_travels_in_one_bucket_is_priced_so(name: str, sizes: Sizes, seed: int) -> None:
    """Weights that rest in many ways, of some of which the gradients take the same collectives; nothing hides."""
    who = subject(name)
    planner = Planner.of(
        who.captured.gm, who.captured.hints, Request(Cluster.parse("cpu:1x4"), Settings(who.mode), mesh=sizes)
    )
    model = planner.model(sizes, space(sizes), "prices")
    choice = at_random(model.problem, time_limit_s=1.0, seed=seed).choice
    priced_s = step_cost(
        model, choice, ForwardPrices(model.prices.mesh, model.prices.device, model.prices.settings)
    ).time_s
    ran = Stages.of(who.captured.gm, assemble(who, planner, sizes, model.decode(choice), "random")).whole()
    assert ran.length_s == pytest.approx(priced_s, rel=1e-9 if name == "mlp" else 0.04)


def test_copies_around_buckets_are_work_of_the_rank() -> None:
    """The runtime makes them on the stream that computes (runtime.coalesced): in front of what scatters, behind what
    gathers. On the stream of an axis are collectives alone."""
    who = subject("mlp")
    planner = Planner.of(
        who.captured.gm, who.captured.hints, Request(Cluster.parse("h100:1x4"), Settings(who.mode), mesh=(4,))
    )
    model = planner.model((4,), space((4,)), "prices")
    copied = Counter[str]()
    for seed in range(4):
        choice = at_random(model.problem, time_limit_s=1.0, seed=seed).choice
        stages = Stages.of(who.captured.gm, assemble(who, planner, (4,), model.decode(choice), "random"))
        ran = stages.whole()
        order = [mark.piece for mark in ran.marks if mark.during == "sync"]
        for at, piece in enumerate(order):
            if piece.axis >= 0:
                assert piece.seconds == pytest.approx(
                    collective_s(piece.kind, piece.nbytes, stages.syncs[0].mesh.axes[piece.axis]), rel=1e-9
                )
            elif piece.around is not None:
                kind, axis = piece.around
                copied[kind] += 1
                beside = order[:at] if kind == "all_gather" else order[at + 1 :]
                assert any((p.name, p.kind, p.axis, p.nbytes) == (piece.name, kind, axis, piece.nbytes) for p in beside)
    assert copied["all_gather"]
    assert copied["reduce_scatter"]


@pytest.mark.parametrize("model", ["stem", "read"])
@pytest.mark.parametrize("recipe", ["ddp", "zero1", "zero2", "zero3", "tp"])
def test_weights_that_blocks_are_fed(recipe: str, model: str) -> None:
    """Alone, or beside another reader: in the buckets of all others."""
    who = fed(model)
    made = by_recipe(who, (4,), recipe)
    stages = Stages.of(who.captured.gm, made)
    assert stages.whole().length_s == pytest.approx(made.predicted.step_s, rel=1e-9)
    summed = {
        name
        for bucket in stages.syncs[0].gradient_buckets(stages.views[0], stages.turns[0])
        for name, _ in bucket.members
    }
    assert ("p_shared" in summed) == (recipe in ("ddp", "zero1", "zero2"))


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("gpipe", 1), ("interleaved_1f1b", 2), ("interleaved_zero_bubble", 1)]
)
def test_stages_together_are_the_model(schedule: str, virtual: int) -> None:
    """The stages do what the uncut model does at the sizes of a microbatch; only a weight that two of them read is
    gathered in both."""
    who = subject("hf-gpt2")
    cut, whole = (
        Stages.of(who.captured.gm, by_stages(who, (2,), "zero3", places, 4, schedule, v))
        for places, v in ((2, virtual), (1, 1))
    )
    shared = next(turn for turn in whole.turns[0] if turn.item.name.startswith("p_transformer_wte_weight"))
    assert sum(map(_alone_s, cut.turns)) == pytest.approx(_alone_s([*whole.turns[0], shared]), rel=1e-9)
    parts = ("inputs", "weights") if cut.splitting else ("backward",)
    for stage, turns in enumerate(cut.turns):
        seconds = math.fsum(task.work_s for part in ("forward", *parts) for task in cut.ran(stage, part).tasks)
        assert seconds == pytest.approx(_alone_s(turns) + cut.adding(stage).seconds, rel=1e-9)
    held, plan = [op for op in whole.program.ops.values() if op.role == "param"], whole.plan
    # none to those of the first microbatch
    added_s = sum(whole.pieces[0].prices.adding_s(op, options(plan.nodes[op.name])) for op in held) * 3 / 4
    assert whole.adding(0).seconds == pytest.approx(added_s)


def test_blocks_that_run_again_take_their_forward_once_more() -> None:
    """On a CPU, where nothing hides: what Edges says runs again, and nothing else; a gathered weight is then not
    gathered for its own sake."""
    who = subject("hf-gpt2")
    flat = by_recipe(who, (4,), "megatron")
    (scope,) = Stages.of(who.captured.gm, flat).program.runs
    plain, again = (Stages.of(who.captured.gm, made) for made in (flat, replace(flat, remat={scope: ()})))
    replayed = [turn.item for turn in again.turns[0] if turn.item.replay]
    assert {item.name for item in replayed} > {
        name for name, op in again.program.ops.items() if again.edges.runs_again(op) and op.flops > 1e5
    }
    assert all(
        item.replay == item.forward or not item.name.startswith(scope) for item in replayed if " -> " not in item.name
    )
    once_more = sum(piece.seconds for item in replayed for piece in item.replay)
    assert once_more > 0 and again.whole().length_s == pytest.approx(plain.whole().length_s + once_more, rel=1e-9)


def test_some_blocks_run_again() -> None:
    """Of the blocks of a run the first ones; the step grows by as many."""
    who = subject("hf-gpt2")
    flat = by_recipe(who, (4,), "zero3")
    (scope,) = Stages.of(who.captured.gm, flat).program.runs
    count = Stages.of(who.captured.gm, flat).program.runs[scope].count
    lengths = [
        Stages.of(
            who.captured.gm, replace(flat, remat={scope: ()}, stages=(replace(flat.stages[0], again={scope: n}),))
        )
        .whole()
        .length_s
        for n in range(count + 1)
    ]
    assert lengths[0] == pytest.approx(Stages.of(who.captured.gm, flat).whole().length_s)
    steps = [b - a for a, b in itertools.pairwise(lengths)]
    assert min(steps) > 0 and steps == pytest.approx([steps[0]] * count)
