"""Which operators have operands at their jump, and what is said of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import Captured, capture
from autopar.verify.ties import JUMPS, explained, ties

ROUNDING = 1e-13


class Jumping(nn.Module):
    """Two blocks with a kink at zero, then what jumps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Kink(), Kink()])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        h = x
        for layer in self.layers:
            h = layer(h)
        return h.exp(), (x > y).float(), torch.maximum(x, y), x.clamp(-1.0, 3.0), x.floor()


class Kink(nn.Module):
    """The difference of a sum from its part."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3))

    def forward(self, h: Tensor) -> Tensor:
        return h + (h * self.bias - h).abs()


def _captured() -> tuple[Captured, dict[str, Tensor], dict[str, Tensor]]:
    x = torch.tensor([[0.5, 3.0, -2.25]])
    y = torch.tensor([[0.5, 2.0, 4.0]])
    model = Jumping().double()
    captured = capture(model, (x.double(), y.double()), mode="inference")
    return captured, dict(model.state_dict()), {"x": x.double() + ROUNDING, "y": y.double()}


def test_ties_are_counted() -> None:
    captured, weights, batch = _captured()
    found = {name.rpartition("/")[2]: count for name, count in ties(captured.gm, weights, batch, 1e-9).items()}
    assert found == {"abs_1": 6, "gt": 1, "maximum": 1, "clamp": 1, "floor": 1}


def test_what_feeds_a_kink_is_explained() -> None:
    captured, weights, batch = _captured()
    found = ties(captured.gm, weights, batch, 1e-9)
    (kink,) = [name for name in found if name.endswith("abs_1")]
    scope = kink.rpartition("/")[0]
    assert explained(f"{scope}/sub (gradient, block 1)", captured.gm, found).startswith(f": 6 elements of what {kink} ")
    assert "1 elements of what gt reads" in explained("gt (value)", captured.gm, found)
    assert explained("exp (value)", captured.gm, found) == ""


@pytest.mark.parametrize("op", JUMPS, ids=str)
def test_operands_away_from_the_jump_are_no_ties(op: torch._ops.OpOverload) -> None:
    a, b = torch.tensor([0.25, 0.7], dtype=torch.float64), torch.tensor([0.4, 0.9], dtype=torch.float64)
    operands = [a, b][: max(1, min(2, sum(arg.type.kind() != "BoolType" for arg in op._schema.arguments)))]
    assert (JUMPS[op](*operands).abs() > 0.05).all()
