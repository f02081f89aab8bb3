"""Blocks that are run again on ranks that save different things: an empty shard, borders of other ranks. All ranks
begin and end at the same place."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.capture import capture
from autopar.errors import RunError
from autopar.runtime import Block, Mesh, keep, remat, skip
from autopar.runtime.algorithms import halo
from tests.helpers.ranks import on_ranks
from tests.helpers.remat import rematerialised
from tests.helpers.verify import Subject, by_chance, by_place

WIDTH, HEADS, SIDE = 16, 4, 8


class _Looks(nn.Module):
    """Attention without a product behind it: it is the last that saves anything, and torch's saves nothing of an empty
    shard."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.key, self.value = (
            nn.LayerNorm(WIDTH),
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)),
        )

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm(x)
        heads = [
            of(norm).unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2) for of in (self.query, self.key, self.value)
        ]
        return x + F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)


class _Blurs(nn.Module):
    """Two convolutions; where all is kept that can be, nobody needs the result of the first one again, but the second
    needs its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.Conv2d(3, 3, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(2.0 * self.first(x)))


class _Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.scale = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return (x - y).square().sum()


class _Drawn(Subject):
    """Inputs are random, of the width or the image of the model."""

    def batch(self, batch: int = 8, seq: int = 16) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(3)
        shape = (batch, seq, WIDTH) if self.name == "looks" else (batch, 3, SIDE, SIDE)
        return {
            name: torch.randn(shape, dtype=torch.float64, generator=generator) for name in self.captured.input_names
        }


def _drawn(name: str, kind: type[nn.Module], shape: tuple[int, ...], dims: dict[int, str]) -> Subject:
    torch.manual_seed(0)
    model = _Stack([kind() for _ in range(3)]).double()
    zeros = torch.zeros(shape, dtype=torch.float64)
    return _Drawn(name, "train", capture(model, (zeros, zeros), dynamic_shapes=((dims, dims), {})), model.state_dict())


@pytest.mark.parametrize("level", ["full", "selective"])
def test_a_rank_with_an_empty_shard_runs_the_same_collectives(level: str) -> None:
    """Rows of queries are cut, nine over four ranks; keys are gathered in front of the attention, which saves nothing
    on the last rank."""
    who = _drawn("looks", _Looks, (8, 16, WIDTH), {0: "b", 1: "s"})
    made = rematerialised(
        who, by_chance(who, (4,), 0, {torch.ops.aten.scaled_dot_product_attention.default: ("q",)}), level
    )
    report = who.verified(made, 8, 9)
    assert report.ok, report.first


@pytest.mark.parametrize("level", ["full", "selective", "all"])
def test_operators_with_an_algorithm_run_again_although_nobody_needs_their_results(level: str) -> None:
    """The borders of a convolution are part of what it saves: without them its weights' gradient would be wrong."""
    who = _drawn("blurs", _Blurs, (8, 3, SIDE, SIDE), {0: "b"})
    made = rematerialised(who, by_place(who, (2,)), level)
    source = who.case(made).source()
    assert "halo(" in source and not any(
        "halo(" in line for line in source.splitlines() if "keep(" in line or "skip(" in line
    )
    report = who.verified(made)
    assert report.ok, report.first


MESH = Mesh((2,), ("x",), "cpu")


class _Marked(Block):
    """A block whose borders would not be sent again."""

    mark = staticmethod(keep)

    def forward(self, x: Tensor) -> Tensor:
        return self.mark(lambda: halo(x, dim=2, axis=0, size=4, outs=4, reach=3, padding=1, mesh=MESH)).square()


def _communicates(mark: str) -> None:
    block = _Marked()
    block.mark = {"keep": keep, "skip": skip}[mark]  # type: ignore[method-assign]
    with pytest.raises(RunError, match=f"was called inside of {mark}"):
        remat(block, torch.randn(1, 1, 2, 4, requires_grad=True))


@pytest.mark.parametrize("mark", ["keep", "skip"])
def test_communication_whose_buffers_would_be_taken_for_results_is_an_error(mark: str) -> None:
    on_ranks(2, _communicates, mark)
