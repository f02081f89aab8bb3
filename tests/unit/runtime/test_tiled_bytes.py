"""What a product in tiles holds for a moment: every allocation of one rank, with collectives that only make what they
would give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from autopar.memory.habits import EMITTED
from autopar.memory.local import Local
from autopar.memory.operators import backward_bytes, forward_bytes
from autopar.problem.graph import Op
from autopar.problem.op_algorithms import sites
from autopar.rules import tiles
from autopar.rules.language import Call, Option, Use
from autopar.rules.language import Tensor as Shape
from autopar.runtime import Mesh
from autopar.runtime.algorithms import tiled as runtime
from tests.helpers.peak import allocations

ROWS, WIDTH, WAYS = 16, 512, 4
TARGETS = {True: torch.ops.aten.linear.default, False: torch.ops.aten.matmul.default}


def _gather(x: Tensor, axis: int, mesh: Mesh) -> Callable[[], Tensor]:
    out = x.new_empty(WAYS, *x.shape)
    return lambda: out


def _scatter(x: Tensor, axis: int, mesh: Mesh, out: Tensor) -> Callable[[], Tensor]:
    on_its_way = [x]

    def finish() -> Tensor:
        on_its_way.clear()
        return out

    return finish


def _predicted(by_outputs: bool, sums: torch.dtype, count: int, x_grad: bool, backward: bool) -> float:
    """Bytes for a moment, of weights and beside them."""
    size = 4
    x, out, weight = (
        Shape((ROWS * WAYS, WIDTH), x_grad, itemsize=size),
        Shape((ROWS * WAYS, WIDTH), itemsize=size),
        Shape((WIDTH, WIDTH), itemsize=size),
    )
    call = Call(TARGETS[by_outputs], (x, weight), {}, (out,))
    op = Op("product", "", None, "op", call, (), dtype="float32", out_dtypes=(torch.float32,))
    option = Option(
        "b", (Use("S0", "S0"), tiles.SHARD), (Use("S0", "S0"),), tiles.name(TARGETS[by_outputs], count), True
    )
    ((algorithm, site),) = sites(op, (option,), (WAYS,))
    site = replace(site, wider=sums.itemsize / size)
    rows = ROWS * WIDTH * size
    beside = (backward_bytes if backward else forward_bytes)(
        Local(op, (rows, 0.0), (rows,)), (tiles.name(TARGETS[by_outputs], count),), EMITTED
    )
    return sum(algorithm.gathers[backward](site)) + beside


@pytest.mark.parametrize("by_outputs", [True, False])
@pytest.mark.parametrize("sums", [torch.float32, torch.float64])
@pytest.mark.parametrize(("count", "x_grad"), [(2, True), (4, True), (8, True), (4, False)])
def test_what_is_there_for_a_moment_is_predicted(
    monkeypatch: pytest.MonkeyPatch, by_outputs: bool, sums: torch.dtype, count: int, x_grad: bool
) -> None:
    monkeypatch.setattr(runtime, "start_all_gather", _gather)
    monkeypatch.setattr(runtime, "start_reduce_scatter", _scatter)
    mesh = Mesh((WAYS,), ("x",), "cpu")
    x = torch.randn(ROWS, WIDTH, requires_grad=x_grad)
    shard = torch.randn(WIDTH // WAYS, WIDTH, requires_grad=True)
    shard.grad_dtype = sums
    run = runtime.tiled_linear if by_outputs else runtime.tiled_matmul
    made: list[Tensor] = []

    def forward() -> None:
        made.append(run(x, shard, tiles=count, axes=(0,), mesh=mesh))

    def back() -> None:
        torch.autograd.backward(made, [pull])

    pull = torch.ones(ROWS, WIDTH)
    results = ROWS * WIDTH * 4
    ahead = max(allocations(forward)) - results
    assert ahead == pytest.approx(_predicted(by_outputs, sums, count, x_grad, False), rel=0.03)
    grads = shard.numel() * sums.itemsize + (results if x_grad else 0)
    behind = max(allocations(back)) - grads
    assert behind == pytest.approx(_predicted(by_outputs, sums, count, x_grad, True), rel=0.06)


@pytest.mark.parametrize("count", [2, 4])
def test_what_lookups_have_for_a_moment_is_predicted(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(runtime, "start_all_gather", _gather)
    monkeypatch.setattr(runtime, "start_reduce_scatter", _scatter)
    target = torch.ops.aten.embedding.default
    table, ids, out = (
        Shape((1024, WIDTH)),
        Shape((ROWS * WAYS,), False, floating=False, itemsize=8),
        Shape((ROWS * WAYS, WIDTH)),
    )
    op = Op(
        "lookup",
        "",
        None,
        "op",
        Call(target, (table, ids), {}, (out,)),
        (),
        dtype="float32",
        out_dtypes=(torch.float32,),
    )
    option = Option("b", (tiles.SHARD, Use("S0", "-")), (Use("S0", "S0"),), tiles.name(target, count), True)
    ((algorithm, site),) = sites(op, (option,), (WAYS,))
    local = Local(op, (0.0, ROWS * 8), (ROWS * WIDTH * 4,))
    shard = torch.randn(1024 // WAYS, WIDTH, requires_grad=True)
    own, made = torch.randint(0, 1024, (ROWS,)), []
    ahead = (
        max(
            allocations(
                lambda: made.append(
                    runtime.tiled_embedding(own, shard, tiles=count, axes=(0,), mesh=Mesh((WAYS,), ("x",), "cpu"))
                )
            )
        )
        - local.out
    )
    assert ahead == pytest.approx(
        sum(algorithm.gathers[0](site)) + forward_bytes(local, (option.run,), EMITTED), rel=0.03
    )
    behind = (
        max(allocations(lambda: torch.autograd.backward(made, [torch.ones(ROWS, WIDTH)])))
        - shard.numel() * 4
        - local.out
    )
    assert behind == pytest.approx(
        sum(algorithm.gathers[1](site)) + backward_bytes(local, (option.run,), EMITTED), rel=0.06
    )
