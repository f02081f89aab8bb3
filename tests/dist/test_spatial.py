"""A model whose images are cut evenly along height, or both ways: every byte that borders take is priced, and what they
leave in memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.bundle import Bundle
from autopar.capture import capture
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.recipes.free import space
from autopar.report.explain import choice_of
from tests.helpers.kept import kept_on_rank
from tests.helpers.ranks import on_ranks
from tests.helpers.verify import BATCH, SEQ, Sizes, Subject, by_place, planned, planner_of
from tests.unit.decisions.test_memory import activations

SIDE = 32


class Scene(nn.Module):
    """All kinds of windows, and sums over the image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 8, 7, stride=2, padding=3)
        self.same = nn.Conv2d(8, 8, 3, padding="same", dilation=2)
        self.deep = nn.Conv2d(8, 12, (5, 3), padding=(2, 1), groups=4, bias=False)
        self.head = nn.Linear(12, 8)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.stem(images))
        x = F.max_pool2d(x + torch.tanh(self.same(x)), 3, stride=1, padding=1)
        x = F.avg_pool2d(torch.tanh(self.deep(x)), 2)
        return F.cross_entropy(self.head(x.square().sum((2, 3))), labels)


@dataclass(frozen=True, eq=False)
class Scenes(Subject):
    """The model with batches of its own."""

    def batch(self, batch: int = BATCH, seq: int = SEQ) -> dict[str, Tensor]:
        """Random scenes."""
        made = torch.Generator().manual_seed(0)
        return {
            "images": torch.randn(batch, 4, SIDE, SIDE, generator=made),
            "labels": torch.randint(8, (batch,), generator=made),
        }


@pytest.fixture(scope="module")
def who() -> Scenes:
    torch.manual_seed(0)
    model = Scene()
    args = torch.zeros(BATCH, 4, SIDE, SIDE), torch.zeros(BATCH, dtype=torch.long)
    return Scenes("scene", "train", capture(model, args, {}), model.state_dict())


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)])
def test_every_byte_of_borders_is_priced(who: Scenes, sizes: Sizes) -> None:
    made = planned(who, sizes, "spatial")
    assert sum(run == "halo" for node in made.nodes.values() for run in node.runs) == 5 * len(sizes)
    report = who.verified(made)
    assert report.ok, (report.first, report.worst)
    assert any(row.name == "bytes: run = priced" for row in report.rows)


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_the_images_with_borders_are_kept_for_the_backward(who: Scenes, sizes: Sizes) -> None:
    """Beside them the images themselves are counted, which others mostly keep: not here those that only windows
    read."""
    made = planned(who, sizes, "spatial")
    model = planner_of(who, sizes).model(sizes, space(sizes), "spatial")
    bundle = Bundle(made, emit(who.captured.gm, made, Names.of(who.captured)), who.captured.constants)
    ranks = math.prod(sizes)
    held = max(on_ranks(ranks, kept_on_rank, bundle, dict(who.weights), who.batch()))
    # the input, the sum, the pool's result; in float32
    only_windows = 4 * BATCH * (4 * SIDE**2 + 2 * 8 * (SIDE // 2) ** 2) // ranks
    assert activations(model, choice_of(model, made)) == pytest.approx(held + only_windows, rel=0.01)


class Pooled(nn.Module):
    """Means over pairs of positions; of an odd number the last one is by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 4), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return (
            self.head(F.avg_pool1d(self.embedding(tokens).transpose(1, 2), 2, 2, ceil_mode=True).transpose(1, 2))
            .square()
            .mean()
        )


class Tokens(Subject):
    """The model with batches of its own."""

    def batch(self, batch: int = BATCH, seq: int = SEQ) -> dict[str, Tensor]:
        """Random tokens."""
        return {"tokens": torch.randint(32, (batch, seq), generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("recipe", ["cp", "ulysses"])
def test_means_over_windows_are_those_of_one_device_at_other_lengths_than_planned(recipe: str) -> None:
    torch.manual_seed(0)
    model = Pooled()
    pooled = Tokens(
        "pooled", "train", capture(model, (torch.zeros(BATCH, SEQ, dtype=torch.long),), {}), model.state_dict()
    )
    made = planned(pooled, (2,), recipe)
    for length in (SEQ, SEQ - 3):
        report = pooled.verified(made, seq=length)
        assert report.ok, (length, report.first, report.worst)


class Largest(nn.Module):
    """The largest of two by two positions, none of which is positive, of images with odd sides."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2, ceil_mode=True)

    def forward(self, images: Tensor) -> Tensor:
        return self.pool(-self.conv(images).abs() - 1.0).square().mean()


class Images(Subject):
    """The model with batches of its own."""

    def batch(self, batch: int = BATCH, seq: int = SEQ) -> dict[str, Tensor]:
        """Random images."""
        return {"images": torch.randn(batch, 3, 13, 11, generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("sizes", [(2,), (2, 2)])
def test_windows_that_reach_behind_an_image_find_nothing_larger_there(sizes: Sizes) -> None:
    torch.manual_seed(0)
    model = Largest()
    who = Images("largest", "train", capture(model, (torch.zeros(BATCH, 3, 13, 11),), {}), model.state_dict())
    made = by_place(who, sizes)
    assert sum(run == "halo" for node in made.nodes.values() for run in node.runs) == 2 * len(sizes)
    report = who.verified(made)
    assert report.ok, (report.first, report.worst)
