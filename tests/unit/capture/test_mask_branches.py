"""Branches on whether a mask picks anything: taken where the other one is the same with no rows, refused where it is
not."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autopar.capture import capture
from autopar.capture.empty_branches import _apart
from autopar.capture.export import UNPICKED
from autopar.errors import CaptureError
from passes import ops
from tests.helpers.export import run_graph
from tests.helpers.loops import ASKING, EXPERTS, HIDDEN, Gated, Looped, any_, plain


class Scored(Looped):
    """With a loss."""

    def forward(self, x):
        return (super().forward(x) ** 2).mean()


def inputs(batch=4, alike=False):
    """Tokens that are all the same choose the same experts, so that others have none."""
    x = torch.randn(
        batch, 1 if alike else 6, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(batch)
    )
    return x.expand(batch, 6, HIDDEN).contiguous()


def made(loop, expert=Gated):
    torch.manual_seed(0)
    return Scored(loop, expert).double()


@pytest.mark.parametrize("expert", [Gated, plain])
@pytest.mark.parametrize("loop", ASKING)
def test_a_loop_that_leaves_out_who_has_nothing_is_one_op(loop, expert):
    model = made(ASKING[loop], expert)
    captured = capture(model, (inputs(),))
    assert sum(node.target is ops.experts for node in captured.gm.graph.nodes) == 1
    assert UNPICKED in captured.notes and not captured.evaluation.why and not captured.evaluation.differs
    for x in (inputs(3), inputs(2, alike=True)):
        wanted, (got, *_) = model(x), run_graph(captured.gm, model, {"x": x})
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
        theirs, mine = (
            torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) for loss in (wanted, got)
        )
        assert None not in mine and (None in theirs) == (x[0, 0] == x[0, 1]).all()
        for mine_, theirs_ in zip(mine, theirs, strict=True):
            torch.testing.assert_close(
                mine_, torch.zeros_like(mine_) if theirs_ is None else theirs_, rtol=1e-10, atol=1e-10
            )


def asking(ask, otherwise=lambda out, number: out, mask_of=lambda chosen, number: chosen == number):
    """A loop with a condition of its own, of a mask and of all of them."""

    def loop(hidden, gates, chosen, experts):
        out = torch.zeros_like(hidden)
        masks = [mask_of(chosen, number) for number in range(EXPERTS)]
        for number, expert in enumerate(experts):
            token, rank = torch.where(chosen == number)
            if ask(masks, number, token):
                out = out.index_add(0, token, expert(hidden[token]) * gates[token, rank, None])
            else:
                out = otherwise(out, number)
        return out

    return loop


def used(hidden, gates, chosen, experts):
    """A mean over the experts that were chosen."""
    out = any_(hidden, gates, chosen, experts)
    return out / sum(1 for number in range(EXPERTS) if (chosen == number).any())


def distinct(hidden, gates, chosen, experts):
    """One more for each of the numbers that there are."""
    for _ in chosen.unique():
        hidden = hidden + 1.0
    return hidden


def hits(hidden, gates, chosen, experts):
    """The same, of experts that are hit."""
    for _ in (torch.nn.functional.one_hot(chosen, EXPERTS).sum((0, 1)) > 0).nonzero():
        hidden = hidden + 1.0
    return hidden


def weighted(hidden, gates, chosen, experts):
    """Who was chosen, but by large gates: the others' tokens go nowhere."""
    counts = torch.bincount(chosen.flatten(), (gates.flatten() > 0.5).to(hidden.dtype), EXPERTS)
    out = torch.zeros_like(hidden)
    for number, expert in enumerate(experts):
        token, rank = torch.where(chosen == number)
        if counts[number] > 0:
            out = out.index_add(0, token, expert(hidden[token]) * gates[token, rank, None])
    return out


def by_parts(parts_of):
    """A loop that asks another part of the masks [experts, ranks, tokens]."""

    def loop(hidden, gates, chosen, experts):
        out = torch.zeros_like(hidden)
        parts = parts_of(torch.nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0))
        for number in range(len(parts)):
            token, rank = torch.where(chosen == number)
            if parts[number].any():
                out = out.index_add(0, token, experts[number](hidden[token]) * gates[token, rank, None])
        return out

    return loop


REFUSED = {
    "weights are counted": weighted,
    "masks of ranks": by_parts(lambda masks: masks.unbind(1)),
    "masks of tokens": by_parts(lambda masks: [masks.select(2, n) for n in range(EXPERTS)]),
    "masks of two experts": by_parts(lambda masks: masks.split(2)),
    "how many numbers": distinct,
    "how many are hit": hits,
    "few are left out": asking(lambda masks, number, token: len(token) > 3),
    "few by their sum": asking(lambda masks, number, token: masks[number].sum() > 3),
    "another expert's": asking(lambda masks, number, token: masks[number - 1].any()),
    "all of one": asking(lambda masks, number, token: masks[0].any()),
    "something else": asking(
        lambda masks, number, token: masks[number].any(), otherwise=lambda out, number: out + number
    ),
    "all are asked": asking(lambda masks, number, token: masks[number].all()),
    "of their values": asking(lambda masks, number, token: token[0] > 0),
    "changed through a view": asking(
        lambda masks, number, token: masks[number].view(-1).logical_not_().numel() and masks[number].any()
    ),
    "changed since": asking(lambda masks, number, token: masks[number].logical_not_().any()),
    "their number": used,
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_branches_are_refused_with_the_line(what):
    with pytest.raises(CaptureError, match=r"depends on (the values of a tensor|what tensors hold)"):
        capture(made(REFUSED[what]), (inputs(),))


def test_what_they_are_varied_from_is_taken():
    capture(made(asking(lambda masks, number, token: masks[number].any() and len(token))), (inputs(),))
    # who has no tokens adds nothing, and nobody else does
    nothing = capture(made(asking(lambda masks, number, token: not masks[number].any())), (inputs(),))
    assert not any(node.target is ops.experts for node in nothing.gm.graph.nodes)


class Masked(nn.Module):
    """No experts: a branch on a mask that changes nothing where nothing is masked, by a write or by a choice."""

    def __init__(self, written):
        super().__init__()
        self.linear, self.written = nn.Linear(HIDDEN, HIDDEN), written

    def forward(self, x, mask):
        x = self.linear(x)
        if mask.any():
            if self.written:
                x = x.clone()
                x[mask] = 0.0
            else:
                x = torch.where(mask[..., None], 0.0, x)
        return (x**2).mean()


def test_masks_without_experts():
    """What is proven is that nothing is written; that a choice by an empty mask chooses nothing is not known, and it is
    refused."""
    model, x, mask = Masked(written=True), torch.randn(4, 6, HIDDEN), torch.rand(4, 6) > 0.5
    captured = capture(model, (x, mask))
    for given_ in (mask, torch.zeros_like(mask)):
        torch.testing.assert_close(run_graph(captured.gm, model, {"x": x, "mask": given_})[0], model(x, given_))
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Masked(written=False), (x, mask))


@given(st.integers(1, 300))
def test_of_two_masks_one_set_has_the_first_alone(count):
    sets = list(_apart(count))
    where = [frozenset(i for i, masks in enumerate(sets) if mask in masks) for mask in range(count)]
    assert all(where) and not any(one <= other for one, other in itertools.permutations(where, 2))
    assert len(sets) <= 11


class Many(nn.Module):
    """More experts than pairs of a token and a choice, each asked for by its count."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 40, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, 4), nn.GELU(), nn.Linear(4, HIDDEN)) for _ in range(40)
        )

    def forward(self, x):
        hidden = x.view(-1, HIDDEN)
        gates, chosen = self.gate(hidden).softmax(-1).topk(2)
        return (ASKING["counted"](hidden, gates, chosen, self.experts) ** 2).mean()


def test_more_experts_than_there_are_choices():
    captured = capture(Many(), (torch.randn(2, 3, HIDDEN),))
    assert any(node.target is ops.experts for node in captured.gm.graph.nodes) and not captured.evaluation.why


class Second(nn.Module):
    """A loop that leaves out who has nothing, and behind it one of another kind."""

    def __init__(self, loop):
        super().__init__()
        self.first, self.second = Looped(any_), Looped(loop)

    def forward(self, x):
        return (self.second(x + self.first(x)) ** 2).mean()


@pytest.mark.parametrize("what", ["another expert's", "something else", "their number"])
def test_layers_behind_others_are_looked_at_too(what):
    """What masks hold there depends on what was left out before."""
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(Second(REFUSED[what]).double(), (inputs(),))
    captured = capture(Second(any_).double(), (inputs(),))
    assert sum(node.target is ops.experts for node in captured.gm.graph.nodes) == 2


class Smoothed(nn.Module):
    """Labels that are spread by hand: masks that are stacked, with numbers among the arguments of what is done to
    them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, x, labels):
        wanted = nn.functional.one_hot(labels, 4).to(x.dtype) * 0.9 + 0.1 / 4
        return (self.head(x).softmax(-1) - wanted).square().sum(dim=None)


def test_stacked_masks_may_be_multiplied_by_a_number():
    """Evaluation was refused: the number was taken for the dims of a sum."""
    assert not capture(Smoothed(), (torch.randn(8, HIDDEN), torch.arange(8) % 4)).evaluation.why
