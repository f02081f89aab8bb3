"""Models whose samples are not along dim 0 of their inputs (sequences first): the dim that is named has them, for ranks
and for microbatches."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.capture import capture
from autopar.errors import AutoparError
from autopar.recipes import roles
from tests.helpers.verify import Subject, by_chance, by_recipe, by_stages, right

WORDS, WIDTH, POSITIONS, SAMPLES = 32, 16, 6, 8


class Encoder(nn.Module):
    """Classes of tokens, or of texts as a whole (`pooled`); blocks are `layers`."""

    def __init__(self, layers: list[nn.Module], *, pooled: bool = False) -> None:
        super().__init__()
        self.table, self.pooled = nn.Embedding(WORDS, WIDTH), pooled
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        h = self.table(ids)
        for layer in self.layers:
            h = layer(h)[0] if isinstance(layer, nn.LSTM) else layer(h)
        logits = self.head(h.mean(0) if self.pooled else h)
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten()), logits


def _made(how: str) -> Encoder:
    torch.manual_seed(0)
    if how == "recurrent":
        return Encoder([nn.LSTM(WIDTH, WIDTH) for _ in range(4)])
    dropout = 0.1 if how == "dropout" else 0.0
    return Encoder([nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout) for _ in range(4)], pooled=how == "pooled")


class Texts(Subject):
    def batch(self, batch: int = SAMPLES, seq: int = POSITIONS) -> dict[str, Tensor]:
        draw, pooled = torch.Generator().manual_seed(1), self.name == "pooled"
        ids = torch.randint(WORDS, (POSITIONS, batch), generator=draw)
        labels = torch.randint(WORDS, (batch,) if pooled else (POSITIONS, batch), generator=draw)
        return {"ids": ids, "labels": labels}


@cache
def _texts(how: str) -> Texts:
    both = {1: "b"} if how == "recurrent" else {0: "s", 1: "b"}
    named: dict[str, Any] = {"ids": both, "labels": {0: "b"} if how == "pooled" else both}
    model, ids = _made(how), torch.zeros(POSITIONS, SAMPLES, dtype=torch.long)
    captured = capture(model, (ids, ids[0] if how == "pooled" else ids), dynamic_shapes=named)
    return Texts(how, "train", captured, model.state_dict())


@pytest.mark.parametrize(
    ("how", "plan"),
    [
        ("tokens", "ddp"),
        ("pooled", "zero3"),
        ("tokens", "random 0"),
        *(
            pytest.param(how, plan, marks=pytest.mark.slow)
            for how in ("tokens", "pooled", "dropout", "recurrent")
            for plan in ("ddp", "zero1", "zero3", "tp", *(f"random {seed}" for seed in range(4)))
        ),
    ],
)
def test_ranks_have_samples_of_their_own(how: str, plan: str) -> None:
    who, number = _texts(how), plan.removeprefix("random ")
    made = by_chance(who, (2, 2), int(number)) if number != plan else by_recipe(who, (2,), plan)
    if plan in ("ddp", "zero1", "zero3"):
        cut = {"ids": "S1|-", "labels": "S0|-" if how == "pooled" else "S1|-"}
        assert {name: made.nodes[name].outs[0] for name in cut} == cut
    right(who.verified(made))


@pytest.mark.parametrize(
    ("how", "schedule", "role"),
    [
        ("tokens", "1f1b", roles.zero1),
        ("pooled", "gpipe", roles.zero2),
        ("recurrent", "zbv_zero_bubble", roles.data),
        ("dropout", "interleaved_1f1b", roles.tensor),
        *(
            pytest.param(how, schedule, role, marks=pytest.mark.slow)
            for how in ("tokens", "pooled", "dropout", "recurrent")
            for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble")
            for role in (roles.zero1, roles.zero3, roles.tensor)
        ),
    ],
)
def test_microbatches_have_samples_of_their_own(how: str, schedule: str, role: roles.Role) -> None:
    who, virtual = _texts(how), 1 if schedule in ("gpipe", "1f1b") else 2
    made = by_stages(who, (2,), (role,), 2, 4, schedule, virtual)
    assert made.nodes["ids"].micro == ("S1",)
    right(who.verified(made))


def test_a_pipeline_of_what_is_not_named_says_which_dim_to_name() -> None:
    ids = torch.zeros(POSITIONS, SAMPLES, dtype=torch.long)
    with pytest.raises(AutoparError) as error:
        autopar.compile(_made("tokens"), "cpu:1x2", (ids, ids), recipe="1f1b", time_limit_s=2.0)
    assert "Dim 0 of the inputs was taken for the samples" in str(error.value)
    assert "dynamic_shapes={'ids': {1: 'b'}, 'labels': {1: 'b'}}" in str(error.value)
    named = {"ids": {1: "b"}, "labels": {1: "b"}}
    made = autopar.compile(
        _made("tokens"), "cpu:1x2", (ids, ids), recipe="1f1b", dynamic_shapes=named, time_limit_s=2.0
    )
    assert made.plan.places == 2 and made.plan.microbatches > 1
