"""Plain arguments that are part of a plan, on ranks: modules of one stage and pipelines take them as planned and refuse other values."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import RunError
from autopar.plan import Plan
from autopar.verify import case_of
from autopar.verify.step import Light
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_recipe, by_stages


class Scaled(nn.Module):
    """Plain arguments between tensors, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0, wanted: torch.Tensor | None = None, *, deep: bool = False) -> torch.Tensor:
        h = torch.tanh(self.first(x) * scale)
        return ((self.second(h) if deep else h) - wanted).pow(2).mean()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and targets."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator, dtype=torch.float64), torch.randn(8, 4, generator=generator, dtype=torch.float64)


@cache
def subject() -> Subject:
    """The model, captured with scale=2 and deep=True."""
    torch.manual_seed(0)
    model = Scaled().double()
    x, wanted = batch()
    captured = capture(model, (x, 2.0, wanted), {"deep": True})
    assert captured.fixed == {"scale": (1, 2.0), "deep": (3, True)}
    return Subject("scaled", "train", captured, model.state_dict())


def losses(source: str, light: Light) -> list[float]:
    """One rank: losses of the ways to pass them, and what other values do."""
    module = light.build(source)
    x, wanted = batch()
    mine = module.shard_batch(x, 2.0, wanted, deep=True)
    assert all(torch.equal(a, b) for a, b in zip(mine, module.shard_batch(x, wanted), strict=True))
    found = [module.train_step(mine[0], 2.0, mine[1], deep=True), module.train_step(*mine), module.train_step(mine[0], scale=2.0, wanted=mine[1])]
    with pytest.raises(RunError, match=r"argument 'scale' is 3.0, and the plan was made with scale=2.0"):
        module.train_step(mine[0], 3.0, mine[1])
    with pytest.raises(RunError, match=r"argument 'deep' is False"):
        module.train_step(*mine, deep=False)
    return [float(loss) for loss in found]


@pytest.mark.parametrize("places", [1, 2])
def test_plain_arguments(places: int) -> None:
    who, (x, wanted) = subject(), batch()
    plan: Plan = by_recipe(who, (2,), "ddp") if places == 1 else by_stages(who, (1,), "single", 2, 2, "1f1b")
    case = case_of(who.captured, plan, who.weights, {"x": x, "wanted": wanted})
    model = Scaled().double()
    model.load_state_dict(dict(who.weights))
    right = float(model(x, 2.0, wanted, deep=True).detach())
    for found in living(2).run(losses, case.source(), case.light):
        assert found == pytest.approx([right] * 3, rel=1e-12)
