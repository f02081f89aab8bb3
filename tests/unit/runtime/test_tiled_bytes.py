"""What a product in tiles holds for a moment: every allocation of one rank, with collectives that only make what they
would give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar._torch import TorchDispatchMode, pytree
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


class _Moved(TorchDispatchMode):
    """Adds up the bytes that kernels read and write; what is only looked at, or made without numbers, has none."""

    FREE = ("aten.new_empty", "aten.empty_like", "aten._unsafe_view")

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        looks = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not looks and not str(func).startswith(self.FREE):
            read = args[1:] if func is torch.ops.aten.copy_.default else args
            moved = [t for t in pytree.tree_leaves((read, made)) if isinstance(t, Tensor)]
            self.nbytes += sum(t.numel() * t.element_size() for t in moved)
        return made


@pytest.mark.parametrize("by_outputs", [True, False])
@pytest.mark.parametrize(("x_grad", "learns"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("count", [2, 8])
def test_what_tiles_read_and_write_is_counted(
    monkeypatch: pytest.MonkeyPatch, count: int, x_grad: bool, learns: bool, by_outputs: bool
) -> None:
    """Beside one pass over rows, weight and result: in the backward one over the gradient of the result for each
    gradient."""
    monkeypatch.setattr(runtime, "start_all_gather", _gather)
    monkeypatch.setattr(runtime, "start_reduce_scatter", _scatter)
    tall, width = 1024, 64
    x, out, weight = Shape((tall * WAYS, width), x_grad), Shape((tall * WAYS, width)), Shape((width, width), learns)
    op = Op("product", "", None, "op", Call(TARGETS[by_outputs], (x, weight), {}, (out,)), (), dtype="float32")
    name = tiles.name(TARGETS[by_outputs], count)
    option = Option("b", (Use("S0", "S0"), tiles.SHARD), (Use("S0", "S0"),), name, True)
    ((_, site),) = sites(op, (option,), (WAYS,))
    rows = torch.zeros(tall, width, requires_grad=x_grad)
    shard = torch.zeros(width // WAYS, width, requires_grad=learns)
    run = runtime.tiled_linear if by_outputs else runtime.tiled_matmul
    with _Moved() as ahead:
        made = run(rows, shard, tiles=count, axes=(0,), mesh=Mesh((WAYS,), ("x",), "cpu"))
    pull, once = torch.zeros_like(made), tall * width * 4
    with _Moved() as behind:
        made.backward(pull)
    forward, backward = tiles.moved_bytes(site)
    assert ahead.nbytes == pytest.approx(2 * once + forward, rel=0.04)
    # the rows for the weight's gradient, the rows' own gradient
    assert behind.nbytes == pytest.approx((x_grad + learns) * 2 * once + backward, rel=0.04)
