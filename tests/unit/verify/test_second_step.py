"""The batch of a second step: other samples in the same sizes, each whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.verify.second_step import finite, second_batch


class Scored(nn.Module):
    """Rows `x` [b, s, 4], weights of positions [s], and one number; targets [b]."""

    def forward(self, x: Tensor, positions: Tensor, scale: Tensor, targets: Tensor) -> Tensor:
        return ((x.sum(-1) * positions).sum(-1) * scale - targets).square().mean()


class Pieces(nn.Module):
    """Any number of pieces [n, 4] beside samples [b, 4]: which sample has which piece is not said."""

    def forward(self, x: Tensor, pieces: Tensor) -> Tensor:
        return x.square().mean() + pieces.sum().square()


def test_samples_are_other_ones_and_stay_whole() -> None:
    batch = {"x": torch.randn(6, 5, 4), "positions": torch.randn(5), "scale": torch.ones(()), "targets": torch.randn(6)}
    captured = capture(Scored(), tuple(batch.values()), dynamic_shapes=(({0: "b", 1: "s"}, {0: "s"}, {}, {0: "b"}), {}))
    found = second_batch(captured.gm, dict(zip(captured.input_names, batch.values(), strict=True)))
    taken = [0, 0, 1, 1, 2, 2]
    for (name, value), got in zip(batch.items(), found.values(), strict=True):
        assert torch.equal(got, value[taken] if name in ("x", "targets") else value), name


def test_inputs_of_sizes_of_their_own_stay() -> None:
    x, pieces = torch.randn(6, 4), torch.randn(10, 4)
    captured = capture(Pieces(), (x, pieces), dynamic_shapes=(({0: "b"}, {0: "n"}), {}))
    batch = dict(zip(captured.input_names, (x, pieces), strict=True))
    found = second_batch(captured.gm, batch)
    assert {"b", "n"} <= captured.gm.meta["symbols"].keys() and all(
        torch.equal(found[name], value) for name, value in batch.items()
    )


def test_masked_outputs_may_be_infinite_and_the_loss_may_not() -> None:
    masked, missing = torch.tensor([1.0, -torch.inf]), torch.tensor([1.0, torch.nan])
    assert finite({"loss": torch.ones(()), "logits": masked})
    assert not finite({"loss": torch.tensor(torch.inf)}) and not finite({"logits": missing})
