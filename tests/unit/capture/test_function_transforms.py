"""Function transforms inside of a model (torch.func)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.capture import capture


class Ensemble(nn.Module):
    """Several products of the same samples, which `vmap` is not given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(lambda weight: x @ weight)(self.weight).square().mean()


class Each(nn.Module):
    """A derivative for each sample, which `vmap` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        jacobian = torch.func.jacrev(lambda one: torch.tanh(self.weight @ one))
        return torch.func.vmap(jacobian)(x).square().sum((1, 2)).mean()


def test_a_size_that_is_lost_in_a_transform_is_told_in_words() -> None:
    captured = capture(Ensemble(), (torch.randn(8, 4),))
    (note,) = captured.notes
    assert note.startswith("b is static: torch loses the size b where a function transform (torch.func.vmap")
    assert "at test_function_transforms.py:" in note and " object at 0x" not in note
    assert captured.hints == {}


def test_what_a_transform_is_given_keeps_its_size() -> None:
    captured = capture(Each(), (torch.randn(8, 4),))
    assert captured.hints == {"b": 8}
