"""A small planned model for tests of reports: four alike blocks and a head, on four CPU ranks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import fx, nn

from autopar.cluster import Cluster
from autopar.onestage import plan
from autopar.plan import Plan
from autopar.planner import Planner
from autopar.problem.build import Model
from autopar.problem.graph import Program
from autopar.recipes import roles
from autopar.request import Request
from passes import ANNOTATE, NORMALIZE, run
from tests.helpers.export import B, export_graph

BATCH = 2048  # planned for: as many activations as weights, so that no recipe degenerates


class Block(nn.Module):
    """An MLP with a norm and a residual."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks, a head and a squared error."""

    def __init__(self, hidden: int = 512, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return ((self.head(x) - y) ** 2).sum()


@dataclass(frozen=True)
class Planned:
    """A plan with its graph, and the free Problem on its mesh."""

    gm: fx.GraphModule
    plan: Plan
    program: Program
    model: Model


@cache
def graph(layers: int = 4) -> fx.GraphModule:
    """The captured stack."""
    gm = export_graph(Stack(layers=layers), (torch.zeros(16, 512), torch.zeros(16, 8)), dims=({0: B}, {0: B}))
    gm.meta["outputs"] = [{"name": "loss", "kind": "loss", "target": ""}]
    return run(run(gm, NORMALIZE), ANNOTATE)


@cache
def planned(
    recipe: str | None = None, mesh: tuple[int, ...] | None = None, batch: int = BATCH, remat: str = "auto"
) -> Planned:
    """The stack planned for `cpu:1x4`, searched or by a recipe."""
    request = Request(Cluster.parse("cpu:1x4"), recipe=recipe, mesh=mesh, time_limit_s=10.0, remat=remat)
    made = plan(graph(), {"b": batch}, request, model="stack", graph_hash="0" * 64)
    planner = Planner.of(graph(), made.hints, request)
    return Planned(
        graph(), made, planner.program, planner.model(made.mesh, (roles.anything,) * len(made.mesh), "explain")
    )
