"""The batch of a second step: other samples in the same sizes, each whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.verify.second_step import _holding, finite, second_batch, special_numbers
from passes import ops


class Scored(nn.Module):
    """Rows `x` [b, s, 4], weights of positions [s], and one number; targets [b]."""

    def forward(self, x: Tensor, positions: Tensor, scale: Tensor, targets: Tensor) -> Tensor:
        return ((x.sum(-1) * positions).sum(-1) * scale - targets).square().mean()


class Pieces(nn.Module):
    """Any number of pieces [n, 4] beside samples [b, 4]: which sample has which piece is not said."""

    def forward(self, x: Tensor, pieces: Tensor) -> Tensor:
        return x.square().mean() + pieces.sum().square()


class Padded(nn.Module):
    """Rows of a table, one of which is none, and labels; some of the numbers of rows are labels, too."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.others = nn.Embedding(1000, 4, padding_idx=7), nn.Embedding(1000, 4)
        self.bags, self.map = nn.EmbeddingBag(1000, 4, mode="sum", padding_idx=9), nn.Linear(4, 1000)

    def forward(self, ids: Tensor, more: Tensor, bags: Tensor, starts: Tensor, labels: Tensor) -> Tensor:
        h = self.rows(ids) + self.others(more) + self.bags(bags.flatten(), starts)[:, None]
        logits = self.map(h)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + F.cross_entropy(
            logits[:, :-1].flatten(0, 1), more[:, 1:].flatten()
        )


def test_numbers_that_are_treated_in_another_way_are_in_the_second_batch() -> None:
    """By chance a table's row without a gradient was never read, and labels that do not count never came."""
    generator = torch.Generator().manual_seed(0)
    batch = {
        name: torch.randint(20, 1000, (4, 6), generator=generator)
        for name in ("ids", "more", "bags", "starts", "labels")
    }
    batch["starts"] = torch.arange(0, 24, 6)
    captured = capture(Padded(), (), batch)
    assert special_numbers(captured.gm) == {"ids": [7], "more": [], "bags": [9], "starts": [], "labels": [-100]}
    found = second_batch(captured.gm, batch)
    for name, number in (("ids", 7), ("bags", 9), ("labels", -100)):
        assert int((found[name] == number).sum()) == 1, name
    assert found["more"].min() >= 20 and found["starts"].tolist() == [0, 0, 6, 6]


class Pictured(nn.Module):
    """Rows of a table, one of which is none, and rows of pictures where numbers say so."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(30, 4, padding_idx=7)

    def forward(self, ids: Tensor, pictures: Tensor) -> Tensor:
        places = (ids == 20) | (ids > 25)
        return self.rows(ids).masked_scatter(places[..., None], pictures).square().mean()


def test_places_for_rows_stay_in_the_second_batch() -> None:
    """A padding was written over an image token, and samples with unlike numbers of them were taken twice, so that
    there were other places than rows."""
    batch = {"ids": torch.tensor([[1, 20, 20, 26, 3, 4], [5, 6, 8, 20, 9, 2]]), "pictures": torch.randn(2, 2, 4)}
    captured = capture(Pictured(), (), batch, dynamic_shapes={"ids": {0: "b"}, "pictures": {0: "b"}})
    assert captured.gm.graph.find_nodes(op="call_function", target=ops.fill_rows)
    found = second_batch(captured.gm, batch)
    assert torch.equal(found["ids"], batch["ids"])
    assert torch.equal(found["pictures"], batch["pictures"][[0, 0]])


def test_numbers_that_a_batch_has_and_single_ones_stay() -> None:
    x = torch.tensor([[3, 7], [1, 2]])
    assert _holding(x, [7, 3]) is x and torch.equal(_holding(x, [9]), torch.tensor([[3, 7], [1, 9]]))
    assert torch.equal(_holding(x, [8, 9]), torch.tensor([[3, 7], [8, 9]]))
    assert torch.equal(_holding(torch.tensor([5]), [0]), torch.tensor([5]))


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
