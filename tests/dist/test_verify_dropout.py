"""Dropout on ranks: replicas draw the same masks, shards different ones; a comparison leaves it out, and says so."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.bundle import Bundle
from autopar.capture import capture
from autopar.codegen.module import emit
from autopar.codegen.tables import Names
from autopar.plan import Plan
from autopar.verify.randomness import STILL
from tests.helpers.ranks import on_ranks
from tests.helpers.verify import Sizes, Subject, by_chance, by_recipe, verified

WIDTH = 16


class Noisy(nn.Module):
    """Two products with dropout between and after; the inner mask is also an output."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = self.drop(torch.ones_like(self.up(x)) * x.square().sum(-1, keepdim=True).sign())
        out = self.drop(self.down(h * self.up(x).tanh()))
        return (out - y).square().mean(), h


class _Noisy(Subject):
    def batch(self, batch: int = 8, seq: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        made = [torch.randn(batch, WIDTH, generator=generator) for _ in self.captured.input_names]
        return dict(zip(self.captured.input_names, made, strict=True))


class _Rows(Subject):
    def batch(self, batch: int = 8, seq: int = 6) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {name: torch.randn(batch, seq, WIDTH, generator=generator) for name in self.captured.input_names}


@cache
def _subject() -> _Noisy:
    torch.manual_seed(0)
    model = Noisy()
    return _Noisy("noisy", "train", capture(model, (torch.zeros(8, WIDTH), torch.zeros(8, WIDTH))), model.state_dict())


def _step(
    plan: Plan, source: str, weights: dict[str, Tensor], batch: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """One rank: a step of SGD; the whole masks, and this rank's own copies of what rests whole."""
    module = Bundle(plan, source).build(weights)
    loss, mask = module(*module.shard_batch(**batch))
    loss.backward()
    whole = module.full((loss, mask))[1].clone()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    return whole, {name: p.to_local().detach().clone() for name, p in module.named_parameters()}


def _run(sizes: Sizes, recipe: str) -> tuple[Plan, list[tuple[Tensor, dict[str, Tensor]]]]:
    who = _subject()
    plan = by_recipe(who, sizes, recipe)
    captured = who.captured
    source = emit(captured.gm, plan, Names.of(captured))
    assert "dropout(" in source
    return plan, on_ranks(plan.ranks, _step, plan, source, dict(who.weights), who.batch())


@pytest.mark.parametrize("recipe", ["ddp", "tp", "single"])
def test_replicas_stay_alike_and_shards_differ(recipe: str) -> None:
    plan, results = _run((4,), recipe)
    masks, states = zip(*results, strict=True)
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    layouts = {op: node.outs[0].split("|")[0] for op, node in plan.nodes.items() if node.outs}
    whole = [name for name in states[0] if states[0][name].shape == _subject().weights[name].shape]
    assert recipe == "tp" or whole
    for name in whole:  # copies on replicas are the same to the bit after a step
        assert all(torch.equal(state[name], states[0][name]) for state in states), name
    kept = masks[0] != 0
    assert 0.35 < kept.double().mean() < 0.65
    if "S0" in layouts.values() or "S1" in layouts.values():
        parts = kept.chunk(4, 0 if recipe == "ddp" else 1)
        assert not any(torch.equal(parts[0], part) for part in parts[1:]), "shards must not repeat one mask"


@pytest.mark.parametrize("how", ["ddp", "tp", "random"])
def test_the_comparison_leaves_dropout_out_and_says_so(how: str) -> None:
    who = _subject()
    plan = by_chance(who, (4,), 0) if how == "random" else by_recipe(who, (4,), how)
    report = verified(who.case(plan))
    assert report.ok, report.worst
    assert any("dropout is off" in note and "2 operators" in note for note in report.notes)
    assert "dropout is off" in report.to_json()


class Attends(nn.Module):
    """Attention with dropout over values of which all features are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.queries(x)[:, None]
        values = x[:, None, :, :1].expand(-1, -1, -1, WIDTH) + 0 * rows
        h = F.scaled_dot_product_attention(rows, rows, values, dropout_p=0.5)
        return (h[:, 0] - y).square().mean(), h[:, 0]


def test_ranks_that_split_features_of_values_drop_the_same_scores() -> None:
    """As one device drops them for all features."""
    torch.manual_seed(0)
    model, x = Attends(), torch.zeros(8, 6, WIDTH)
    who = _Rows("attends", "train", capture(model, (x, x)), model.state_dict())
    plan = by_chance(who, (2,), 0, {torch.ops.aten.scaled_dot_product_attention.default: ("v",)})
    source = emit(who.captured.gm, plan, Names.of(who.captured))
    for whole, _ in on_ranks(2, _step, plan, source, dict(who.weights), who.batch()):
        assert (whole == 0).any() and (whole != 0).any()
        torch.testing.assert_close(whole, whole[..., :1].expand_as(whole))


class Paths(nn.Module):
    """Draws with every operator that verification holds still: paths that are dropped by sample, noise, a shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.up(x) * (0.9 + torch.rand((x.shape[0], 1))).floor() + 0.1 * torch.randn(WIDTH)
        h = (
            h * torch.bernoulli(h.detach().sigmoid())
            + torch.rand_like(h) * torch.bernoulli(h, 0.5)
            + 0.1 * torch.randn_like(h)
        )
        h = h[:, torch.randperm(WIDTH)] * torch.randint(1, 3, (WIDTH,)) + torch.randint(3, (WIDTH,))
        h = h * torch.randint_like(h, 1, 3) + torch.randint_like(h, 3)
        noise = (
            torch.empty_like(h).exponential_()
            + torch.empty_like(h).uniform_()
            + torch.empty_like(h).log_normal_()
            + torch.empty_like(h).cauchy_()
        )
        noise = noise + torch.empty_like(h).normal_()
        given = h.detach()
        noise = (
            noise
            + torch.normal(given, 2.0)
            + torch.normal(given, given.abs())
            + torch.normal(1.0, given.abs())
            + torch.poisson(given.exp())
        )
        h = h * torch.rand(WIDTH) + 0.1 * noise * torch.empty_like(h).geometric_(0.5)
        return (h - y).square().mean()


def test_the_comparison_draws_one_number_always() -> None:
    torch.manual_seed(0)
    model = Paths()
    who = _Noisy("paths", "train", capture(model, (torch.zeros(8, WIDTH), torch.zeros(8, WIDTH))), model.state_dict())
    report = verified(who.case(by_chance(who, (2,), 1)))
    assert report.ok, (report.first, report.worst)
    # paths are drawn like a tensor of samples
    assert len([note for note in report.notes if "draws the same number always" in note]) == len(STILL) + 1
