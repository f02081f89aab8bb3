"""Forwards that draw random numbers, set seeds or take gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.errors import CaptureError
from tests.unit.capture.test_failures import Net, batch


class LeftOut(Net):
    layerdrop = 0.1

    def change(self, x):
        return x if torch.rand([]) < self.layerdrop else x + 1


def test_blocks_that_are_left_out_at_random_are_told_what_to_set():
    with pytest.raises(
        CaptureError, match=r"(?s)LeftOut cannot be exported.*self.layerdrop.*leaves blocks out at random.*set it to 0"
    ):
        capture(LeftOut(), batch())


class Seeds(Net):
    def change(self, x):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return x + torch.randn(4)


class SeedsByTime(Net):
    def change(self, x):
        torch.random.seed()
        return x + torch.randn(4)


@pytest.mark.parametrize("kind", [Seeds, SeedsByTime])
def test_seeds_in_forward_are_refused(kind):
    with pytest.raises(
        CaptureError, match=r"^test_random_forwards.py:\d+ seeds torch's generator in forward.*keep them as a buffer"
    ):
        capture(kind(), batch())
    torch.manual_seed(1)


class TakesGradients(Net):
    def change(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)[0]


def test_gradients_in_forward_are_refused():
    with pytest.raises(
        CaptureError,
        match=r"gradients are taken in forward .*\nat test_random_forwards.py:\d+; they are not operators of a graph: "
        r"take them of a function by torch.func.grad",
    ):
        capture(TakesGradients(), batch())


class Likely(Net):
    def change(self, x):
        return torch.distributions.Normal(x, nn.functional.softplus(x) + 0.1).log_prob(x)


def test_distributions_are_asked_without_looking_at_values_and_look_again_afterwards():
    # torch.compile, wherever it was called, turns it off
    torch.distributions.Distribution.set_default_validate_args(True)
    assert capture(Likely(), batch()).hints == {"b": 8}
    with pytest.raises(ValueError, match="scale"):
        torch.distributions.Normal(torch.zeros(1), -torch.ones(1))


class DrawsByTorch(Net):
    def change(self, x):
        return x * torch.rand(x.shape[1])


def test_draws_of_torch_are_operators_of_the_graph():
    captured = capture(DrawsByTorch(), batch())
    assert any("rand" in str(node.target) for node in captured.gm.graph.nodes)


class DrawsByItsOwn(Net):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def change(self, x):
        return x * torch.rand(4, generator=self.generator)


def test_a_generator_of_ones_own_is_refused():
    with pytest.raises(
        CaptureError,
        match=r"aten.rand.generator in forward reads a .*Generator, which is neither a tensor nor a plain value "
        r".*torch.Generator is left out",
    ):
        capture(DrawsByItsOwn(), batch())
