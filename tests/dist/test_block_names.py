"""Blocks whose weights are not all below one module path: modules that alternate, and weights that a block reads from
elsewhere."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from autopar.capture import capture
from autopar.verify import Case, Report, case_of
from passes.fold_repeats import body_of
from tests.helpers.verify import Subject, by_stages, planned, verified

DEPTH = 6


class Wide(nn.Module):
    """Two linear maps and a batch norm, which has buffers that change."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)).relu())


class Narrow(nn.Module):
    """One map; its names begin with a number, as those of a block of several modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.steps(x)


class Alternating(nn.Module):
    """Wide, narrow, wide, narrow, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Narrow() if i % 2 else Wide() for i in range(DEPTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x - y) ** 2).mean()


class Scaled(nn.Module):
    """A map of its own, and a scale that somebody else holds."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.map(x) * scale)


class Lending(nn.Module):
    """Every block reads a weight that is in no block."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(DEPTH))
        self.scales = nn.ParameterList(nn.Parameter(torch.full((8,), 0.5 + i)) for i in range(DEPTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = layer(x, scale)
        return ((x - y) ** 2).mean()


class Leaning(nn.Module):
    """Every block reads its own weight and that of the block behind it, by the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(DEPTH + 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer, after in zip(self.layers[:-1], self.layers[1:], strict=True):
            x = layer(x, after.map.bias)
        return ((x - y) ** 2).mean()


class Adding(nn.Module):
    """The top module adds up what a map that is in no block makes of every block's result, and more of them `behind`
    the loss."""

    def __init__(self, behind: bool = False) -> None:
        super().__init__()
        self.behind = behind
        self.layers, self.probe = nn.ModuleList(Narrow() for _ in range(DEPTH)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total, parts = x.new_zeros(()), []
        for layer in self.layers:
            x = layer(x)
            total = total + self.probe(x).square().mean()
            parts.append(x.square().mean())
        loss = ((x - y) ** 2).mean() + 0.1 * total
        for part in parts if self.behind else ():
            loss = loss + 0.1 * part
        return loss


MODELS = {
    "alternating": Alternating,
    "lending": Lending,
    "leaning": Leaning,
    "adding": Adding,
    "adding behind": lambda: Adding(behind=True),
}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Samples and targets."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 8, generator=generator, dtype=torch.float64), torch.randn(
        8, 8, generator=generator, dtype=torch.float64
    )


@cache
def subject(name: str) -> Subject:
    """A model, captured."""
    torch.manual_seed(0)
    model = MODELS[name]().double()
    captured = capture(model, batch())
    return Subject(name, "train", captured, model.state_dict())


def case(name: str, how: str) -> Case:
    """A model on two ranks."""
    who = subject(name)
    return case_of(who.captured, planned(who, (2,), how), who.weights, dict(zip(("x", "y"), batch(), strict=True)))


def right(name: str, report: Report) -> None:
    """Every parameter and buffer is compared under its original name."""
    assert report.ok, (report.first, report.worst)
    names = {row.name for row in report.rows if row.kind in ("parameter", "buffer")}
    assert names == set(subject(name).weights)


def test_pairs_of_modules_are_one_block() -> None:
    (call,) = (n for n in subject("alternating").captured.gm.graph.nodes if "repeat" in n.meta)
    assert (call.meta["repeat"], body_of(call).meta["period"]) == (DEPTH // 2, 2)


@pytest.mark.parametrize(("name", "repeat", "carried"), [("adding", DEPTH, 2), ("adding behind", DEPTH - 1, 3)])
def test_sums_over_the_blocks_are_carried(name: str, repeat: int, carried: int) -> None:
    (call,) = (n for n in subject(name).captured.gm.graph.nodes if "repeat" in n.meta)
    assert (call.meta["repeat"], len(call.meta["val"])) == (repeat, carried)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("how", ["zero3", "random 0"])
def test_names(name: str, how: str) -> None:
    right(name, verified(case(name, how)))


@pytest.mark.parametrize(
    ("name", "microbatches", "schedule"),
    [
        ("alternating", 1, "naive"),
        ("lending", 2, "1f1b"),
        ("leaning", 2, "interleaved_1f1b"),
        ("adding", 2, "1f1b"),
        ("adding behind", 2, "interleaved_1f1b"),
    ],
)
def test_names_in_stages(name: str, microbatches: int, schedule: str) -> None:
    who = subject(name)
    made = by_stages(who, (2,), "zero3", 2, microbatches, schedule, 2 if schedule.startswith("inter") else 1)
    right(name, verified(case_of(who.captured, made, who.weights, dict(zip(("x", "y"), batch(), strict=True)))))
