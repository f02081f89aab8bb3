"""Plain arguments that are part of a plan, and arguments that hold several inputs, on ranks: modules of one stage and
pipelines take them as planned and refuse others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.capture import capture
from autopar.errors import RunError
from autopar.plan import Plan
from autopar.verify import case_of
from autopar.verify.step import RankCase
from tests.helpers.ranks import living
from tests.helpers.verify import Subject, by_recipe, by_stages


class Scaled(nn.Module):
    """Plain arguments between tensors, and behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, scale: float = 1.0, wanted: torch.Tensor | None = None, *, deep: bool = False
    ) -> torch.Tensor:
        h = torch.tanh(self.first(x) * scale)
        return ((self.second(h) if deep else h) - wanted).pow(2).mean()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and targets."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator, dtype=torch.float64), torch.randn(
        8, 4, generator=generator, dtype=torch.float64
    )


@cache
def subject() -> Subject:
    """The model, captured with scale=2 and deep=True."""
    torch.manual_seed(0)
    model = Scaled().double()
    x, wanted = batch()
    captured = capture(model, (x, 2.0, wanted), {"deep": True})
    assert captured.fixed == {"scale": (1, 2.0), "deep": (3, True)}
    return Subject("scaled", "train", captured, model.state_dict())


def losses(source: str, rank_case: RankCase) -> list[float]:
    """One rank: losses of the ways to pass them, and what other values do."""
    module = rank_case.build(source)
    x, wanted = batch()
    mine = module.shard_batch(x, 2.0, wanted, deep=True)
    assert all(torch.equal(a, b) for a, b in zip(mine, module.shard_batch(x, wanted), strict=True))
    found = [
        module.train_step(mine[0], 2.0, mine[1], deep=True),
        module.train_step(*mine),
        module.train_step(mine[0], scale=2.0, wanted=mine[1]),
    ]
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
    for found in living(2).run(losses, case.source(), case.rank_case):
        assert found == pytest.approx([right] * 3, rel=1e-12)


class Limited(nn.Module):
    """Plain arguments that need not be finite."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, wanted: torch.Tensor, most: float = 1.0, missing: float = 0.0) -> torch.Tensor:
        return (self.map(x).clamp(max=most).masked_fill(x > 100, missing) - wanted).pow(2).mean()


def test_plain_arguments_that_are_not_finite() -> None:
    torch.manual_seed(0)
    model, (x, wanted), given = Limited().double(), batch(), (float("inf"), float("nan"))
    module = autopar.compile(model, "cpu:1x1", (x, wanted, *given), recipe="single").module
    right = float(model(x, wanted, *given).detach())
    assert [float(module.train_step(x, wanted, *more)) for more in ((), given)] == pytest.approx([right] * 2, rel=1e-12)
    for most, missing, message in (
        (1.0, given[1], "'most' is 1.0, and the plan was made with most=inf"),
        (given[0], 1.0, "'missing' is 1.0, and the plan was made with missing=nan"),
    ):
        with pytest.raises(RunError, match=message):
            module.train_step(x, wanted, most, missing)


class Fed(nn.Module):
    """Takes its batch as loaders give it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(
        self, batch: dict[str, Any], others: Sequence[Any], *, options: Mapping[str, Any] | None = None
    ) -> torch.Tensor:
        h = torch.tanh(self.first(batch["x"]) * (options or {}).get("scale", 1.0))
        return (self.second(h + others[0]) - batch["to"]["wanted"]).pow(2).mean()


def given() -> dict[str, torch.Tensor]:
    """Inputs of `Fed`."""
    x, wanted = batch()
    return {"batch_to_wanted": wanted, "batch_x": x, "others_0": x + wanted}


def held(inputs: Mapping[str, torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that hold them."""
    return ({"to": {"wanted": inputs["batch_to_wanted"]}, "x": inputs["batch_x"]}, [inputs["others_0"], ()]), {
        "options": {"scale": 2.0}
    }


def fed(source: str, rank_case: RankCase) -> list[float]:
    """One rank: losses of the ways to pass them, and what others do."""
    module = rank_case.build(source)
    args, kwargs = held(given())
    mine = module.shard_batch(*args, **kwargs)
    assert all(torch.equal(a, b) for a, b in zip(mine, module.shard_batch(**given()), strict=True))
    named = dict(zip(module.INPUTS, mine, strict=True))
    parts, _ = held(named)
    found = [
        module.train_step(*mine),
        module.train_step(*parts, **kwargs),
        module.train_step(parts[0], others=tuple(parts[1])),
        module.train_step(**named),
    ]
    with pytest.raises(RunError, match=r"argument batch is a dict with x, and the plan was made with to, x"):
        module.shard_batch({"x": args[0]["x"]}, args[1])
    with pytest.raises(
        RunError, match=r"argument 'options_scale' is 3.0, and the plan was made with options_scale=2.0"
    ):
        module.train_step(*parts, options={"scale": 3.0})
    return [float(loss) for loss in found]


@pytest.mark.parametrize("places", [1, 2])
def test_arguments_that_hold_several_inputs(places: int) -> None:
    torch.manual_seed(0)
    model, (args, kwargs) = Fed().double(), held(given())
    captured = capture(model, args, kwargs)
    assert captured.nested == {
        "batch": {"to": {"wanted": "batch_to_wanted"}, "x": "batch_x"},
        "others": ("others_0",),
        "options": {"scale": "options_scale"},
    }
    who = Subject("fed", "train", captured, model.state_dict())
    plan: Plan = by_recipe(who, (2,), "ddp") if places == 1 else by_stages(who, (1,), "single", 2, 2, "1f1b")
    case = case_of(captured, plan, who.weights, given())
    for found in living(2).run(fed, case.source(), case.rank_case):
        assert found == pytest.approx([float(model(*args, **kwargs).detach())] * 4, rel=1e-12)
