"""One encoder that is gone through twice, once without a gradient (agreement with what it says of other views, as UDA
asks for): its blocks are one run, and nothing of the second pass is moved, or counted, in the backward."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.plan import Plan
from autopar.problem.read_graph import read
from passes.part_runs import parts_at, whole_name
from tests.dist.test_peak import compared
from tests.helpers.remat import rematerialised
from tests.helpers.verify import Subject, planned, right

WORDS, WIDTH = 32, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(F.gelu(self.up(self.norm(h))))


class Agreement(nn.Module):
    """How far what it says of changed texts is from what it says of the texts."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Layer() for _ in range(3))

    def said(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        for layer in self.layers:
            h = layer(h)
        return F.linear(h, self.table.weight).log_softmax(-1)

    def forward(self, texts: Tensor, changed: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.said(texts)
        return F.kl_div(self.said(changed), wanted, log_target=True, reduction="batchmean")


class Texts(Subject):
    def batch(self, batch: int = 8, seq: int = 6) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(1)
        return {name: torch.randint(WORDS, (batch, seq), generator=draw) for name in self.captured.input_names}


@cache
def texts() -> Texts:
    torch.manual_seed(0)
    model, ids = Agreement(), torch.zeros(8, 6, dtype=torch.long)
    return Texts("agreement", "train", capture(model, (ids, ids)), model.state_dict())


def in_parts(made: Plan) -> tuple[Subject, Plan]:
    """The model with its run in parts of one and two blocks, and a plan of the whole run for it."""
    (run,) = (name for name, _ in texts().captured.gm.named_children())
    parts = parts_at(texts().captured.gm, {run: [1]})
    who = replace(texts(), captured=texts().captured.parted(parts), cases={}, references={})
    ops = read(who.captured.gm, made.hints, training=True, device="cpu").ops
    return who, replace(made, parted=parts, nodes={name: made.nodes[whole_name(name, parts)] for name in ops})


@pytest.mark.parametrize("level", ["none", "full", "random 1"])
def test_equals_one_device(level: str) -> None:
    right(texts().verified(rematerialised(texts(), planned(texts(), (2, 2), "random 0"), level), seq=6))


def test_parts_have_the_gradients_of_the_run() -> None:
    who, made = in_parts(planned(texts(), (2, 2), "random 1"))
    right(who.verified(rematerialised(who, made, "random 1"), seq=6))


@pytest.mark.parametrize("recipe", ["ddp", "zero3"])
def test_nothing_of_it_is_kept_for_a_backward(recipe: str) -> None:
    """Weights that are not gathered are detached there, as autograd would keep what it computes with them."""
    compared(texts(), planned(texts(), (2,), recipe), 0.1)
