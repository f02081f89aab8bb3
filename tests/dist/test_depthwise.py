"""Depthwise convolutions whose channels are cut, as the layers around them are (Mamba, Conformer): each rank has some
of the groups."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.capture import capture
from autopar.verify import case_of, verify
from tests.helpers.ranks import living
from tests.helpers.verify import Plan, Sizes, Subject, by_chance, by_recipe, by_stages, right

aten = torch.ops.aten
CHANNELS = 8


class Mixer(nn.Module):
    """A causal depthwise convolution between two layers, two channels of result for each of the next, and a transposed
    one that joins none."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.back = nn.Linear(4, CHANNELS), nn.Linear(2 * CHANNELS, 4)
        self.causal = nn.Conv1d(CHANNELS, CHANNELS, 4, groups=CHANNELS, padding=3)
        self.twice = nn.Conv1d(CHANNELS, 2 * CHANNELS, 3, groups=CHANNELS, padding="same", bias=False)
        self.up = nn.ConvTranspose1d(2 * CHANNELS, 2 * CHANNELS, 2, stride=2, groups=2 * CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.wide(x).transpose(1, 2)
        h = F.silu(self.causal(h)[..., : x.shape[1]])
        h = self.up(F.silu(self.twice(h)))
        return x.repeat_interleave(2, 1) + self.back(h.transpose(1, 2))


class Mixers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Mixer(), Mixer()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@cache
def subject() -> Subject:
    torch.manual_seed(0)
    model = Mixers()
    return Subject("mixers", "train", capture(model, (torch.randn(8, 6, 4),)), model.state_dict())


def planned(sizes: Sizes, how: str) -> Plan:
    who = subject()
    if how == "1f1b":
        return by_stages(who, sizes, "tp", 2, 2, how)
    wanted = {aten.conv1d.default: ("g", "g"), aten.conv1d.padding: ("h0+p0", "g")}
    return by_chance(who, sizes, 0, wanted) if how == "by chance" else by_recipe(who, sizes, how)


@pytest.mark.parametrize(("sizes", "how"), [((2,), "tp"), ((2, 2), "by chance"), ((2,), "1f1b")])
def test_equals_one_device(sizes: Sizes, how: str) -> None:
    who, made = subject(), planned(sizes, how)
    cut = {name: made.nodes[name].outs for name in made.nodes if name.endswith(("causal_weight", "up_weight"))}
    assert how == "by chance" or (cut and all("S0" in str(outs) for outs in cut.values())), cut
    torch.manual_seed(1)
    batch = {who.captured.input_names[0]: torch.randn(8, 6, 4)}
    right(verify(case_of(who.captured, made, who.weights, batch), ranks=living(made.ranks)))
