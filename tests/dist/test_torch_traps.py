"""Places where torch is silently wrong or refuses, that a sharded module comes near; docs/torch-traps.md lists them
all."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining.stage import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import GraphExecGroup, checkpoint

from autopar.errors import RunError
from autopar.runtime import Mesh, Param, ShardedModule, reshard
from tests.helpers.emitted import Plain, batch, sharded
from tests.helpers.ranks import on_new_ranks, on_ranks

OPTIMIZERS = {
    "loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, fused=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
}


def plain_model() -> Plain:
    torch.manual_seed(0)
    return Plain().double()


def optimized(sizes: tuple[int, int]) -> None:
    """Two clipped steps of every optimizer; on 4 ranks one has a shorter part of the vocabulary than the others."""
    for name, make in OPTIMIZERS.items():
        plain, model = plain_model(), sharded(sizes)().double().load_full(plain_model().state_dict())
        mine, theirs = make(model.parameters()), make(plain.parameters())
        assert all(isinstance(p, DTensor) for p in model.parameters()), (
            "a plain tensor among DTensors breaks foreach and fused"
        )
        for _ in range(2):
            plain(*batch())["loss"].backward()
            model.train_step(*model.shard_batch(*batch()))
            wanted = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            torch.testing.assert_close(
                norm.full_tensor() if isinstance(norm, DTensor) else norm, wanted, rtol=1e-11, atol=0
            )
            for optimizer in (mine, theirs):
                optimizer.step()
                optimizer.zero_grad()
        got = model.full_state_dict()
        for key, value in plain.state_dict().items():
            if not key.endswith("qkv.bias"):  # its keys' part has gradient 0, whose rounding Adam scales up
                torch.testing.assert_close(
                    got[key], value, rtol=1e-9, atol=1e-9, msg=lambda m, n=f"{name} {key}": f"{n}: {m}"
                )


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((1, 4), marks=pytest.mark.slow)])
def test_every_kind_of_optimizer_and_clipping_over_parameters_of_different_layouts(sizes: tuple[int, int]) -> None:
    on_ranks(4, optimized, sizes)


class Uneven(ShardedModule):
    """Rows that do not divide, and fewer rows than ranks."""

    MESH = Mesh((4,), ("x",), "cpu")
    INPUTS = {"x": "R"}  # noqa: RUF012
    OUTPUTS = (("loss", "loss"),)
    PARAMS = {  # noqa: RUF012
        "ten": Param((10, 3), "float64", "S0"),
        "three": Param((3,), "float64", "S0"),
        "inner": Param((2, 257), "float64", "S1"),
    }

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        total = sum((w * w * (i + 1)).sum() for i, w in enumerate(self.w.values()))
        return (reshard(total * x, "P -> R", grad="R -> R", shape=(), mesh=self.MESH),)


def uneven() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    state = {n: torch.randn(*p.shape, dtype=torch.float64, generator=generator) for n, p in Uneven.PARAMS.items()}
    model = Uneven().load_full(state)
    model.train_step(torch.ones((), dtype=torch.float64))
    for i, (name, p) in enumerate(model.named_parameters()):
        assert isinstance(p, DTensor) and p.shape == state[name].shape == p.grad.shape
        assert torch.equal(p.full_tensor().detach(), state[name])
        torch.testing.assert_close(p.grad.full_tensor(), 2 * (i + 1) * state[name], rtol=1e-14, atol=0)
        torch.testing.assert_close(p.detach().norm().full_tensor(), state[name].norm(), rtol=1e-13, atol=0)
    return [tuple(p.to_local().shape) for p in model.parameters()]


def test_uneven_and_empty_shards_are_dtensors_of_the_whole_shape() -> None:
    shapes = on_ranks(4, uneven)
    assert [s[0] for s in shapes] == [(3, 3), (3, 3), (3, 3), (1, 3)]
    assert [s[1] for s in shapes] == [(1,), (1,), (1,), (0,)]
    assert [s[2] for s in shapes] == [(2, 65), (2, 65), (2, 65), (2, 62)]


def not_aliased(sizes: tuple[int, int]) -> None:
    state = plain_model().state_dict()
    before = {name: value.clone() for name, value in state.items()}
    with CommDebugMode() as communication:
        model = sharded(sizes)().double().load_full(state)
    assert communication.get_total_counts() == 0, "every rank cuts its own part"
    model.train_step(*model.shard_batch(*batch()))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert all(torch.equal(state[name], value) for name, value in before.items())


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_loaded_weights_are_copied_without_communication(sizes: tuple[int, int]) -> None:
    on_ranks(2, not_aliased, sizes)
    not_aliased((1, 1))


def checkpointed(sizes: tuple[int, int], reentrant: bool) -> None:
    plain, model = plain_model(), sharded(sizes)().double().load_full(plain_model().state_dict())
    for block in model.runs["layers"]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)  # type: ignore[method-assign]
    plain(*batch())["loss"].backward()
    model.train_step(*model.shard_batch(*batch()))
    for name, grad in model.full_grads().items():
        wanted = plain.get_parameter(name).grad
        assert (grad is None) == (wanted is None)
        if grad is not None:
            torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_blocks_that_are_computed_again_in_the_backward_are_exact() -> None:
    on_ranks(4, checkpointed, (2, 2), False)


class Twice(ShardedModule):
    """One weight used inside and outside of a re-entrant checkpoint: its gradient arrives in two backward passes, one
    in the other."""

    others = False

    MESH = Mesh((2,), ("x",), "cpu")
    INPUTS = {"x": "S0"}  # noqa: RUF012
    OUTPUTS = (("loss", "loss"),)
    PARAMS = {"w": Param((4, 4), "float64", "R", sync=(0,)), "v": Param((4, 4), "float64", "R", sync=(0,))}  # noqa: RUF012

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = x @ self.w["w"]
        h = checkpoint(lambda h: h @ self.w["w"], h, use_reentrant=True)
        h = h @ self.w["v"] if self.others else h
        return (reshard(h.square().sum(), "P -> R", grad="R -> R", shape=(), mesh=self.MESH),)


def reentrant(others: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {n: torch.randn(4, 4, dtype=torch.float64, generator=generator) for n in Twice.PARAMS}
    x = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    whole = {n: t.clone().requires_grad_() for n, t in state.items()}
    (
        x @ whole["w"] @ whole["w"] @ (whole["v"] if others else torch.eye(4, dtype=torch.float64))
    ).square().sum().backward()
    model = Twice().load_full(state)
    model.others = others
    model.train_step(*model.shard_batch(x))
    grads = model.full_grads()
    torch.testing.assert_close(grads["w"], whole["w"].grad, rtol=1e-12, atol=1e-12)
    assert others or grads["v"] is None


def test_a_reentrant_checkpoint_is_refused_where_its_gradient_may_have_been_summed_already() -> None:
    with pytest.raises(RunError, match=r"the gradient of w arrived twice in one backward pass.*use_reentrant=False"):
        on_new_ranks(2, reentrant, True)


def test_a_reentrant_checkpoint_that_ends_before_any_other_gradient_is_exact() -> None:
    on_ranks(2, reentrant, False)


def test_a_backward_in_two_parts_runs_a_checkpointed_block_again_for_each_group_of_weights() -> None:
    """The gradients are right, but the block runs once for what was received and once more for each weight that has a
    group of its own; and torch's way to have it run once refuses, because both parts ask for the operands of one
    product."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    runs = []

    def block(h: Tensor) -> Tensor:
        runs.append(None)
        for layer in layers:
            h = layer(h).tanh()
        return h

    wanted = torch.autograd.grad(block(x).square().sum(), [x, *layers.parameters()])
    runs.clear()
    weights = list(layers.parameters())
    (found,), groups = stage_backward_input(
        [checkpoint(block, x, use_reentrant=False).square().sum()], None, [x], iter(weights)
    )
    assert len(runs) == 2, "forward, and again for what was received"
    stage_backward_weight(iter(weights), groups)
    assert len(runs) == 2 + len(layers), "and again for the weight and bias of each layer"
    torch.testing.assert_close([found, *(w.grad for w in weights)], list(wanted), rtol=1e-14, atol=0)

    with pytest.raises(RuntimeError, match="already unpacked once"):  # noqa: SIM117
        with GraphExecGroup():
            _, groups = stage_backward_input(
                [checkpoint(block, x, use_reentrant=False).square().sum()], None, [x], iter(weights)
            )
            stage_backward_weight(iter(weights), groups)
