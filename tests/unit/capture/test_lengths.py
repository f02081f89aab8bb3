"""A model may ask for the length of a tensor: it stays symbolic, and Python's own `len` is as before."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.capture.lengths import symbolic_lengths


class Towers(nn.Module):
    """Rows of one tower belong to the rows of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.left(x) @ self.right(y).T
        return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def spread(outputs: Tensor, wanted: Tensor) -> Tensor:
    """A loss that asks for a length."""
    return (outputs - wanted).square().sum() / len(wanted)


def test_a_length_stays_symbolic() -> None:
    captured = capture(Towers(), (torch.zeros(6, 4), torch.zeros(6, 4)))
    assert captured.hints == {"b": 6} and not captured.notes


def test_a_loss_function_may_ask_too() -> None:
    captured = capture(nn.Linear(4, 2), (torch.zeros(6, 4), torch.zeros(6, 2)), loss_fn=spread)
    assert captured.hints == {"b": 6} and not captured.notes


def test_the_name_is_set_for_the_time_of_the_trace() -> None:
    here = vars(sys.modules[__name__])
    with pytest.raises(KeyError), symbolic_lengths(Towers()):
        assert here["len"](torch.zeros(3, 2)) == 3 and here["len"]([1, 2]) == 2
        raise KeyError
    assert "len" not in here


def test_a_file_with_a_length_of_its_own_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here = vars(sys.modules[__name__])
    monkeypatch.setitem(here, "len", str)
    with symbolic_lengths(Towers()):
        assert here["len"] is str
    assert here["len"] is str
