"""Collectives inside operators, and gathers of stacks that are turned before: price and simulation have them where the
emitted module runs them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from autopar import joint
from autopar.capture import Captured, capture
from autopar.cluster import Cluster
from autopar.joint.choice import staged
from autopar.joint.search_context import SearchContext
from autopar.joint.spaces import Space
from autopar.joint.timetables import Kind
from autopar.plan import NodePlan, Plan
from autopar.problem.pairs import LayoutPair
from autopar.problem.prices import Prices
from autopar.problem.read_graph import read
from autopar.problem.settings import Settings
from autopar.recipes import roles
from autopar.request import Request
from autopar.rules import options_for
from autopar.rules.algorithms import ALGORITHMS
from autopar.simulate import simulate
from autopar.simulate.pieces import Piece, Pieces
from autopar.simulate.rank import Rank
from autopar.simulate.stages import Stages
from benchmarks.costmodel.predict.axes import resting
from tests.helpers.verify import subject

CLOSE = 0.03
BATCH = 64


@cache
def _mixtral() -> Captured:
    """Four blocks of a Mixtral 1024 wide, 8 experts, sequences of 2048."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(
            transformers.MixtralConfig(
                hidden_size=1024,
                intermediate_size=3584,
                num_hidden_layers=4,
                num_attention_heads=8,
                num_key_value_heads=4,
                vocab_size=32000,
                num_local_experts=8,
                num_experts_per_tok=2,
                use_cache=False,
                experts_implementation="grouped_mm",
            )
        )
        model = model.to(torch.bfloat16)
        ids = torch.zeros(BATCH, 2048, dtype=torch.long)
    return capture(model, (), {"input_ids": ids, "labels": ids}, mode="train")


def _planned(recipe: str) -> Plan:
    captured = _mixtral()
    request = Request(
        Cluster.parse("h100:1x8"),
        Settings(precision="bf16"),
        recipe=recipe,
        mesh=(8,) if recipe in ("ddp", "zero3") else (2, 4),
        time_limit_s=10.0,
    )
    return joint.plan(captured.gm, captured.hints, request, model="mixtral", graph_hash=captured.graph_hash)


def _both_on_one_axis() -> Plan:
    """Two stages of four ranks: tokens go to their experts on the axis on which all other weights rest cut."""
    return _staged(resting(roles.experts, roles.zero3), Kind("1f1b"))


def _taken_apart() -> Plan:
    """Tensor parallel places, whose backward is taken apart: stacks that are turned have their share of the weights'
    part, and of the optimizer's step."""
    return _staged(roles.tensor_sequence, Kind("interleaved_zero_bubble"))


def _staged(used: roles.Role, kind: Kind) -> Plan:
    captured = _mixtral()
    request = Request(
        Cluster.parse("h100:1x8"), Settings(precision="bf16"), recipe="1f1b", mesh=(4,), time_limit_s=10.0
    )
    context = SearchContext(captured.gm, captured.hints, request)
    space = Space("stages", lambda mesh: (used,) if mesh == (4,) else None, (kind,), 1)
    return staged(context, [space], None, {"model": "mixtral", "graph_hash": captured.graph_hash})


def _experts(made: Plan) -> tuple[tuple[Piece, ...], tuple[Piece, ...], int]:
    """Forward and backward of a layer of experts in the simulation, and the axis on which tokens go to their
    experts."""
    turn = next(
        turn for turns in Stages.of(_mixtral().gm, made).turns for turn in turns if turn.item.name.endswith("/experts")
    )
    return turn.item.forward, turn.item.backward, made.nodes[turn.item.name].runs.index("expert_dispatch")


@pytest.mark.parametrize("made", [lambda: _planned("ep"), _both_on_one_axis], ids=["ep", "ep and zero3"])
def test_tokens_go_to_their_experts_in_line(made: object) -> None:
    """Counts and rows before the work and results behind it, on their axis, as runtime.algorithms.experts_on_ranks runs
    them."""
    forward, backward, axis = _experts(made())  # type: ignore[operator]
    assert [(piece.kind, piece.axis) for piece in forward] == [("all_to_all", axis)] * 2 + [
        ("compute", -1),
        ("all_to_all", axis),
    ]
    assert [(piece.kind, piece.axis) for piece in backward] == [
        ("all_to_all", axis),
        ("compute", -1),
        ("all_to_all", axis),
    ]
    algorithm = ALGORITHMS["expert_dispatch"]
    assert [each.last for each in (*algorithm.forward, *algorithm.backward)] == [False, False, True, False, True]


def test_nothing_of_them_hides() -> None:
    """Of all that a rank does, only sums of gradients are beside compute: no second of the way to the experts is."""
    ran = Stages.of(_mixtral().gm, _planned("ep")).whole()
    compute = [
        (a, b)
        for a, b, mark in zip(ran.timeline.begin_s, ran.timeline.end_s, ran.marks, strict=True)
        if mark.piece.kind in ("compute", "copy")
    ]
    sent = [
        (a, b)
        for a, b, mark in zip(ran.timeline.begin_s, ran.timeline.end_s, ran.marks, strict=True)
        if mark.piece.kind == "all_to_all"
    ]
    assert sent
    assert all(min(b, d) - max(a, c) <= 1e-12 for a, b in sent for c, d in compute)


def test_stacks_that_are_turned_are_gathered_ahead() -> None:
    """They begin with the block before, forward and backward, and their gradients are scattered behind the block
    (`runtime.turns`)."""
    made = _planned("zero3")
    turned = [
        turn.item
        for turns in Stages.of(_mixtral().gm, made).turns
        for turn in turns
        if turn.instance == 1 and "transpose" in turn.item.name and turn.item.forward
    ]
    assert len(turned) == 2
    assert all(item.fetches and item.later for item in turned)
    ran = Stages.of(_mixtral().gm, made).whole()
    for during, first in (("forward", 2), ("backward", 1)):
        spans = [
            (begin, end, mark)
            for begin, end, mark in zip(ran.timeline.begin_s, ran.timeline.end_s, ran.marks, strict=True)
            if mark.during == during
        ]
        computes = min(begin for begin, _, mark in spans if mark.instance == first and mark.piece.kind == "compute")
        for name in {item.name.partition(" -> ")[0] for item in turned}:
            gathered = [
                begin
                for begin, _, mark in spans
                if mark.piece.kind == "all_gather" and mark.piece.name.removesuffix(" again") == name
            ]
            assert sum(begin < computes for begin in gathered) >= 3, (during, name)


def test_what_is_waited_for_is_not_behind_gathers_of_its_axis() -> None:
    """What is in the background has a stream of its own, as it has a process group (runtime.mesh); the two share the
    links of their axis."""
    cluster = Cluster.parse("h100:1x4")
    rank = Rank(Pieces(cluster.mesh((4,)), cluster.device, Settings()))
    moved = Piece("rows", "all_gather", 0, 1.0, 1e9)
    for number in range(2):
        rank.collective(replace(moved, name=f"weight {number}"))
    rank.do([moved, Piece("work", "compute", -1, 1.0)])
    ran = rank.run()
    spans = {
        mark.piece.name: span
        for mark, span in zip(ran.marks, zip(ran.timeline.begin_s, ran.timeline.end_s, strict=True), strict=True)
    }
    assert spans["rows"][0] == 0.0 and 1.5 < spans["rows"][1] <= 2.0  # beside the first weight
    assert spans["weight 1"][0] == pytest.approx(spans["weight 0"][1]) and spans["work"][0] == spans["rows"][1]


@pytest.mark.parametrize(
    "made",
    [
        lambda: _planned("ep"),
        *(lambda recipe=recipe: _planned(recipe) for recipe in ("ddp", "zero3", "hsdp")),
        _both_on_one_axis,
        _taken_apart,
    ],
    ids=["ep", "ddp", "zero3", "hsdp", "ep and zero3", "taken apart"],
)
def test_the_price_is_what_the_simulation_takes(made: object) -> None:
    """Gathers of the axis share its links with what goes to experts; stacks that are turned have their gradients summed
    in buckets, as all others (ddp, hsdp)."""
    plan = made()  # type: ignore[operator]
    assert simulate(_mixtral().gm, plan).step_s == pytest.approx(plan.predicted.step_s, rel=CLOSE)


def test_what_is_cut_of_attention_is_what_is_priced() -> None:
    """Ranks that have some columns of the values compute all scores: half of the work is cut. The simulation took all
    of it for cut, and a step of Mixtral on 64 ranks for 4 % faster."""
    who, cluster, settings = subject("gpt"), Cluster.parse("h100:1x4"), Settings()
    program, mesh = read(who.captured.gm, who.captured.hints, training=True, device="cuda"), cluster.mesh((4,))
    op = next(op for op in program.ops.values() if "scaled_dot_product_attention" in str(op.call.target))
    prices, pieces, halves = Prices(mesh, cluster.device, settings), Pieces(mesh, cluster.device, settings), 0
    for option in options_for(op.call, 4):
        ins, outs = ([str(LayoutPair.of_uses((use,))) for use in uses] for uses in (option.ins, option.outs))
        kind = "parameter" if option.split else "replicate"
        node = NodePlan((*ins,), (*outs,), (option.factor,), (kind,), (option.run,))
        made = [piece.seconds for way in pieces.operator(op, node) for piece in way]
        assert op.count * sum(made) == pytest.approx(prices.op_s(op, (option,)))
        halves += option.cuts == 0.5
    assert halves
