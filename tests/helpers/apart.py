"""Two places of two devices whose best layouts differ: the devices of one have little memory, the links of the other
are slow."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from autopar.capture import capture
from autopar.cluster import Cluster
from autopar.cluster.mixed import join
from autopar.joint.pricing import Pricing
from autopar.joint.search_context import SearchContext
from autopar.joint.shapes import Shape
from autopar.joint.spaces import SEARCH
from autopar.joint.staging import Found
from autopar.plan import Plan
from autopar.problem.settings import Settings
from autopar.request import Request
from tests.helpers.verify import Subject

WIDTH, HIDDEN, BLOCKS, ROWS = 64, 256, 8, 512


class Block(nn.Module):
    """Up and down."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    """Alike blocks and a squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((x - y) ** 2).mean()


class Stacked(Subject):
    """The captured stack, with batches of rows."""

    def batch(self, batch: int = ROWS, seq: int = 0) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        return {name: torch.randn(batch, WIDTH, generator=generator) for name in self.captured.input_names}


@cache
def stack() -> Stacked:
    """Captured once per process."""
    torch.manual_seed(0)
    model = Stack()
    return Stacked(
        "stack", "train", capture(model, (torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH))), model.state_dict()
    )


def small_and_slow(memory_bytes: float = 3.2e6, slow_bytes_s: float = 1e8) -> Cluster:
    """Two cores with so much memory and links that cost nothing; two with much memory and links of so many bytes per
    second."""
    base = Cluster.parse("cpu:1x2")
    device = replace(
        base.device, peak_flops=dict.fromkeys(base.device.peak_flops, 2e9), launch_s=1e-9, memory_bandwidth_bytes_s=1e12
    )
    levels = {
        rate: tuple(
            replace(
                level,
                bandwidth_bytes_s=rate,
                protocols=tuple(replace(p, start_s=1e-9, hop_s=1e-9, efficiency=1.0) for p in level.protocols),
            )
            for level in base.levels
        )
        for rate in (1e12, slow_bytes_s)
    }
    return join(
        [
            replace(base, name="small", device=replace(device, memory_bytes=int(memory_bytes)), levels=levels[1e12]),
            replace(base, name="slow", device=replace(device, memory_bytes=1 << 34), levels=levels[slow_bytes_s]),
        ]
    )


SHAPE = Shape(2, (2,), 8)


@cache
def found(cluster: Cluster, schedule: str = "1f1b") -> tuple[SearchContext, Found]:
    """The stack on two places of two devices, laid out alike."""
    context = SearchContext(
        stack().captured.gm, {"b": ROWS}, Request(cluster, Settings("train"), time_limit_s=math.inf)
    )
    pricing = Pricing(context, SEARCH)
    tables = [table for table in pricing.tables(SHAPE) if table.kind.schedule == schedule]
    return context, pricing.price(SHAPE, tables[:1], "none", exact=True)


def in_parts(made: Plan, parts: dict[str, dict[str, int]]) -> Plan:
    """The same plan with runs of blocks in parts, which begin where stages do; all parts are laid out as the run
    was."""

    def names(scope: str) -> list[str]:
        return [scope, *parts.get(scope, ())]

    nodes = {
        f"{name}/{rest}" if scope else rest: node
        for key, node in made.nodes.items()
        for scope, _, rest in [key.rpartition("/")]
        for name in names(scope)
    }
    stages = tuple(
        replace(
            stage,
            blocks=dict(_part(parts, scope, *at) for scope, at in stage.blocks.items()),
            again={_part(parts, scope, *stage.blocks[scope])[0]: n for scope, n in stage.again.items()},
        )
        for stage in made.stages
    )
    return replace(
        made,
        nodes=nodes,
        stages=stages,
        parted=parts,
        remat={name: kept for scope, kept in made.remat.items() for name in names(scope)},
    )


def _part(parts: dict[str, dict[str, int]], scope: str, first: int, stop: int) -> tuple[str, tuple[int, int]]:
    """The part of a run that the instances `[first, stop)` are in, and their numbers in it."""
    begins = {scope: 0, **parts.get(scope, {})}
    name = [name for name, begin in begins.items() if begin <= first][-1]
    return name, (first - begins[name], stop - begins[name])
