"""The scale of the loss under mixed precision in float16: gradients that would underflow do not, and overflows leave a
step out on all ranks or on none."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.utils.data import DataLoader

import autopar
from autopar import GradScaler, RunError
from autopar._torch import local_of
from autopar.compiled import Compiled
from autopar.verify.step import RankCase
from tests.dist.test_loaders import Model, dataset
from tests.helpers.captures import captured_once
from tests.helpers.ranks import living

WIDTH, BATCH, FAINT = 16, 16, 1e-7


@cache
def two_ranks(recipe: str) -> Compiled:
    """The model of the loaders' tests in float64 on two ranks."""
    ids = torch.zeros(BATCH // 2, 8, dtype=torch.int64)
    with captured_once(Model):
        return autopar.compile(Model().double(), "cpu:1x2", (ids, ids), recipe=recipe, time_limit_s=10.0)


class Faint(nn.Module):
    """A loss so small that gradients in float16 are zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean() * FAINT


@cache
def planned(recipe: str) -> tuple[str, RankCase, dict[str, Tensor]]:
    """The source, what it takes, and the gradients of one device in float64."""
    torch.manual_seed(0)
    model, x = Faint(), torch.randn(BATCH, WIDTH)
    with captured_once(Faint):
        made = autopar.compile(model, "cpu:1x2", (x,), precision="fp16", recipe=recipe, time_limit_s=10.0)
    wide = Faint().double()
    wide.load_state_dict(model.state_dict())
    wide(x.double()).backward()
    grads = {name: p.grad for name, p in wide.named_parameters() if p.grad is not None}
    return made.source, RankCase(made.plan, dict(model.state_dict()), made.bundle.constants, {"x": x.half()}), grads


def _gradients(source: str, rank_case: RankCase, enabled: bool) -> tuple[float, dict[str, Tensor]]:
    """One rank: the loss, and whole gradients, divided by the scale."""
    module = rank_case.build(source)
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.1), GradScaler("cpu", enabled=enabled)
    loss = 0.0
    for _ in range(2):  # gradients of both add up
        loss = float(module.train_step(*module.shard_batch(**rank_case.batch), scaler=scaler))
    scaler.unscale_(optimizer)
    return loss, {name: grad for name, grad in module.full_grads().items() if grad is not None}


@pytest.mark.parametrize("recipe", ["zero1", "1f1b"])
def test_gradients_do_not_underflow(recipe: str) -> None:
    source, rank_case, grads = planned(recipe)
    for enabled in (True, False):
        ran = living(2).run(_gradients, source, rank_case, enabled)
        assert {name for _, found in ran for name in found} == set(grads)
        for loss, found in ran:
            assert 0 < loss < 100 * FAINT
            for name, grad in ((name, grads[name]) for name in found):
                if enabled:
                    assert torch.allclose(
                        found[name].double(), 2 * grad, rtol=2e-2, atol=0.02 * float(grad.abs().max())
                    ), name
                else:
                    assert not found[name].any(), name


def _overflows(
    source: str, rank_case: RankCase, who: int, kind: str
) -> tuple[float, bool, tuple[float, dict[str, float]], bool]:
    """One rank: the scale after a step in which rank `who` alone has a gradient that is no number in its last
    parameter, and whether anything moved; whether parameters are those that other ranks have, and whether the next step
    moves."""
    module = rank_case.build(source)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=kind == "fused")
    scaler, batch = GradScaler("cpu", init_scale=2.0**12), module.shard_batch(**rank_case.batch)
    module.train_step(*batch, scaler=scaler)
    if dist.get_rank() == who:
        *_, last = (local_of(p.grad) for p in module.parameters() if p.grad is not None)
        last.view(-1)[0] = float("inf")
    before = [local_of(p).clone() for p in module.parameters()]

    def step() -> None:
        if kind == "clipped":
            scaler.unscale_(optimizer)
            module.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    step()
    scale, moved = (
        scaler.get_scale(),
        any(bool((local_of(p) != old).any()) for p, old in zip(module.parameters(), before, strict=True)),
    )
    module.train_step(*batch, scaler=scaler)
    step()
    after = any(bool((local_of(p) != old).any()) for p, old in zip(module.parameters(), before, strict=True))
    return (
        scale,
        moved,
        (scaler.get_scale(), {name: float(p.double().sum()) for name, p in module.full_state_dict().items()}),
        after,
    )


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("zero1", "plain"),
        ("zero3", "fused"),
        ("1f1b", "plain"),
        ("1f1b", "fused"),
        ("1f1b", "clipped"),
        ("ddp", "plain"),
    ],
)
def test_all_ranks_leave_a_step_out_or_none(recipe: str, kind: str) -> None:
    source, rank_case, _ = planned(recipe)
    for who in (0, 1):
        found = living(2).run(_overflows, source, rank_case, who, kind)
        assert [(scale, moved, after) for scale, moved, _, after in found] == [(2.0**11, False, True)] * 2
        (scale, here), (other, there) = found[0][2], found[1][2]
        assert scale == other and all(here[name] == there[name] for name in here if name in there)


def _refused(source: str, rank_case: RankCase) -> list[str]:
    module, said = rank_case.build(source), []
    for scaler in (None, torch.amp.GradScaler("cpu"), ShardedGradScaler("cpu")):
        try:
            module.train_step(*module.shard_batch(**rank_case.batch), scaler=scaler)
        except RunError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("recipe", ["zero1", "1f1b"])
def test_float16_without_a_scaler_of_all_ranks_is_refused(recipe: str) -> None:
    source, rank_case, _ = planned(recipe)
    for none, torchs, fsdps in living(2).run(_refused, source, rank_case):
        assert 'scaler = autopar.GradScaler("cpu")' in none
        assert "scaler is a torch.amp.grad_scaler.GradScaler" in torchs and "ShardedGradScaler" in fsdps


def _accumulated(made: Compiled, weights: dict[str, Tensor], times: int) -> tuple[list[float], dict[str, Tensor]]:
    """One rank: the losses of so many batches, and the mean of their gradients."""
    model = made.bundle.build(weights)
    batches = DataLoader(dataset(), batch_size=BATCH // 2)
    losses = [
        float(model.train_step(*model.shard_batch(*batch), loss_weight=1 / times))
        for _, batch in zip(range(times), batches, strict=False)
    ]
    return losses, {name: grad for name, grad in model.full_grads().items() if grad is not None}


@pytest.mark.parametrize("recipe", ["zero1", "zero3", "1f1b", "zero_bubble"])
def test_the_mean_of_several_steps(recipe: str) -> None:
    torch.manual_seed(0)
    model, times = Model().double(), 3
    ran = living(2).run(_accumulated, Compiled(two_ranks(recipe).bundle), dict(model.state_dict()), times)
    losses = [
        model(*batch) for _, batch in zip(range(times), DataLoader(dataset(), batch_size=BATCH // 2), strict=False)
    ]
    (torch.stack(losses).mean()).backward()
    wanted = {name: p.grad for name, p in model.named_parameters()}
    assert {name for _, grads in ran for name in grads} == set(wanted)
    for got, grads in ran:
        assert got == pytest.approx([float(loss.detach()) for loss in losses], rel=1e-9)
        assert all(torch.allclose(grad, wanted[name], rtol=1e-9, atol=1e-12) for name, grad in grads.items())


def _stepped(kind: type[torch.amp.GradScaler], fused: bool) -> float:
    """One rank: the scale behind a step in which rank 1's shard of the second parameter has a gradient that is no
    number; the first parameter is whole on all ranks."""
    mesh = init_device_mesh("cpu", (2,))
    whole, cut = (
        nn.Parameter(distribute_tensor(torch.ones(4), mesh, [placement])) for placement in (Replicate(), Shard(0))
    )
    optimizer, scaler = torch.optim.AdamW([whole, cut], fused=fused), kind("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    for p, value in ((whole, 1.0), (cut, float("inf") if dist.get_rank() else 1.0)):
        p.grad = DTensor.from_local(torch.full(local_of(p).shape, value), mesh, p.placements)  # type: ignore[attr-defined]
    scaler.step(optimizer)
    scaler.update()
    return float(scaler.get_scale())


@pytest.mark.parametrize(
    ("kind", "fused", "scales"),
    [
        (torch.amp.GradScaler, False, [2.0, 1.0]),
        (torch.amp.GradScaler, True, [2.0, 1.0]),
        (ShardedGradScaler, False, [1.0, 1.0]),
        (ShardedGradScaler, True, [2.0, 1.0]),
        (GradScaler, False, [1.0, 1.0]),
        (GradScaler, True, [1.0, 1.0]),
    ],
)
def test_scalers_of_torch_let_ranks_part(kind: type[torch.amp.GradScaler], fused: bool, scales: list[float]) -> None:
    """torch 2.13: with one parameter whole and one cut, rank 0 steps and rank 1 does not."""
    assert living(2).run(_stepped, kind, fused) == scales
