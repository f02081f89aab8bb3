"""Floating inputs beside tokens: one number for each position, or as many numbers as there are positions by chance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.verify import graph_rows
from passes import facts

VOCAB = 16


class Tokens(nn.Module):
    """A loss of next tokens and a floating input."""

    def __init__(self, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.head, self.loss = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB), loss

    def forward(self, ids: Tensor, other: Tensor) -> Tensor:
        return self.loss(self.head(self.table(ids)).log_softmax(-1), ids, other)


def _chosen(scores: Tensor, ids: Tensor) -> Tensor:
    return scores[:, :-1].gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def _masked(scores: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """A mean over the tokens that count."""
    return -(_chosen(scores, ids) * mask[:, 1:]).sum() / mask[:, 1:].sum()


def _preferred(scores: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """The first half of a batch against the second."""
    better, worse = (_chosen(scores, ids) * mask[:, 1:]).sum(-1).chunk(2)
    return -F.logsigmoid(better - worse).mean()


def _joined(scores: Tensor, ids: Tensor, other: Tensor) -> Tensor:
    """Eight numbers of a sample beside what its tokens give."""
    return (torch.cat([scores.mean(1), other], 1) @ torch.ones(VOCAB + 8, 3)).square().mean()


def _data(batch: int, seq: int, numbers: int | None = None) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return torch.randint(0, VOCAB, (batch, seq), generator=drawn), torch.rand(
        batch, seq if numbers is None else numbers, generator=drawn
    )


@pytest.mark.parametrize(
    ("loss", "numbers", "spans", "sizes"),
    [
        (_masked, None, {"s": 3}, (3, 11)),
        (_joined, 8, {"s": 0}, (3, 11)),
        pytest.param(_preferred, None, {"b": 4, "s": 4}, (6, 11), marks=pytest.mark.slow),
    ],
)
def test_positions_stay_symbolic(loss, numbers, spans, sizes):
    torch.manual_seed(0)
    model = Tokens(loss)
    captured = capture(model, _data(4, 8, numbers))
    assert dict(captured.hints) == {"b": 4, "s": 8} and not any("static" in note for note in captured.notes)
    assert {name: facts.spans(captured.gm)[name][0] for name in spans} == spans
    rows, notes = graph_rows(model, captured, _data(*sizes, numbers), {}, training=True)
    assert not notes and all(row.ok for row in rows), rows
