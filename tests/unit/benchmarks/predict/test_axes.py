"""What of a block runs again, and how experts are cut."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from autopar._torch import Watch
from autopar.cluster import Cluster
from autopar.errors import PlanError
from autopar.layout import most_elements
from autopar.problem.kernels import multiplies
from autopar.problem.read_graph import read
from autopar.problem.rerun import rerun
from benchmarks.costmodel.config import Config
from benchmarks.costmodel.predict import decide, peak, price
from benchmarks.costmodel.predict.axes import PARTS, in_attention, kept_operators, rerun_levels, stacked
from benchmarks.costmodel.predict.setup import Setup, Software
from benchmarks.costmodel.predictions import captured
from benchmarks.costmodel.transformer import Block
from passes import ops

SMALL = Config(vocab=768, positions=256, layers=3, heads=12, kv_heads=12, head_dim=16, hidden=192, ffn=768)
GATED = replace(SMALL, rms=True, gated=True, rotary=True, bias=False, tied=False)
EXPERTS = replace(GATED, experts=8, top_k=2, expert_ffn=128)


@cache
def graph(sizes: Config) -> fx.GraphModule:
    return captured(sizes, "bfloat16")


def test_by_operators_attention_and_every_other_matmul_are_kept() -> None:
    program = read(graph(GATED), {"b": 2, "s": 256}, training=True, device="cuda")
    kept = kept_operators(program)
    matmuls = [
        op.name for op in program.ops.values() if op.role == "op" and op.scope and multiplies(op) and any(op.weight)
    ]
    assert [name in kept for name in matmuls] == [True, False, True, False, True]  # q k v, out, gate, up, down
    assert all(op.name in kept for op in program.ops.values() if op.role == "op" and in_attention(op))
    (levels,) = rerun_levels(program, Setup(2, 1, 256, recompute="selective", parts=("operators",))).values()
    assert set(matmuls[::2]) & set(levels) == set(levels) & set(matmuls)


@pytest.mark.parametrize("sizes, again", [(SMALL, 3), (GATED, 4), (replace(GATED, dropout=0.1), 5)])
def test_what_a_checkpoint_runs_again_is_what_torch_runs_again(sizes: Config, again: int) -> None:
    """The last product of a block saves its operands before it runs, so that it does not run again; a dropout behind it
    needs it."""
    block, x = Block(sizes, 0), torch.randn(1, 8, sizes.hidden, requires_grad=True)
    given = (torch.ones(8, sizes.head_dim // 2), torch.zeros(8, sizes.head_dim // 2), None)
    products = []
    for run in (block, lambda *inputs: checkpoint(block, *inputs, use_reentrant=False)):
        loss = run(x, *given).sum()
        called = Counter[Any]()
        with Watch(lambda operator, *_, called=called: called.update([operator])):
            loss.backward()
        products.append(called[torch.ops.aten.mm.default] + called[torch.ops.aten.addmm.default])
    assert products[1] - products[0] == again
    program = read(graph(sizes), {"b": 2, "s": 256}, training=True, device="cuda")
    (scope,) = program.runs
    inside = [
        op for op in program.ops.values() if op.scope == scope and op.role == "op" and multiplies(op) and any(op.weight)
    ]
    assert sum(not rerun(program, scope, ()).stops_before(op.name) for op in inside) == again


def test_what_checkpoints_leave_out_is_priced_once() -> None:
    """Where blocks run again by operators, the last product is kept, and it is also behind the end of the second
    run."""
    times = price(graph(GATED), Setup(2, 1, 256), Cluster.parse("h100:1x8"), "bfloat16").times
    (block,) = (time for time in times.values() if time.attention_s)
    assert 0 < block.last_kept_s < block.last_s < block.kept_s < block.forward_s


def test_parts_of_blocks_are_told_apart() -> None:
    """The first block has a feed-forward layer, the others experts and what all tokens meet."""
    sizes = replace(EXPERTS, layers=6, shared=128, dense=3)
    gm = graph(sizes)
    program = read(gm, {"b": 2, "s": 256}, training=True, device="cuda")
    found = {
        part: {op.scope for op in program.ops.values() if op.role == "op" and PARTS[part](program)(op)}
        for part in ("mlp", "experts")
    }
    assert len(found["mlp"]) == len(found["experts"]) == 1 and not found["mlp"] & found["experts"]
    times = price(gm, Setup(2, 1, 256), Cluster.parse("h100:1x8"), "bfloat16").times
    assert sorted((time.mlp_s > 0, time.experts_s > 0) for time in times.values() if time.attention_s) == [
        (False, True),
        (True, False),
    ]
    assert all((time.mlp_s > 0) == (0 < time.mlp_operators < time.operators) for time in times.values())


@pytest.mark.parametrize(
    "whole, runs", [(True, ["expert_dispatch", "expert_dispatch"]), (False, ["expert_dispatch", ""])]
)
def test_experts_are_cut_by_expert_or_by_their_width_over_tensor_ranks(whole: bool, runs: list[str]) -> None:
    sizes = replace(EXPERTS, shared=128)
    setup = Setup(1, 1, 256, tp=2, ep=8 if whole else 4, whole_experts=whole, dp=4, sequence_parallel=True)
    cluster = Cluster.parse("h100:1x8")
    decided = decide(graph(sizes), setup, cluster, "bfloat16")
    program, mesh = decided.planner.program, decided.mesh
    assert mesh.sizes == (4, 2)
    stacks = [op for op in program.ops.values() if op.role == "param" and stacked(op)]
    assert stacks and all(
        most_elements(op.call.outs[0].sizes, tuple(o.outs[0].value for o in decided.decisions[op.name]), mesh.sizes)
        == math.prod(op.call.outs[0].sizes) / 8
        for op in stacks
    )
    (experts,) = [op for op in program.ops.values() if op.target is ops.experts]
    assert [option.run for option in decided.decisions[experts.name]] == runs


@pytest.mark.parametrize(
    "change, ways",
    [
        ({"cp": 2, "dp": 4, "ep": 8}, (4, 2)),
        ({"cp": 2, "dp": 4, "ep": 2}, (2,)),
        ({"tp": 2, "cp": 2, "dp": 2, "ep": 8, "whole_experts": True, "sequence_parallel": True}, (2, 2, 2)),
    ],
)
def test_context_parallel_ranks_may_have_experts_of_their_own(change: dict[str, int], ways: tuple[int, ...]) -> None:
    """Eight ways to cut experts on four data-parallel ranks were refused."""
    sizes = EXPERTS
    setup, cluster = Setup(1, 1, 256, experts_over_context=True, **change), Cluster.parse("h100:1x8")  # type: ignore[arg-type]
    decided = decide(graph(sizes), setup, cluster, "bfloat16")
    assert decided.mesh.sizes == ways
    (experts,) = [op for op in decided.planner.program.ops.values() if op.target is ops.experts]
    assert {option.run for option in decided.decisions[experts.name]} == {"expert_dispatch"}
    assert any(
        0 < unit.routed_s < unit.forward_s
        and 0 < unit.routed_back_s < unit.backward_s
        and 0 < unit.weights_s < unit.backward_s - unit.routed_back_s
        for unit in decided.priced(cluster).times.values()
    )
    held = {
        name: unit.expert_parameters for name, unit in decided.priced(cluster).times.items() if unit.expert_parameters
    }
    assert list(held.values()) == [8 * 3 * 192 * 128 / setup.ep]


@pytest.mark.parametrize(
    "cluster, matmul, known",
    [
        ("h100:1x8", "float8", True),
        ("h100:1x8", "float4", False),
        ("a100-80:1x8", "float8", False),
        ("b200:1x8", "float4", True),
        ("a10g:1x8", "float8", False),
    ],
)
def test_matmuls_are_in_dtypes_that_the_device_has(cluster: str, matmul: str, known: bool) -> None:
    """A device without tensor cores for a dtype was priced with the rate of float32: 13 times as long as in 16 bits."""
    setup = Setup(1, 1, 256, software=Software(matmul=matmul))
    with (
        nullcontext()
        if known
        else pytest.raises(PlanError, match=f"wanted a device that is faster in {matmul} than in bfloat16")
    ):
        price(graph(SMALL), setup, Cluster.parse(cluster), "bfloat16")


@pytest.mark.parametrize(
    "sizes, change, why",
    [
        (
            {"heads": 6, "kv_heads": 6},
            {"tp": 4},
            "tp over 4 ranks, each of which would compute .* whole; wanted a number of ranks that divides the heads",
        ),
        ({"heads": 6, "kv_heads": 6, "fused_attention": False}, {"tp": 4}, "tp over 4 ranks"),
        ({"kv_heads": 2}, {"tp": 4}, "those of keys and values too"),
        ({}, {"cp": 4, "seq": 250}, "cp over 4 ranks, .* divides the sequence"),
        ({"experts": 6, "top_k": 2, "expert_ffn": 128}, {"ep": 4, "dp": 4}, "ep over 4 ranks, .* divides the experts"),
        ({"experts": 8, "top_k": 2, "expert_ffn": 128}, {"ep": 4, "dp": 4}, ""),
        ({}, {"tp": 4, "cp": 2}, ""),
    ],
)
def test_what_an_axis_does_not_cut_is_refused(sizes: dict[str, int], change: dict[str, int], why: str) -> None:
    """It was priced as computed whole on every rank, without a word."""
    gm, cluster = graph(replace(GATED, **sizes)), Cluster.parse("h100:1x8")  # type: ignore[arg-type]
    setup = replace(Setup(1, 1, 256), **change)  # type: ignore[arg-type]
    for run in (lambda: price(gm, setup, cluster, "bfloat16"), lambda: peak(gm, setup, cluster)):
        with pytest.raises(PlanError, match=why) if why else nullcontext():
            run()


def test_the_graph_is_one_of_the_sizes_that_are_priced() -> None:
    """Attention in pieces of 64 tokens: a graph of any number of pieces, and one of 16,384 tokens alone, which was
    priced as it was for every sequence."""
    sizes = Config(vocab=64, positions=64, layers=6, heads=2, kv_heads=2, head_dim=8, hidden=16, ffn=32, window=64)
    cluster, gm, wide = (
        Cluster.parse("h100:1x8"),
        captured(sizes, "bfloat16"),
        captured(replace(sizes, window=8192), "bfloat16"),
    )
    short, long = (price(gm, Setup(4, 1, seq), cluster, "bfloat16").times for seq in (16384, 65536))
    assert 4 < sum(t.forward_s for t in long.values()) / sum(t.forward_s for t in short.values()) < 16
    with pytest.raises(PlanError, match="s is 1000; the graph wants a multiple of 64"):
        price(gm, Setup(1, 1, 1000), cluster, "bfloat16")
    with pytest.raises(PlanError, match="s is 32768, and the graph has one size s alone"):
        price(wide, Setup(1, 1, 32768), cluster, "bfloat16")


def test_ranks_need_not_fill_nodes() -> None:
    """Twelve devices in nodes of eight, or two ranks in nodes of three: that no mesh of all devices is so was the
    reason to refuse them. Some groups are in two nodes, which are as fast as the network."""
    for cluster, setup in (
        ("h100:2x8", Setup(1, 1, 256, tp=3, dp=4)),
        ("h100:6x3", Setup(1, 1, 256, tp=2, dp=9)),
        ("h100:2x8", Setup(1, 1, 256, tp=3, cp=2, dp=2)),
    ):
        machine = Cluster.parse(cluster)
        mesh = price(graph(GATED), setup, machine, "bfloat16").mesh
        assert mesh.sizes == tuple(ways for ways in (setup.cp, setup.tp) if ways > 1)
        assert mesh.axes[-1].bandwidth_bytes_s == machine.levels[0].bandwidth_bytes_s


def test_context_parallel_ranks_have_whole_weights() -> None:
    """Some rested cut over these ranks and were gathered, and their gradients scattered, for every microbatch: Llama-3
    8B on 2 such ranks was 6 to 13 % too slow, an eighth of its step was that."""
    wide, cluster = (
        replace(GATED, hidden=2048, heads=16, kv_heads=16, head_dim=128, ffn=8192),
        Cluster.parse("h100:1x8"),
    )
    alone, cut = (price(graph(wide), Setup(1, 1, 2048, cp=ways), cluster, "bfloat16").times for ways in (1, 2))
    assert {name: (unit.parameters, unit.trained) for name, unit in cut.items()} == {
        name: (unit.parameters, unit.trained) for name, unit in alone.items()
    }


@pytest.mark.parametrize(
    "cluster, rate, share",
    [("a100-80", 1.7, 1.0), ("a100-80", 0.57, 0.57), ("mi300x", 1.7, 1.0), ("h100", 1.0, 0.59), ("h100", 1.7, 1.0)],
)
def test_attention_is_no_faster_than_the_fastest_kernel_of_the_device(cluster: str, rate: float, share: float) -> None:
    """On A100, where FlashAttention-2 is that, software with cuDNN's kernels had 1.7 times it, the peak of matmuls."""
    setup = Setup(2, 1, 256, software=Software(attention=rate))
    assert decide(graph(SMALL), setup, Cluster.parse(f"{cluster}:1x1"), "bfloat16").settings.attention == share
