"""Modules of torch whose forward reads values train and evaluate as captured graphs; a user's own forwards stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.capture.shadow import shadow
from autopar.errors import CaptureError
from autopar.verify import graph_rows, inputs_of
from autopar.verify.reference import train_step

NORMS: dict[str, Callable[[], nn.Module]] = {
    "one dim": lambda: nn.BatchNorm1d(4, momentum=None),
    "no affine": lambda: nn.BatchNorm1d(4, affine=False, momentum=None),
    "no statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False, momentum=None),
}


class Normed(nn.Module):
    """A norm between maps."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.map, self.norm = nn.Linear(4, 4), norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.map(x)).pow(3).mean()


@pytest.mark.parametrize("name", NORMS)
def test_norms_without_a_momentum_train_and_evaluate(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = Normed(NORMS[name]()), (torch.randn(8, 4),)
    for _ in range(3):
        model(torch.randn(8, 4) + 1)
    captured = capture(model, inputs)
    rows, notes = graph_rows(model, captured, inputs, {}, training=True)
    assert not notes and all(row.ok for row in rows), rows
    assert (
        ("new norm.running_var" in {row.name for row in rows})
        == any("in evaluation" in row.name for row in rows)
        == (name != "no statistics")
    )


def test_averages_over_all_batches_are_in_the_precision_of_the_statistics() -> None:
    """The share of a third batch was a third in float32, which put statistics of float64 off by 1e-8."""
    torch.manual_seed(0)
    model, inputs = Normed(NORMS["one dim"]()).double(), (torch.randn(8, 4).double(),)
    for _ in range(2):
        model(torch.randn(8, 4).double() + 1)
    captured = capture(model, inputs)
    found = train_step(captured.gm, model.state_dict(), inputs_of(captured, inputs, {}), training=True)["buffer"]
    model(*inputs)
    for name, value in found.items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-14, atol=1e-14)
    assert set(found) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


class Own(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_forwards_of_the_user_stay() -> None:
    patched = nn.BatchNorm1d(4, momentum=None)
    patched.forward = lambda x: x * 2  # type: ignore[method-assign]
    for model in (patched, nn.BatchNorm1d(4)):
        assert vars(shadow(model)).get("forward") is vars(model).get("forward")
    with pytest.raises(CaptureError, match="read off a tensor"):
        capture(Normed(Own(4, momentum=None)), (torch.randn(8, 4),))


class Chunked(nn.Module):
    """torch's loss of a linear layer, by default in chunks where it has such (2.13)."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.head = nn.Linear(4, 6), nn.Linear(6, 50, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        rows = self.map(x).flatten(0, 1)
        if not hasattr(F, "linear_cross_entropy"):
            return F.cross_entropy(self.head(rows), targets.flatten())
        return F.linear_cross_entropy(rows, self.head.weight, targets.flatten(), options=nn.LinearCrossEntropyOptions())


def test_a_loss_in_chunks_is_captured_as_one_that_can_be_split() -> None:
    """It was one operator without a rule, which every rank ran on all rows at no price, for one size of the batch."""
    torch.manual_seed(0)
    model, inputs = Chunked(), (torch.randn(8, 16, 4), torch.randint(0, 50, (8, 16)))
    captured = capture(model, inputs)
    called = {str(node.target) for node in captured.gm.graph.nodes if node.op == "call_function"}
    assert "chunked" not in " ".join(called) and any("cross_entropy_sum" in name for name in called)
    assert captured.gm.meta["symbols"]
    rows, notes = graph_rows(model, captured, inputs, {}, training=True)
    assert not notes and all(row.ok for row in rows), rows
