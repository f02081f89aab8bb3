"""Inputs that go into keyword arguments or are no sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.verify import graph_rows


class Forwards(nn.Module):
    """Hands on what it has no name for."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.masked(x, **kwargs)

    def masked(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        out = self.linear(x) * scale
        return (out if mask is None else out * mask[:, None]).square().mean()


@pytest.mark.parametrize(
    "kwargs",
    [{"scale": 2.0}, {"mask": torch.rand(6)}, {"mask": torch.rand(6), "scale": 0.5}],
    ids=["number", "tensor", "both"],
)
def test_inputs_that_go_into_kwargs(kwargs: dict[str, Any]) -> None:
    model, x = Forwards(), torch.randn(6, 8)
    captured = capture(model, (x,), kwargs)
    assert captured.hints == {"b": 6} and not captured.notes
    rows, notes = graph_rows(model, captured, (x,), kwargs, training=True)
    assert not notes and max(row.error for row in rows) < 1e-6
    assert "forward" not in vars(model)


class Scenes(nn.Module):
    """The loss of classes of places, whose maps are made as large as images are."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.out = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 5, 1)

    def forward(self, images: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(
            F.interpolate(self.out(F.relu(self.down(images))), size=images.shape[2:], mode="bilinear"), classes
        )


def test_classes_of_the_places_of_images_are_no_sequences():
    captured = capture(Scenes(), (torch.randn(4, 3, 16, 16), torch.randint(5, (4, 16, 16))))
    assert dict(captured.hints) == {"b": 4}
