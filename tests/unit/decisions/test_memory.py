"""Predicted bytes: parameters, gradients and optimizer exactly as counted by hand, saved activations as autograd has
them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.cluster import Cluster
from autopar.planner import Planner
from autopar.problem.build import Model
from autopar.problem.graph import HOLDERS
from autopar.problem.settings import Settings
from autopar.recipes import RECIPES
from autopar.request import Request
from autopar.search import SEARCHES
from tests.unit.decisions.planning import Work, captured, loaded

LLAMA, GPT2 = Work("llama3-8b", 64, 1024, torch.bfloat16), Work("gpt2", 16, 1024)


def solved(
    work: Work, cluster: str, recipe: str, sizes: tuple[int, ...], optimizer: str = "adamw"
) -> tuple[Model, tuple[int, ...]]:
    """The problem of a recipe on one mesh with room for anything, and its solution."""
    graph = captured(work)
    planner = Planner.of(graph.gm, graph.hints, Request(Cluster.parse(cluster), Settings(optimizer=optimizer)))
    made = planner.model(sizes, RECIPES[recipe].roles, recipe)
    problem = type(made.problem)(made.problem.nodes, made.problem.nets, made.problem.groups)
    return made, SEARCHES["ilp"](problem, time_limit_s=10).choice


def at_rest(made: Model, choice: tuple[int, ...]) -> float:
    """Bytes of parameters, gradients and optimizer state per device."""
    return sum(
        float(node.memory_bytes[c])
        for node, cluster, c in zip(made.problem.nodes, made.clusters, choice, strict=True)
        if cluster.members[0].role == "param"
    )


def activations(made: Model, choice: tuple[int, ...]) -> float:
    """Bytes that the forward leaves for the backward per device."""
    held = sum(
        float(node.memory_bytes[c])
        for node, cluster, c in zip(made.problem.nodes, made.clusters, choice, strict=True)
        if cluster.members[0].role not in HOLDERS
    )
    for net in made.problem.nets:
        if made.clusters[net.producer].members[0].role != "param":
            columns = {int(use.column[choice[use.node]]) for use in net.uses}
            held += sum(float(net.memory_bytes[net.row[choice[net.producer]], column]) for column in sorted(columns))
    return held


def sizes_of(model: nn.Module) -> dict[str, int]:
    """Elements of every parameter, tied ones once."""
    return {name: p.numel() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("optimizer", "copies"), [("adamw", 4), ("sgd-momentum", 3), ("sgd", 2)])
@pytest.mark.parametrize(
    ("work", "count", "itemsize"), [(LLAMA, 8_030_261_248, 2), (GPT2, 124_439_808, 4)], ids=["llama3-8b", "gpt2"]
)
def test_ddp_holds_everything(work: Work, count: int, itemsize: int, optimizer: str, copies: int) -> None:
    """Weights, gradients and the optimizer's values, all in the parameter's dtype; counts as published (8.03 B, 124
    M)."""
    assert sum(sizes_of(loaded(work).model).values()) == count
    assert at_rest(*solved(work, "h100:1x8", "ddp", (8,), optimizer)) == count * itemsize * copies


@pytest.mark.parametrize(
    ("work", "itemsize"), [pytest.param(LLAMA, 2, marks=pytest.mark.slow), (GPT2, 4)], ids=["llama3-8b", "gpt2"]
)
def test_zero3_holds_one_part_of_everything(work: Work, itemsize: int) -> None:
    """GPT-2's table of 50257 rows may be cut unevenly: then the first rank has up to 7 / 8 of a row of 768 more than
    its part."""
    count = sum(sizes_of(loaded(work).model).values())
    more = 7 * 768 if work is GPT2 else 0
    for cluster, recipe, sizes in (("h100:1x8", "zero3", (8,)), ("h100:2x8", "hsdp", (2, 8))):
        assert count <= at_rest(*solved(work, cluster, recipe, sizes)) / (itemsize * 4) * 8 <= count + more


def test_tensor_parallel_llama_holds_norms_whole_and_one_part_of_the_rest() -> None:
    held = sizes_of(loaded(LLAMA).model)
    norms = sum(n for name, n in held.items() if "norm" in name)
    assert norms == 65 * 4096
    assert at_rest(*solved(LLAMA, "h100:1x8", "megatron", (8,))) == (norms + (sum(held.values()) - norms) / 8) * 2 * 4


@pytest.mark.parametrize(
    "work", [Work("hf-gpt2", 8, 32), Work("hf-llama", 8, 32), Work("cnn", 8)], ids=lambda w: w.model
)
def test_activations_fall_with_the_samples(work: Work) -> None:
    """Data parallelism on n ranks leaves 1/n of what one device keeps; only what has no batch stays (rope tables,
    counts)."""
    one = activations(*solved(work, "cpu:1x2", "single", (2,)))
    for ways in (2, 4, 8):
        for recipe in ("ddp", "zero3"):
            assert activations(*solved(work, f"cpu:1x{ways}", recipe, (ways,))) == pytest.approx(
                one / ways, rel=5e-3, abs=4096
            )


def test_sequence_parallel_keeps_less_than_tensor_parallel() -> None:
    """Korthikanti et al. 2022: everything is cut but what the column-parallel layers gather; whole norms are what tp
    keeps."""
    one = activations(*solved(GPT2, "h100:1x2", "single", (2,)))
    tp, tp_sp = (activations(*solved(GPT2, "h100:1x4", recipe, (4,))) for recipe in ("tp", "tp_sp"))
    assert one / 4 <= tp_sp < tp < one
