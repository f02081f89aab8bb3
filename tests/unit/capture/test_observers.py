"""Observers of quantisation-aware training, written with common operators: bit by bit the numbers of torch's kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.capture.observers import plain_observers
from autopar.errors import CaptureError

RANGES = {
    "around zero": lambda x: x,
    "above": lambda x: x.abs() + 1,
    "below": lambda x: -x.abs() - 1,
    "zeros": torch.zeros_like,
    "tiny": lambda x: x * 1e-6,
    "tiny and above": lambda x: x.abs() * 1e-6,
    "tiny and below": lambda x: -x.abs() * 1e-6,
    "too small for a reciprocal": lambda x: x * 1e-41,
    "lopsided": lambda x: x + 0.9,
}
Buffers = tuple[Tensor, ...]


def _step(x: Tensor, buffers: Buffers, flags: tuple[int, int], channels: bool, symmetric: bool) -> Tensor:
    low, high = (-128, 127) if symmetric else (0, 127)
    on = (torch.tensor([flag]) for flag in flags)
    return torch.fused_moving_avg_obs_fake_quant(x, *on, *buffers, 0.3, low, high, 0, channels, symmetric)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("kind", RANGES)
def test_numbers_are_those_of_the_kernel(kind: str, channels: bool, symmetric: bool) -> None:
    """In a first step and in later ones, where it observes or not, and quantises or not."""
    sizes, generator = ([3] if channels else []), torch.Generator().manual_seed(0)
    inf = torch.full(sizes, torch.inf)
    ours = inf.clone(), -inf, torch.ones(sizes or 1), torch.zeros(sizes or 1, dtype=torch.int32)
    theirs = tuple(buffer.clone() for buffer in ours)
    for flags in ((0, 1), (1, 1), (1, 1), (1, 0), (0, 1), (0, 0), (1, 1)):
        x = RANGES[kind](torch.randn(3, 4, 5, generator=generator))
        wanted = _step(x, theirs, flags, channels, symmetric)
        with plain_observers():
            got = _step(x, ours, flags, channels, symmetric)
        assert all(a.equal(b) for a, b in zip((got, *ours), (wanted, *theirs), strict=True)), (flags, ours, theirs)


class Observed(nn.Module):
    """A linear layer whose input and weights are observed and quantised."""

    def __init__(self, make) -> None:
        super().__init__()
        self.taken, self.weight = make.activation(), make.weight()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.taken(x), self.weight(self.linear.weight), self.linear.bias).square().mean()


def test_what_has_no_graph_yet_says_what_to_do() -> None:
    """Buffers that get their size in the first step, and observers that branch on what they have seen."""
    fused = torch.ao.quantization.get_default_qat_qconfig("x86")
    with pytest.raises(CaptureError, match=r"buffers of no elements, which get 4 .*run the model on one batch before"):
        capture(Observed(fused), (torch.zeros(8, 4),))
    apart = torch.ao.quantization.QConfig(
        torch.ao.quantization.default_fake_quant, torch.ao.quantization.default_weight_fake_quant
    )
    with pytest.raises(CaptureError, match=r"use the fused ones, .*get_default_qat_qconfig"):
        capture(Observed(apart), (torch.zeros(8, 4),))
