"""Buffers in mixed precision on ranks: what steps change is what it is in float32, rests and is saved in its own dtype,
and plans say so."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.compiled import Compiled
from autopar.memory import memory_of
from autopar.runtime.scaling import scaler_for
from autopar.verify import case_of, verify
from autopar.verify.step import RankCase
from tests.helpers.captures import captured_once
from tests.helpers.ranks import living

WIDTH, ROWS, STEPS = 8, 1024, 300


class Counting(nn.Module):
    """Its norm reads what bfloat16 has exactly, so that only its statistics are rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH, momentum=0.01), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("slow", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1.0)
            self.average.mul_(0.999).add_(torch.ones_like(self.average), alpha=0.001)
            self.slow = self.slow * 0.999 + 0.001 * x.mean(0)
        return self.linear(self.norm(x)).float().square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.rand(WIDTH))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, h: Tensor, angles: Tensor) -> Tensor:
        self.calls.add_(1.0)
        return h + torch.tanh(self.linear(h * self.table)) * angles.cos() + angles.sin().to(h.dtype)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("inverse", 1 / (10000 ** (torch.arange(WIDTH).float() / WIDTH)), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(h.shape[1], device=h.device, dtype=self.inverse.dtype), self.inverse)
        for block in self.blocks:
            h = block(h, angles)
        return h.float().square().mean()


def data(*sizes: int) -> Tensor:
    return (torch.randn(*sizes, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16().float()


def rank_case(compiled: Compiled, model: nn.Module, x: Tensor) -> RankCase:
    assert compiled.captured is not None
    return RankCase(
        compiled.plan, dict(model.state_dict()), compiled.bundle.constants, {compiled.captured.input_names[0]: x}
    )


def _trained(source: str, what: RankCase) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Buffers of a rank after STEPS steps, and its whole state dict."""
    module = what.build(source)
    batch, scaler = module.shard_batch(**what.batch), scaler_for(module)
    for _ in range(STEPS):
        module.train_step(*batch, scaler=scaler)
        module.zero_grad()
    return {name: buffer.clone() for name, buffer in module.named_buffers()}, dict(module.full_state_dict())


@pytest.mark.parametrize(("recipe", "precision"), [("zero1", "bf16"), ("ddp", "fp16")])
def test_what_steps_change_is_what_it_is_in_float32(recipe: str, precision: str) -> None:
    torch.manual_seed(0)
    model, x = Counting(), data(ROWS, WIDTH)
    compiled = autopar.compile(model, "cpu:1x2", (x,), precision=precision, recipe=recipe, time_limit_s=5.0)
    ranks = living(2).run(_trained, compiled.source, rank_case(compiled, model, x))
    for _ in range(STEPS):
        model(x)
    for held, saved in ranks:
        for name, value in model.named_buffers():
            assert held[name].dtype == value.dtype and (name not in saved or saved[name].dtype == value.dtype)
            torch.testing.assert_close(
                held[name], value, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert "average" in saved and float(saved["steps"]) == STEPS


@cache
def deep(recipe: str) -> tuple[Compiled, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Deep(), data(8, 40, WIDTH)
    with captured_once(Deep):
        return autopar.compile(model, "cpu:1x4", (x,), precision="bf16", recipe=recipe, time_limit_s=5.0), model, x


@pytest.mark.parametrize("recipe", ["ddp", "zero1", "zero3", "1f1b"])
def test_in_float64_nothing_is_rounded(recipe: str) -> None:
    compiled, model, x = deep(recipe)
    assert compiled.captured is not None
    report = verify(
        case_of(compiled.captured, compiled.plan, dict(model.state_dict()), {compiled.captured.input_names[0]: x}),
        ranks=living(4),
    )
    assert report.ok, [row for row in report.rows if not row.ok][:5]


def test_buffers_take_as_much_as_is_said() -> None:
    compiled, model, x = deep("zero1")
    assert compiled.captured is not None
    said = memory_of(compiled.captured.gm, compiled.plan).fullest.rest["buffers"]
    assert said == sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    for got in living(4).run(_bytes, compiled.source, rank_case(compiled, model, x)):
        assert got == said


def _bytes(source: str, what: RankCase) -> int:
    return sum(buffer.numel() * buffer.element_size() for buffer in what.build(source).buffers())
