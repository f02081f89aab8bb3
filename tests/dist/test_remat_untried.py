"""Blocks that end in operators of which no table says what their backward keeps: a second run comes as far as these,
and runs them."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.verify import case_of, verify
from tests.helpers.ranks import living
from tests.helpers.remat import rematerialised
from tests.helpers.verify import Subject, by_recipe

WIDTH, DEPTH = 8, 2


@torch.library.custom_op("tests_untried::grow", mutates_args=())
def grow(x: Tensor) -> Tensor:
    """The exponential, which its backward keeps."""
    return x.exp()


@grow.register_fake
def _(x):
    return torch.empty_like(x)


def _kept(ctx, inputs, output):
    ctx.save_for_backward(output)


grow.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0], setup_context=_kept)


class Block(nn.Module):
    """A residual block whose last operator has a gradient by what it gave, or by gates that nobody else sees."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.up, self.cell = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.GRUCell(WIDTH, WIDTH) if kind == "cell" else None,
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = self.up(self.norm(x))
        return x + (grow(rows * 0.1) if self.cell is None else self.cell(rows, x))


class Deep(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block(kind) for _ in range(DEPTH)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def rows() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


@cache
def subject(kind: str) -> Subject:
    torch.manual_seed(0)
    model = Deep(kind)
    return Subject(kind, "train", capture(model, (rows(),)), model.state_dict())


@pytest.mark.parametrize("level", ["full", pytest.param("selective", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["operator", "cell"])
def test_the_last_operator_of_a_block_has_its_gradient(kind: str, level: str) -> None:
    """Nobody needs its result again: it was left out of the second run, and its backward read memory that nobody
    wrote."""
    who = subject(kind)
    made = rematerialised(who, by_recipe(who, (2,), "ddp"), level)
    assert made.remat
    report = verify(case_of(who.captured, made, who.weights, {"x": rows()}), ranks=living(2))
    assert report.ok, (report.first, report.worst)
