"""Microbatches of what models spell in other words: copies for each sample, writes row by row, joins by another
name."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.errors import PlanError
from autopar.pipeline import SCHEDULES
from autopar.recipes import roles
from tests.helpers.verify import Sizes, Subject, by_chance, by_stages

HEADS, D = 2, 8


class Copied(nn.Module):
    """Scores of positions that all samples share, copied for each of them, as in DeBERTa."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.places = nn.Linear(D, D), nn.Parameter(torch.randn(HEADS, 4, D // HEADS) / 4)

    def forward(self, h: Tensor) -> Tensor:
        rows = self.up(h).unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1)
        scores = torch.bmm(rows, self.places.repeat(rows.size(0) // HEADS, 1, 1).mT)
        return h + torch.bmm(scores.softmax(-1), self.places.repeat(len(h), 1, 1)).unflatten(0, (-1, HEADS)).transpose(
            1, 2
        ).flatten(2)


class Stepped(nn.Module):
    """Positions one after the other, each written into its place, as in RWKV."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(D, D)

    def forward(self, h: Tensor) -> Tensor:
        rows, state = torch.zeros_like(h), torch.zeros_like(h[:, 0])
        for i in range(h.shape[1]):
            state = torch.tanh(self.up(h[:, i]) + state)
            rows[:, i] = state
        return h + rows


class Joined(nn.Module):
    """Two halves side by side, as PhiMoE's two experts, scaled to one."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(D, D // 2), nn.Linear(D, D // 2)

    def forward(self, h: Tensor) -> Tensor:
        return h + F.normalize(torch.concat((self.left(h), self.right(h).relu()), dim=-1), dim=-1)


class Model(nn.Module):
    """Two blocks of one kind."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layers = nn.Linear(D, D), nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for layer in self.layers:
            h = layer(h)
        return h.square().sum() / x.shape[0]


class Rows(Subject):
    """A subject whose batch is one tensor."""

    def batch(self, batch: int = 8, seq: int = 16) -> dict[str, Tensor]:
        return {self.captured.input_names[0]: torch.randn(8, 4, D, generator=torch.Generator().manual_seed(1))}


@cache
def rows(kind: type[nn.Module]) -> Subject:
    model = Model(kind)
    return Rows(kind.__name__, "train", capture(model, (torch.zeros(8, 4, D),)), model.state_dict())


@pytest.mark.parametrize(
    ("schedule", "mesh", "used"), [("1f1b", (1,), roles.nothing), ("interleaved_zero_bubble", (2,), roles.zero1)]
)
@pytest.mark.parametrize("kind", [Copied, Stepped, Joined])
def test_pipelines_take_microbatches(kind: type[nn.Module], schedule: str, mesh: Sizes, used: roles.Role) -> None:
    who = rows(kind)
    report = who.verified(by_stages(who, mesh, (used,), 2, 4, schedule, SCHEDULES[schedule].virtual or 1))
    assert report.ok, [row for row in report.rows if not row.ok][:4]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [Copied, Stepped, Joined])
def test_any_plan(kind: type[nn.Module], seed: int) -> None:
    report = rows(kind).verified(by_chance(rows(kind), (2, 2), seed))
    assert report.ok, (report.first, [row for row in report.rows if not row.ok][:4])


class Latents(nn.Module):
    """Blocks on learned rows, copied for each sample, that read the input, as in Perceiver."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.latents, self.layers = nn.Parameter(torch.randn(3, D)), nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.latents.expand(len(x), -1, -1)
        for layer in self.layers:
            h = h + layer(h) * x.mean(1, keepdim=True)
        return h.square().sum() / len(x)


def test_a_stage_behind_the_first_blocks_does_not_make_what_these_are_given() -> None:
    """It had a copy of the latents, which nothing reads there, and the sum of its gradient was priced and never run."""
    model = Latents()
    who = Rows("latents", "train", capture(model, (torch.zeros(8, 4, D),)), model.state_dict())
    made = by_stages(who, (2,), (roles.data,), 2, 2, "1f1b")
    assert [[name for name in stage.nodes if name.startswith("expand")] for stage in made.stages] == [["expand"], []]
    report = who.verified(made)
    assert report.ok, [row for row in report.rows if not row.ok][:4]


class PositionsFirst(nn.Module):
    """Attention over the first dim of its input, as in nn.TransformerEncoder without batch_first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x).transpose(0, 1).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(h, h, h).transpose(1, 2).flatten(2).transpose(0, 1)
        return self.head(mixed).square().mean()


def test_what_a_ring_would_exchange_is_not_cut_into_microbatches() -> None:
    """Each microbatch attended to its own positions alone: another loss and other gradients, without an error."""
    model = PositionsFirst()
    who = Rows("positions first", "train", capture(model, (torch.zeros(8, 4, D),)), model.state_dict())
    with pytest.raises(PlanError, match=r"all samples .*so 2 microbatches would not compute what the batch computes"):
        by_stages(who, (1,), (roles.nothing,), 2, 2, "1f1b")


class EveryPair(nn.Module):
    """A loss that compares every sample with every other one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(self.stem(x).tanh())
        return (h @ h.t()).logsumexp(1).mean()


def test_the_refusal_of_microbatches_says_which_value_all_samples_are_needed_of() -> None:
    model = EveryPair()
    who = Rows("every pair", "train", capture(model, (torch.zeros(8, D),)), model.state_dict())
    with pytest.raises(
        PlanError, match=r"needs all samples of the batch together of \w+ \(.*so 2 microbatches would not compute"
    ):
        by_stages(who, (1,), (roles.nothing,), 2, 2, "1f1b")
